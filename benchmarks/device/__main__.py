"""`python -m benchmarks.device`: one run on a machine with a CUDA device, without a network, in under 8 minutes.

It ends in a table and one line of JSON, and writes that line to benchmarks/results/device-<name>-<date>.json. With
--tiles it times other tiles of attention and of the exact linear beside those that ship, and writes
device-tiles-<name>-<date>.json. With --loop it runs the engine on a synthetic pair of 8 B and 0.6 B parameters instead,
in under 9 minutes, and writes device-loop-<name>-<date>.json and a picture. With --smoke it tries itself on tiny
shapes, without a GPU: no figure of speed, and no file. With --model it adds up, on any machine, what the kernels'
bytes, flops and launches are on a named GPU, whose constants are inputs, and draws where speculation pays; --check
holds the sums against this CPU's passes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.device import attention_speed, exactness, kernel_errors, linear_speed, loop, model, rollback, tiles
from benchmarks.device.pass_model import GPUS
from benchmarks.device.scale import FULL, SMOKE, Scale
from benchmarks.device.timing import Timer
from benchmarks.environment import ROOT, environment
from specpaged.metrics import STAGES
from specpaged_kernels import limits

RESULTS = ROOT / "benchmarks" / "results"
console = Console(width=160)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run every section; a section that fails is reported and the others go on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in Triton's interpreter, nothing is timed")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--loop", action="store_true", help="the engine end to end, on a synthetic pair")
    instead.add_argument("--tiles", action="store_true", help="which tiles are quick here")
    parser.add_argument("--only", help="of the sections, these alone: names with commas between them")
    of_model = parser.add_argument_group("--model", "a model of a GPU, never a measurement")
    of_model.add_argument("--model", action="store_true", help="where speculation pays, by bytes, flops and launches")
    of_model.add_argument("--gpu", choices=sorted(GPUS), default="H100-SXM", help="whose stated constants (default)")
    of_model.add_argument("--bandwidth", type=float, help="bytes/s, in place of the GPU's own")
    of_model.add_argument("--flops", type=float, help="flops/s likewise")
    of_model.add_argument("--launch", type=float, help="seconds of a launch likewise")
    of_model.add_argument("--share", type=float, default=0.75, help="of bandwidth and flops that kernels reach")
    of_model.add_argument("--check", action="store_true", help="measure this CPU's passes beside the same sums")
    options = parser.parse_args(arguments)
    if options.model:
        return _model(options)
    if options.smoke != limits.interpreted():
        parser.error("--smoke and TRITON_INTERPRET=1 go together: the interpreter times nothing")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; allowed: a machine with one, or --smoke with TRITON_INTERPRET=1")
    scale, timer = (SMOKE, None) if options.smoke else (FULL, Timer())
    result: dict[str, Any] = {"device": _device(scale.on_gpu), "environment": environment(torch.get_num_threads())}
    sections: dict[str, Callable[[], Any]] = {}
    if timer is not None:
        sections["bandwidth"] = lambda: {"copy": timer.copy_bandwidth(), "read": timer.read_bandwidth()}
    if options.loop:
        of_loop = loop.FULL if scale.on_gpu else loop.SMOKE
        tools = loop.tools_of_cuda() if scale.on_gpu else loop.Tools()
        sections["loop"] = lambda: loop.run(of_loop, result.get("bandwidth", {}).get("read"), tools)
    elif options.tiles:
        sections["tiles"] = lambda: tiles.run(scale, timer)
    else:
        sections["kernel_errors"] = lambda: kernel_errors.run(scale)
        sections["exactness"] = lambda: exactness.run(scale)
        sections["attention"] = lambda: attention_speed.run(scale, timer)
        if timer is not None:
            sections["linear"] = lambda: linear_speed.run(scale, timer)
            sections["end_to_end"] = lambda: exactness.end_to_end(scale)
        sections["rollback"] = lambda: rollback.run(scale)
    kind = "device-loop" if options.loop else "device-tiles" if options.tiles else "device"
    chosen = list(sections) if options.only is None else options.only.split(",")
    if not sections.keys() >= set(chosen):
        parser.error(f"--only {options.only!r} names other sections; allowed: {', '.join(sections)}")
    for name, run in ((name, sections[name]) for name in chosen):
        start = time.perf_counter()
        console.print(f"[dim]{name} ...[/]", end=" ")
        try:
            result[name] = run()
        except Exception as error:  # the rest of the run is worth having
            result[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        console.print(f"{'failed' if 'failed' in result[name] else 'done'}, {time.perf_counter() - start:.0f} s")
        if scale.on_gpu:  # now: whatever stops the run later
            _write(result, options.out, kind)
            torch.cuda.empty_cache()
    _print_tables(result, scale)
    print(json.dumps(result))
    return result


def _model(options: argparse.Namespace) -> dict[str, Any]:
    """The sums, as a table, a picture and a line of JSON."""
    stated = {
        "bytes_per_second": options.bandwidth,
        "flops_per_second": options.flops,
        "launch_seconds": options.launch,
    }
    machine = replace(GPUS[options.gpu], **{name: value for name, value in stated.items() if value is not None})
    if not 0 < options.share <= 1:
        raise ValueError(f"share={options.share!r} must be in (0, 1]")
    result = model.run(machine, options.share)
    if options.check:
        result["this CPU"] = model.check() | {"environment": environment(torch.get_num_threads())}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"device-model-{options.gpu.lower()}.json"
    path.write_text(json.dumps(result) + "\n")
    model.draw(result, path.with_suffix(".png"))
    console.print(model.table(result))
    if options.check:
        console.print_json(data=result["this CPU"])
    print(json.dumps({"is": result["is"], "inputs": result["inputs"], "file": path.name}))
    return result


def succeeded(result: dict[str, Any]) -> bool:
    """Whether every section ran, all of it, and every check of exactness holds."""
    if "cells" in result:  # a model: there is nothing to succeed at
        return True
    if any("failed" in section for section in result.values()):
        return False
    if "loop" in result:
        loop_result = result["loop"]
        return loop_result["identical"]["exact"] and bool(loop_result["cells"]) and not loop_result["left_out"]
    same = [check for checks in result.get("exactness", {}).values() for check in checks.values()]
    runs = result.get("end_to_end", {}).values()
    return all(same) and all(run["identical"] == run["prompts"] for run in runs)


def _write(result: dict[str, Any], folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", result["device"]["name"].lower()).strip("-")
    path = folder / f"{kind}-{device}-{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps(result) + "\n")
    if "cells" in result.get("loop", {}):
        loop.draw(result["loop"], path.with_suffix(".png"))


def _device(on_gpu: bool) -> dict[str, Any]:
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if not on_gpu:
        return {"name": "Triton's interpreter", **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        **versions,
    }


def _print_tables(result: dict[str, Any], scale: Scale) -> None:
    for name in ("kernel_errors", "exactness", "end_to_end"):
        if name in result:
            console.print(f"[bold]{name}[/]")
            console.print_json(data=result[name])
    bandwidth = result.get("bandwidth", {}).get("read")
    if "cells" in result.get("loop", {}):
        console.print(_loop_table(result["loop"]))
    if bandwidth and isinstance(result.get("attention"), list):
        console.print(f"bandwidth: copy {result['bandwidth']['copy'] / 1e9:.0f} GB/s, read {bandwidth / 1e9:.0f} GB/s")
        console.print(_attention_table(result["attention"], bandwidth))
    if isinstance(result.get("linear"), list):
        console.print(_linear_table(result["linear"]))
    for kind, entries in result.get("tiles", {}).items():
        if kind != "failed":
            console.print(_tiles_table(kind, entries))
    if "rows" in result.get("rollback", {}):
        rollback.print_table(result["rollback"], scale, console)


def _loop_table(result: dict[str, Any]) -> Table:
    title = f"{result['pair']}; {result['dtype']}, context {result['context_len']}"
    table = Table(title=title, caption="ms a step; a stage that waits for the device holds its time")
    columns = ("B", "numerics", "way", "K", "tokens/s", "step", "host", "floor", "idle", *STAGES, "on the device",
               "acceptance", "x plain")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    plain = {}
    for cell in result["cells"]:
        key = (cell["B"], cell["numerics"], cell["way"])
        plain.setdefault(key, cell["tokens_per_second"])  # K = 0 comes first
        acceptance = cell["acceptance_rate"]
        table.add_row(
            *(str(cell[name]) for name in ("B", "numerics", "way", "K")),
            f"{cell['tokens_per_second']:.0f}", f"{cell['step_ms']['median']:.2f}",
            f"{cell['host_ms']:.2f}" if "host_ms" in cell else "-",
            f"{cell['floor_ms']:.2f}" if "floor_ms" in cell else "-",
            "-" if cell.get("idle_share") is None else f"{cell['idle_share']:.0%}",
            *(f"{cell['stage_ms'][stage]:.2f}" for stage in STAGES),
            _on_device(cell),
            "-" if acceptance is None else f"{acceptance:.0%}",
            f"{cell['tokens_per_second'] / plain[key]:.2f}",
        )  # fmt: skip
    return table


def _on_device(cell: dict[str, Any]) -> str:
    """The device's own milliseconds of each stage, over the floor of those that have one."""
    floors = cell.get("stage_floor_ms", {})
    stages = cell.get("device_ms", {}).items()
    return ", ".join(f"{name} {ms:.2f}" + (f" / {floors[name]:.2f}" if name in floors else "") for name, ms in stages)


def _attention_table(entries: list[dict[str, Any]], bandwidth: float) -> Table:
    names = list(entries[0]["neighbours"])
    table = Table(title="paged attention, bfloat16; us, and the share of the measured bandwidth of reads")
    for column in ("group", "B", "context", "q_len", "ours", "GB/s", "share", *names):
        table.add_column(column, justify="right")
    for entry in entries:
        seconds = entry["ours"]["median"]
        speed = entry["kv_bytes"] / seconds
        others = [entry["neighbours"][name].get("median") for name in names]
        table.add_row(
            *(str(entry[key]) for key in ("group", "B", "context", "q_len")),
            f"{seconds * 1e6:.0f}", f"{speed / 1e9:.0f}", f"{speed / bandwidth:.0%}",
            *("-" if other is None else f"{other * 1e6:.0f}" for other in others),
        )  # fmt: skip
    return table


def _tiles_table(kind: str, entries: list[dict[str, Any]]) -> Table:
    """The quickest, and what ships."""
    table = Table(title=f"tiles of {kind}; us", caption="(B, context, query tokens), or rows")
    shapes = list(entries[0]["us"])
    for column in ("of", *entries[0]["tiles"], *shapes, "x the least"):
        table.add_column(column, justify="right")
    of = "group" if kind == "attention" else "weight"
    for name in dict.fromkeys(entry[of] for entry in entries):
        mine = [entry for entry in entries if entry[of] == name]
        for i, entry in enumerate(mine):
            if i < 8 or "ships" in entry:
                table.add_row(
                    str(name), *map(str, entry["tiles"].values()), *(f"{entry['us'][shape]:.0f}" for shape in shapes),
                    f"{entry['over_least']:.2f}{' ships' if 'ships' in entry else ''}",
                )  # fmt: skip
        table.add_section()
    return table


def _linear_table(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="exact linear, all of a Qwen3-8B pass, bfloat16; ms", caption="by shape: cuBLAS / ours")
    shapes = list(entries[0]["shapes"])
    for column in ("M", "ours", "cuBLAS", "cuBLAS / ours", *shapes):
        table.add_column(column, justify="right")
    for entry in entries:
        ratios = (entry["shapes"][name]["stock"]["median"] / entry["shapes"][name]["ours"]["median"] for name in shapes)
        ours, stock = entry["ours"], entry["stock"]
        table.add_row(
            str(entry["M"]), f"{ours * 1e3:.2f}", f"{stock * 1e3:.2f}", f"{stock / ours:.2f}",
            *(f"{ratio:.2f}" for ratio in ratios),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(0 if succeeded(main()) else 1)

"""`python -m benchmarks.vllm_serving`: vLLM with its own CPU worker and with ours, plain, with a draft, with n-grams.

One pair, the same prompts and threads, streamed through vLLM's AsyncLLM (its engine core in a process of its own, no
HTTP). Each contender is a process of its own; they serve in turns, a few seconds each, in an order that rotates, while
the others wait. Of our worker's time it is said how much was our own steps; the rest is vLLM's engine, which is there
whatever the worker. Prints a table, draws a picture where matplotlib is there, and ends in one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

CONTENDERS = ("vllm plain", "vllm draft_model", "vllm ngram", "ours plain", "ours draft_model", "ours ngram")
# Ours, which decides in every step, beside every K: a number behind the method is a fixed one. With 0, requests ask for
# no drafts: what vLLM itself takes for asking, in every step, a worker that may draft.
DECISIONS = ("ours plain", *(f"ours draft_model {k}" for k in (0, 1, 2, 4)), "ours draft_model")
MAX_MODEL_LEN = 512
_RATIOS = ("over_vllm", "over_vllm_plain", "over_plain")
KV_BYTES = 512 << 20
_STRIDE = 37  # between the lengths of neighbouring outputs
_WARM_UP = 4  # concurrency, before the first round


def engine_arguments(contender: str, job: dict[str, Any]) -> dict[str, Any]:
    """Of vLLM, for one contender."""
    from specpaged.vllm_plugin import WORKER_CLS

    worker, method, *fixed = contender.split()
    num_speculative_tokens = (int(fixed[0]) if fixed else 0) or job["num_speculative_tokens"]
    arguments: dict[str, Any] = {
        "model": job["target"],
        "skip_tokenizer_init": job["prompts"] is not None,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max(job["concurrency"]),
        "kv_cache_memory_bytes": KV_BYTES,
        "enable_prefix_caching": False,
    }
    if worker == "ours":
        arguments["worker_cls"] = WORKER_CLS
    if method == "draft_model":
        arguments["speculative_config"] = {
            "method": method, "model": job["draft"], "num_speculative_tokens": num_speculative_tokens
        }  # fmt: skip
        if fixed:
            arguments["additional_config"] = {"specpaged": {"adaptive": False}}
    elif method == "ngram":
        arguments["speculative_config"] = {
            "method": method, "num_speculative_tokens": num_speculative_tokens, "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }  # fmt: skip
    return arguments


async def serve(job: dict[str, Any]) -> None:
    """One contender: for each line of the input, a level of concurrency, a line of what its requests took and got."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    from specpaged.prompts import load_prompts

    if job["prompts"] is None:
        prompts = [record.text for record in load_prompts(None)]
    else:
        prompts = [{"prompt_token_ids": token_ids} for token_ids in job["prompts"]]
    prompts = [prompts[i % len(prompts)] for i in range(job["num_prompts"])]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(job["contender"], job)))

    def params_of(i: int) -> SamplingParams:
        # Outputs of one length would make plain decoding, and it alone, prefill all prompts of a batch in one pass.
        return SamplingParams(
            temperature=0,
            max_tokens=job["max_tokens"] // 2 + i * _STRIDE % job["max_tokens"],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"num_speculative_tokens": 0} if job["contender"].endswith(" 0") else None,
            detokenize=job["prompts"] is None,
        )

    async def complete(i: int, prompt: str, room: asyncio.Semaphore) -> dict[str, Any]:
        async with room:
            start = last = time.perf_counter()
            token_ids: list[int] = []
            gaps: list[float] = []
            async for output in engine.generate(prompt, params_of(i), f"{time.monotonic()}-{i}"):
                now, new = time.perf_counter(), list(output.outputs[0].token_ids)
                if token_ids:
                    gaps += [(now - last) / len(new)] * len(new) if new else []
                else:
                    first = now - start
                token_ids += new
                last = now
            return {"token_ids": token_ids, "first": first, "gaps": gaps}

    def counters() -> tuple[float, float, float]:
        values = {metric.name: metric.value for metric in get_metrics_snapshot() if hasattr(metric, "value")}
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # the worker's, which is another process
        seconds = sum(
            sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name == "specpaged:stage_seconds_total"
        )
        return (*(values.get(name, 0) for name in names), seconds)

    async def complete_all(level: int) -> dict[str, Any]:
        room = asyncio.Semaphore(level)
        before, start = counters(), time.perf_counter()
        of_level = enumerate(prompts[: _num_prompts(level)])
        outputs = await asyncio.gather(*(complete(i, prompt, room) for i, prompt in of_level))
        seconds = time.perf_counter() - start
        drafted, accepted, stage_seconds = (b - a for a, b in zip(before, counters(), strict=True))
        gaps = sorted(gap for output in outputs for gap in output["gaps"])
        cuts = quantiles(gaps, n=100, method="inclusive")
        return {
            "tokens_per_second": sum(len(output["token_ids"]) for output in outputs) / seconds,
            "first_token_ms": 1e3 * median(output["first"] for output in outputs),
            "between_p50_ms": 1e3 * cuts[49],
            "between_p99_ms": 1e3 * cuts[98],
            "acceptance": accepted / drafted if drafted else None,
            "our_steps": stage_seconds / seconds if stage_seconds else None,
            "token_ids": [output["token_ids"] for output in outputs],
        }

    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await complete_all(int(line))), flush=True)
    engine.shutdown()


def _num_prompts(level: int) -> int:
    """Of a turn: enough that most of it is at full concurrency."""
    return max(16, 4 * level)


class Contender:
    """Serves in a process of its own, as often as it is asked to."""

    def __init__(self, job: dict[str, Any], threads: int, folder: Path):
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "PROMETHEUS_MULTIPROC_DIR": str(folder),
        }
        self.name = job["contender"]
        self._errors = folder / "errors.txt"
        command = [sys.executable, "-m", "benchmarks.vllm_serving", "--job", json.dumps(job)]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def serve(self, level: int) -> dict[str, Any]:
        """A turn at this concurrency. RuntimeError, with what it said last, if the process has ended."""
        with suppress(BrokenPipeError):  # the reading below says it
            print(level, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):  # vLLM may print, too
                return json.loads(line)
        raise RuntimeError(f"{self.name} failed:\n{self._errors.read_text()[-3000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def summary(rounds: list[dict[str, dict[str, Any]]], levels: list[int]) -> list[dict[str, Any]]:
    """A row for each concurrency and contender: medians of the rounds, and ratios taken within a round."""
    rows = []
    contenders = list(rounds[0])
    for level in map(str, levels):
        for contender in contenders:
            runs = [of_round[contender][level] for of_round in rounds]
            speeds = [run["tokens_per_second"] for run in runs]
            row = {"concurrency": int(level), "contender": contender, "min": min(speeds), "max": max(speeds)}
            for name in ("tokens_per_second", "first_token_ms", "between_p50_ms", "between_p99_ms"):
                row[name] = median(run[name] for run in runs)
            row["acceptance"] = runs[0]["acceptance"]
            row["our_steps"] = median(run["our_steps"] for run in runs) if runs[0]["our_steps"] is not None else None
            method = contender.split()[1]
            for name, other in (
                ("over_vllm", f"vllm {method}"), ("over_vllm_plain", "vllm plain"), ("over_plain", "ours plain")
            ):  # fmt: skip
                ratios = [
                    run["tokens_per_second"] / of_round[other][level]["tokens_per_second"]
                    for run, of_round in zip(runs, rounds, strict=True)
                    if other in of_round
                ]
                row[name] = median(ratios) if ratios else None
            plain = rounds[0]["ours plain"][level]["token_ids"]
            row["identical"] = sum(a == b for a, b in zip(runs[0]["token_ids"], plain, strict=True)) / len(plain)
            rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """As a reader compares: by concurrency."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="vLLM on a CPU: its own worker and ours",
        caption="medians of the rounds, ratios within a round; between: of tokens, those of one chunk share its time; "
        "our steps: share of the time, the rest is vLLM's; identical: outputs equal to ours plain",
    )
    for name in ("at once", "worker", "tokens/s", "min-max", "x vllm's", "x vllm plain", "x ours plain", "first ms",
                 "between P50", "P99 ms", "accepted", "our steps", "identical"):  # fmt: skip
        table.add_column(name, justify="left" if name == "worker" else "right")
    contenders = {row["contender"] for row in rows}
    for i, row in enumerate(rows):
        ratios = ("" if row[name] is None else f"{row[name]:.2f}" for name in _RATIOS)
        accepted, our_steps = ("" if row[name] is None else f"{row[name]:.1%}" for name in ("acceptance", "our_steps"))
        table.add_row(
            str(row["concurrency"]), row["contender"], f"{row['tokens_per_second']:.0f}",
            f"{row['min']:.0f}-{row['max']:.0f}", *ratios,
            f"{row['first_token_ms']:.1f}", f"{row['between_p50_ms']:.2f}", f"{row['between_p99_ms']:.2f}", accepted,
            our_steps, f"{row['identical']:.0%}", end_section=(i + 1) % len(contenders) == 0,
        )  # fmt: skip
    Console(width=140).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second by concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    levels = list(dict.fromkeys(row["concurrency"] for row in rows))
    for offset, contender in enumerate(dict.fromkeys(row["contender"] for row in rows)):
        own = [row for row in rows if row["contender"] == contender]
        places = [i + (offset - 2.5) * 0.13 for i in range(len(levels))]
        spans = [[row["tokens_per_second"] - row["min"] for row in own],
                 [row["max"] - row["tokens_per_second"] for row in own]]  # fmt: skip
        axes.bar(places, [row["tokens_per_second"] for row in own], 0.13, yerr=spans, capsize=2, label=contender)
    axes.set_xticks(range(len(levels)), [f"{level} at once" for level in levels])
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


def main(
    concurrency: str = typer.Option("1,8,32", help="Requests at once, with commas between them."),
    max_tokens: int = typer.Option(
        128, min=2, help="Of an output in the mean: from half to one and a half of it, and nothing ends one earlier."
    ),
    num_speculative_tokens: int = typer.Option(4, min=1, help="Draft tokens per round; with ours, at most."),
    decisions: bool = typer.Option(False, help="Our worker alone: plain, K = 0, 1, 2, 4, and decided in every step."),
    pair: str = typer.Option("embedded", help="Or a synthetic one, by its name in benchmarks/adaptive/pairs.py."),
    rounds: int = typer.Option(9, min=1, help="Turns of every contender at every concurrency."),
    threads: int = typer.Option(1, min=1, help="CPU threads of a pass."),
    out: Annotated[Path | None, typer.Option(help="A folder for the JSON and the picture.")] = None,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure."""
    if job is not None:
        asyncio.run(serve(json.loads(job)))
        return
    from tqdm import tqdm

    from benchmarks.adaptive.pairs import make_pair
    from benchmarks.environment import environment

    levels = [int(level) for level in concurrency.split(",")]
    num_prompts = max(map(_num_prompts, levels))
    settings = {
        "concurrency": levels,
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "num_speculative_tokens": num_speculative_tokens,
        "pair": pair,
    }
    names = DECISIONS if decisions else CONTENDERS
    played: list[dict[str, dict[str, Any]]] = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        made = make_pair(pair, Path(folder), num_prompts)
        prompts = None if pair == "embedded" else made.prompts  # those of random models are token ids
        job_of_all = settings | {"target": made.target, "draft": made.speculative["model"], "prompts": prompts}
        contenders = []
        for i, name in enumerate(tqdm(names, unit="start")):  # one by one: what is measured in loading is to be quiet
            own = Path(folder) / f"contender-{i}"
            own.mkdir()
            contender = Contender(job_of_all | {"contender": name}, threads, own)
            stack.callback(contender.close)
            contender.serve(_WARM_UP)
            contenders.append(contender)
        for i in tqdm(range(rounds), unit="round"):
            of_round: dict[str, dict[str, Any]] = {name: {} for name in names}
            first = i % len(contenders)
            for level in levels:
                for contender in [*contenders[first:], *contenders[:first]]:
                    of_round[contender.name][str(level)] = contender.serve(level)
            played.append(of_round)
    rows = summary(played, levels)
    print_table(rows)
    results = environment(threads) | {"study": "vllm_serving", "settings": settings | {"rounds": rounds}, "rows": rows}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "vllm_serving.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(rows, out / "vllm_serving.png")
    print(json.dumps(results))


if __name__ == "__main__":
    typer.run(main)

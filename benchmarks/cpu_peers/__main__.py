"""`python -m benchmarks.cpu_peers`: ours beside OpenVINO GenAI and llama.cpp, the same token ids, greedy.

Every contender is a process of its own, loaded once; they take turns in every round. Ends in a table, a picture and one
line of JSON. What cannot be had is named, and left out. `make bench-peers` makes the environment that the others need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.cpu_peers.worker import Job
from benchmarks.environment import ROOT, environment

OURS = "ours"
PREFILL = "prefill"
ROUNDS, PROMPTS, OUTPUT_LEN = {1: 7, 8: 5, 32: 3}, {1: 4, 8: 16, 32: 32}, 128
NUM_DRAFTS = {1: 5, 8: 2, 32: 2}  # of those that do not decide themselves
PROMPT_LENS, PREFILL_LEN = (64, 112), 1000
app = typer.Typer(add_completion=False)


class Contender:
    """A process that decodes."""

    def __init__(self, name: str, python: str, job: Job):
        self.name, self.job = name, job
        environ = os.environ | {"OMP_NUM_THREADS": str(job.threads), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.cpu_peers.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ,
        )  # fmt: skip
        answer = self._ask(asdict(job))
        self.missing: str | None = answer.get("missing")
        self.version: str | None = answer.get("version")

    def decode(self, prompts: Sequence[Sequence[int]], batch_size: int, output_len: int) -> tuple[list, float]:
        """Outputs, and seconds."""
        answer = self._ask({"prompts": prompts, "batch_size": batch_size, "output_len": output_len})
        return answer["token_ids"], answer["seconds"]

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"missing": f"its process ended with status {self._process.wait()}"}


@app.command()
def main(
    target: Annotated[
        str | None, typer.Option(help="A checkpoint of Qwen3's family; default: the embedded one.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft.")] = None,
    python: Annotated[str, typer.Option(help="The interpreter that has the others' packages.")] = sys.executable,
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench JSONL; default: the sample prompts.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(map(str, ROUNDS)),
    threads: int = 1,
    rounds: Annotated[int | None, typer.Option(help="Of each batch size; by default 7 to 3.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/peers"),
) -> None:
    """Measure, and show it all."""
    from benchmarks.cpu_peers.show import draw, print_table
    from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
    from specpaged.modeling.loading import load_tokenizer
    from specpaged.prompts import load_prompts

    sizes = [int(size) for size in batch_sizes.split(",")]
    target, draft = target or EMBEDDED_TARGET, draft or EMBEDDED_DRAFT
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts(prompts)]
    least, most = PROMPT_LENS
    pool = [ids[:most] for ids in texts if len(ids) >= least]
    long = [id for ids in texts for id in ids][:PREFILL_LEN]
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = environment(threads) | {"versions": {}, "missing": {}, "cells": {}}
    with tempfile.TemporaryDirectory() as converted:
        job = Job(OURS, str(target), None, 0, threads, max(sizes), 1024, converted)
        loaded: dict[str, Contender] = {}

        def contenders(speculative: bool, num_drafts: int) -> list[Contender]:
            """Those of this kind that can be had, loaded when first wanted."""
            found = []
            for library in (OURS, "OpenVINO GenAI", "llama.cpp"):
                name = library if not speculative else f"{library} speculative"
                wanted = replace(job, library=library)
                if speculative:
                    drafts = None if library == OURS else num_drafts
                    wanted = replace(wanted, draft=str(draft), num_drafts=drafts)
                key = f"{name} {wanted.num_drafts}"
                if key not in loaded:
                    loaded[key] = Contender(name, sys.executable if library == OURS else python, wanted)
                contender = loaded[key]
                if contender.missing is not None:
                    results["missing"][name] = contender.missing
                    continue
                results["versions"][library] = contender.version
                found.append(contender)
            return found

        for size in sizes:
            together = contenders(False, 0) + contenders(True, NUM_DRAFTS.get(size, 2))
            count = PROMPTS.get(size, size)
            turns = [
                [pool[j % len(pool)] for j in range(i * count, (i + 1) * count)]
                for i in range(rounds or ROUNDS.get(size, 3))
            ]
            results["cells"][f"B = {size}"] = _cell(together, turns, size, OUTPUT_LEN)
            typer.echo(f"B = {size}: {results['cells'][f'B = {size}']['over_ours']}", err=True)
        results["cells"][PREFILL] = _cell(contenders(False, 0), [[long]] * (rounds or ROUNDS[1]), 1, 1)
        for contender in loaded.values():
            contender.end()
    path = out / f"peers-{threads}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print_table(results)
    typer.echo(draw(results, path.with_suffix(".png")))
    typer.echo(json.dumps(results))


def _cell(contenders: Sequence[Contender], rounds: Sequence[Any], batch_size: int, output_len: int) -> dict[str, Any]:
    """Speeds in tokens/s, of prompts where one token comes out; medians over ours; and whose tokens equal ours."""
    speeds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    equal = {contender.name: 0 for contender in contenders}
    for contender in contenders:  # warms up
        contender.decode(rounds[0][:batch_size], batch_size, output_len)
    num_outputs = 0
    for i, prompts in enumerate(rounds):
        outputs = {}
        first = i % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            outputs[contender.name], seconds = contender.decode(prompts, batch_size, output_len)
            num_tokens = sum(map(len, prompts if output_len == 1 else outputs[contender.name]))
            speeds[contender.name].append(num_tokens / seconds)
        num_outputs += len(prompts)
        for name, of_contender in outputs.items():
            equal[name] += sum(a == b for a, b in zip(of_contender, outputs[OURS], strict=True))
    return {
        "tokens_per_second": {name: [round(x, 1) for x in (median(v), min(v), max(v))] for name, v in speeds.items()},
        "over_ours": {
            name: round(median(a / b for a, b in zip(of, speeds[OURS], strict=True)), 3) for name, of in speeds.items()
        },
        "equal_outputs": {name: f"{count}/{num_outputs}" for name, count in equal.items()},
    }


app()

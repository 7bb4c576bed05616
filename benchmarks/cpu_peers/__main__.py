"""`python -m benchmarks.cpu_peers`: ours beside OpenVINO GenAI and llama.cpp, the same token ids, greedy.

Every contender is a process of its own, loaded for the B at hand; they take turns of some tenths of a second or more in
every round, in an order that rotates, and sleep between them. Prompts are part of the time, loading and a first batch
are not. Ends in a table, a picture and one line of JSON. What cannot be had is named, and left out. `make bench-peers`
makes the environment that the others need; ways.py says how each takes part.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cpu_peers.cell import SPECULATIVE, play
from benchmarks.cpu_peers.contender import Contender
from benchmarks.cpu_peers.ways import OURS, WAYS
from benchmarks.cpu_peers.worker import Job
from benchmarks.environment import environment

PREFILL = "prefill"
ROUNDS, PROMPTS, OUTPUT_LEN = {1: 7, 8: 5, 32: 3}, {1: 4, 8: 16, 32: 32}, 128
NUM_DRAFTS = {1: 5, 8: 2, 32: 2}  # of those that do not decide themselves
PROMPT_LENS, PREFILL_LEN = (64, 112), 1000
app = typer.Typer(add_completion=False)


@app.command()
def main(
    target: Annotated[
        str | None, typer.Option(help="A checkpoint of Qwen3's family, in float16; default: the embedded one.")
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

    target, draft = target or EMBEDDED_TARGET, draft or EMBEDDED_DRAFT
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts(prompts)]
    least, most = PROMPT_LENS
    pool = [ids[:most] for ids in texts if len(ids) >= least]
    long = [id for ids in texts for id in ids][:PREFILL_LEN]
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = environment(threads) | {"versions": {}, "missing": {}, "cells": {}}
    with tempfile.TemporaryDirectory() as converted:
        for size in sorted(int(size) for size in batch_sizes.split(",")):
            together = []
            for speculative in (False, True):
                for name, way in WAYS.items():
                    if speculative:
                        name += SPECULATIVE
                    num_drafts = None if way.library == OURS else NUM_DRAFTS.get(size, 2)
                    job = Job(
                        way.library, way.weights, way.kv, str(target), str(draft) if speculative else None,
                        num_drafts if speculative else 0, threads, size, 1024, converted,
                    )  # fmt: skip
                    contender = Contender(name, way, python, job)
                    if contender.missing is not None:
                        results["missing"][name] = contender.missing
                        continue
                    results["versions"][name] = contender.version
                    together.append(contender)
            count = PROMPTS.get(size, size)
            turns = [
                [pool[j % len(pool)] for j in range(i * count, (i + 1) * count)]
                for i in range(rounds or ROUNDS.get(size, 3))
            ]
            cells = results["cells"]
            cells[f"B = {size}"] = play(together, turns, size, OUTPUT_LEN)
            typer.echo(f"B = {size}: {cells[f'B = {size}']['over_ours']}", err=True)
            if PREFILL not in cells:
                plain = [contender for contender in together if not contender.name.endswith(SPECULATIVE)]
                cells[PREFILL] = play(plain, [[long]] * (rounds or ROUNDS[1]), 1, 1)
            for contender in together:
                contender.end()
    path = out / f"peers-{threads}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print_table(results)
    typer.echo(draw(results, path.with_suffix(".png")))
    typer.echo(json.dumps(results))


if __name__ == "__main__":
    app()

"""`python -m benchmarks.adaptive.following`: how soon decisions follow a text whose drafts come to stand, or to fall.

Outputs turn every so many tokens, from drafts that stand with 0.9 to such with 0.2 and back. Of each contender, what a
token takes by how many tokens ago the text has turned, beside plain decoding. Ends in a table and one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from benchmarks.adaptive.cell import Engines
    from benchmarks.ours import Ours

PART = 32  # tokens
RATES = (0.9, 0.2)
MOST_OUTPUT = 450  # of what engines take, without the prompt
Seconds = dict[tuple[bool, int], list[float]]  # by whether drafts stand, and parts since the text has turned

app = typer.Typer(add_completion=False)


@app.command()
def main(
    drafts: Annotated[str, typer.Option(help="Shares of the target's cost, separated by commas.")] = "0.05,0.15",
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1",
    ks: Annotated[str, typer.Option(help="Fixed K, separated by commas.")] = "1,2,5",
    turns_after: Annotated[int, typer.Option(help="Tokens from one turn to the next.", max=200)] = 150,
    rounds: Annotated[int, typer.Option(help="Batches that each contender decodes.")] = 10,
    out: Annotated[Path, typer.Option(help="File of the results.")] = Path("build/adaptive/following.json"),
) -> None:
    """Measure on one core and show it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from benchmarks.adaptive.cell import Engines, ways_of
    from benchmarks.adaptive.pairs import make_turning
    from benchmarks.environment import environment

    torch.set_num_threads(1)
    results: dict[str, Any] = environment(1) | {"turns_after": turns_after, "part": PART, "cells": {}}
    for draft in map(float, drafts.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            pair = make_turning(draft, Path(directory), turns_after, MOST_OUTPUT, 4 * rounds)
            engines = Engines(pair, ways_of([int(k) for k in ks.split(",")], []))
            for batch_size in map(int, batch_sizes.split(",")):
                name = f"draft {draft}; {batch_size}"
                typer.echo(f"{name} ..", err=True)
                results["cells"][name] = cell = speeds(engines, batch_size, rounds)
                _print(name, cell)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    typer.echo(json.dumps(results))


def speeds(engines: Engines, batch_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of each part behind a turn, each contender's speed over plain decoding's, over all of its tokens."""
    prompts, rng = engines.pair.prompts, random.Random(0)
    seconds: dict[str, Seconds] = {name: defaultdict(lambda: [0.0, 0.0]) for name in engines.contenders}
    for ours in engines.contenders.values():
        ours.run(prompts[:4], batch_size)
    for i in range(rounds):
        batch = [prompts[(i * batch_size + j) % len(prompts)] for j in range(batch_size)]
        contenders = list(engines.contenders.items())
        rng.shuffle(contenders)
        outputs = {name: _decode(ours, batch, seconds[name]) for name, ours in contenders}
        assert all(tokens == outputs["plain"] for tokens in outputs.values()), "outputs are not plain decoding's"
    plain = seconds["plain"]
    return {
        f"{RATES[not stands]}, {part * PART} to {(part + 1) * PART}": {
            name: round(_per_token(plain[stands, part]) / _per_token(of[stands, part]), 3)
            for name, of in seconds.items()
        }
        for stands, part in sorted(plain, key=lambda key: (not key[0], key[1]))
        if part >= 0
    }


def _per_token(of_part: Sequence[float]) -> float:
    seconds, num_tokens = of_part
    return seconds / num_tokens


def _decode(ours: Ours, prompts: Sequence[Sequence[int]], seconds: Seconds) -> list[list[int]]:
    """The outputs of prompts that come at once; adds what their tokens took. Part -1 is all before the first turn."""
    from benchmarks.adaptive.pairs import VOCAB_SIZE

    engine = ours.llm.engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, ours.params)
    sequences = [engine.requests[str(i)].sequences[0] for i in range(len(prompts))]
    stood: list[bool | None] = [None] * len(prompts)
    since = [-PART * MOST_OUTPUT] * len(prompts)
    num_before = [0] * len(prompts)
    last = time.perf_counter()
    while engine.has_unfinished_requests:
        engine.step()
        now = time.perf_counter()
        for i, sequence in enumerate(sequences):
            token_ids = sequence.output_token_ids[num_before[i] :]
            num_before[i] += len(token_ids)
            for token_id in token_ids:
                stands = token_id < VOCAB_SIZE // 2
                turns = stood[i] is not None and stands != stood[i]
                since[i], stood[i] = 0 if turns else since[i] + 1, stands
                of_part = seconds[stands, max(-1, since[i] // PART)]
                of_part[0] += (now - last) / len(token_ids)
                of_part[1] += 1
        last = now
    return [list(sequence.output_token_ids) for sequence in sequences]


def _print(name: str, cell: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}: speed over plain decoding, by tokens since the text has turned")
    names = list(next(iter(cell.values())))
    for column in ("drafts stand; tokens", *names):
        table.add_column(column, justify="right")
    for part, of_part in cell.items():
        table.add_row(part, *(f"{of_part[name]:.2f}" for name in names))
    Console(width=120).print(table)


if __name__ == "__main__":
    app()

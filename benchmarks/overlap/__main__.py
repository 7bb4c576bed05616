"""`python -m benchmarks.overlap`: steps of half a batch with drafting hidden behind verification, on the same cores.

Every cell is a pair by a batch size: one engine whose passes have all threads, drafts behind the target; and one whose
lanes have half of them each. Beside the speeds stands what MineDraft's model makes of V and D as measured, and what
lanes cost each other. What is done is kept in OUT and not done again. Ends in a table, a picture and one line of JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

PAIRS = "embedded;draft 0.05, 0.6;draft 0.4, 0.6"
app = typer.Typer(add_completion=False)


@app.command()
def main(
    pairs: Annotated[str, typer.Option(help="Names of pairs, or parts of them, separated by ';'.")] = PAIRS,
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas, from 2 on.")] = "2,8,16,32",
    k: Annotated[int, typer.Option(min=1, help="Drafts of a sequence and round.")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="Of a pass of all; lanes have half of them each.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Of every cell.")] = 7,
    requests: Annotated[int, typer.Option(min=1, help="Of a round, for each place in the batch.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/overlap"),
) -> None:
    """Measure what is not in OUT yet, and show it all."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from benchmarks.adaptive.pairs import make_pair, named
    from benchmarks.environment import environment
    from benchmarks.overlap.cell import Cells
    from benchmarks.overlap.show import draw, print_table

    torch.set_num_threads(threads)
    wanted = named(pairs)
    sizes = batch_sizes.split(",")
    for size in sizes:
        if not (size.isdigit() and int(size) > 1):
            raise typer.BadParameter(f"batch size {size!r}: whole numbers from 2 on are allowed: a batch has halves")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"overlap-{threads}.json"
    results = json.loads(path.read_text()) if path.exists() else environment(threads) | {"k": k, "cells": {}}
    if results["k"] != k:
        raise typer.BadParameter(f"{path} is of K = {results['k']}; allowed: that, or another --out")
    for name in wanted:
        left = [size for size in sizes if f"{name}; {size}" not in results["cells"]]
        if not left:
            continue
        with tempfile.TemporaryDirectory() as directory:
            cells = Cells(make_pair(name, Path(directory), 128), k, requests)
            for size in left:
                cell = results["cells"][f"{name}; {size}"] = cells.cell(int(size), rounds)
                path.write_text(json.dumps(results, indent=1) + "\n")
                typer.echo(f"{name}, B = {size}: {cell['speeds']}, model {cell['model']}", err=True)
    print_table(results)
    typer.echo(draw(results, path.with_suffix(".png")))
    typer.echo(json.dumps(results))


app()

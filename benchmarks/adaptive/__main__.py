"""`python -m benchmarks.adaptive`: deciding how much to draft in every step, beside plain decoding and every fixed K.

Cells are pairs by batch sizes; what is done is kept in OUT and not done again. Ends in a table, a picture and one line
of JSON. One process has one number of threads: run it for each.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

KS = (1, 2, 3, 5, 8)
ROUNDS = {"1": 21, "4": 11, "8": 9, "16": 5, "32": 3, "64": 3, "1-64": 3}  # by batch size
app = typer.Typer(add_completion=False)


@app.command()
def main(
    pairs: Annotated[str, typer.Option(help="Names of pairs, or parts of them, separated by ';'.")] = "",
    batch_sizes: Annotated[
        str, typer.Option(help="Separated by commas; 1-64: requests come now all at once, now one after another.")
    ] = ",".join(ROUNDS),
    ks: Annotated[str, typer.Option(help="Fixed K, separated by commas.")] = ",".join(map(str, KS)),
    tetris: Annotated[
        str, typer.Option(help="Of TETRIS, K or K+extra, with commas between them; 2 are extra if not said.")
    ] = "",
    threads: int = 1,
    rounds: Annotated[int | None, typer.Option(help="Of every cell; by default 21 to 3, by batch size.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("build/adaptive"),
) -> None:
    """Measure what is not in OUT yet, and show it all."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from benchmarks.adaptive.cell import Engines, summary_of, ways_of
    from benchmarks.adaptive.pairs import make_pair, named
    from benchmarks.adaptive.show import draw, print_table
    from benchmarks.environment import environment

    torch.set_num_threads(threads)
    wanted = named(pairs)
    sizes = batch_sizes.split(",")
    for size in sizes:
        if size != "1-64" and not (size.isdigit() and int(size)):
            raise typer.BadParameter(f"batch size {size!r}: whole numbers from 1, and 1-64, are allowed")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"adaptive-{threads}.json"
    results = json.loads(path.read_text()) if path.exists() else environment(threads) | {"cells": {}}
    for name in wanted:
        left = [size for size in sizes if f"{name}; {size}" not in results["cells"]]
        if not left:
            continue
        with tempfile.TemporaryDirectory() as directory:
            pair = make_pair(name, Path(directory), 128)
            ways = ways_of([int(k) for k in ks.split(",") if k], [of for of in tetris.split(",") if of])
            engines = Engines(pair, ways)
            for size in left:
                played = engines.play(size, rounds or max(3, ROUNDS.get(size, 5) * 2 // pair.prompts_per_seq))
                cell = results["cells"][f"{name}; {size}"] = summary_of(played)
                path.write_text(json.dumps(results, indent=1) + "\n")
                typer.echo(f"{name}, B = {size}: {cell['over_plain']}, over best {cell['over_best']}", err=True)
    print_table(results)
    typer.echo(draw(results, path.with_suffix(".png")))
    typer.echo(json.dumps(results))


app()

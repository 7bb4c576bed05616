"""`python -m benchmarks.vllm_serving`: vLLM with its own CPU worker and with ours, plain, with a draft, with n-grams.

One pair, the same prompts and threads, streamed through vLLM's AsyncLLM (its engine core in a process of its own, no
HTTP). Each contender is a group of processes of its own. All go through the same requests by turns of a fraction of a
second, in an order that rotates from round to round; who is not at turn is stopped, and so is its time. A first round,
which warms up, has whole turns: of our worker's time it says how much was our own steps; the rest is vLLM's engine,
which is there whatever the worker. Prints a table, draws a picture where matplotlib is there, and ends in one line of
JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.vllm_serving.contender import Contender, serve_by_turns
from benchmarks.vllm_serving.server import num_prompts, serve
from benchmarks.vllm_serving.show import draw, print_table, summary

CONTENDERS = ("vllm plain", "vllm draft_model", "vllm ngram", "ours plain", "ours draft_model", "ours ngram")
# Of a set of prompts for lookups (`--pair "suffix, twice"`): the suffixes that vLLM itself looks up, beside ours.
LOOKUPS = tuple(f"{worker} {method}" for worker in ("vllm", "ours") for method in ("plain", "ngram", "suffix"))
# Ours, which decides in every step, beside every K: a number behind the method is a fixed one. With 0, requests ask for
# no drafts: what vLLM itself takes for asking, in every step, a worker that may draft.
DECISIONS = ("ours plain", *(f"ours draft_model {k}" for k in (0, 1, 2, 4)), "ours draft_model")
TURN_SECONDS = 0.25  # shorter than most of the noise, which then hits all; long beside what it takes to stop and go on


def main(
    concurrency: str = typer.Option("1,8,32", help="Requests at once, with commas between them."),
    max_tokens: int = typer.Option(
        128, min=2, help="Of an output in the mean: from half to one and a half of it, and nothing ends one earlier."
    ),
    num_speculative_tokens: int = typer.Option(4, min=1, help="Draft tokens per round; with ours, at most."),
    decisions: bool = typer.Option(False, help="Our worker alone: plain, K = 0, 1, 2, 4, and decided in every step."),
    pair: str = typer.Option(
        "embedded", help="Or another of benchmarks/adaptive/pairs.py by its name; 'suffix, ...': lookups alone."
    ),
    rounds: int = typer.Option(5, min=1, help="Of the same requests for all, at every concurrency."),
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
    most_prompts = max(map(num_prompts, levels))
    settings = {
        "concurrency": levels,
        "num_prompts": most_prompts,
        "max_tokens": max_tokens,
        "num_speculative_tokens": num_speculative_tokens,
        "pair": pair,
    }
    played: list[dict[str, dict[str, Any]]] = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        made = make_pair(pair, Path(folder), most_prompts)
        prompts = None if pair == "embedded" else made.prompts  # those of random models are token ids
        names = contenders(lookups="model" not in made.speculative, decisions=decisions)
        job_of_all = settings | {"target": made.target, "speculative": made.speculative, "prompts": prompts}
        started = []
        for i, name in enumerate(tqdm(names, unit="start")):  # one by one: what is measured in loading is to be quiet
            own = Path(folder) / f"contender-{i}"
            own.mkdir()
            job = json.dumps(job_of_all | {"contender": name})
            command = [sys.executable, "-m", "benchmarks.vllm_serving", "--job", job]
            contender = Contender(name, command, threads, own)
            stack.callback(contender.close)
            contender.ask(1)
            contender.answer()
            started.append(contender)
        whole = {level: serve_by_turns(started, level) for level in tqdm(levels, unit="whole turns")}
        for i in tqdm(range(rounds), unit="round"):
            first = i % len(started)
            in_order = [*started[first:], *started[:first]]
            of_level = {level: serve_by_turns(in_order, level, TURN_SECONDS) for level in levels}
            played.append(of_level)
    rows = summary(played, whole)
    print_table(rows)
    results = environment(threads) | {"study": "vllm_serving", "settings": settings | {"rounds": rounds}, "rows": rows}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "vllm_serving.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(rows, out / "vllm_serving.png")
    print(json.dumps(results))


def contenders(lookups: bool, decisions: bool) -> tuple[str, ...]:
    """Those of a pair. BadParameter: decisions are asked of lookups."""
    if not lookups:
        return DECISIONS if decisions else CONTENDERS
    if decisions:
        raise typer.BadParameter("--decisions: only pairs with a draft model are allowed")
    if find_spec("arctic_inference") is None:
        typer.echo("suffixes are left out: for them vLLM wants the package arctic-inference", err=True)
        return tuple(name for name in LOOKUPS if not name.endswith("suffix"))
    return LOOKUPS


if __name__ == "__main__":
    typer.run(main)

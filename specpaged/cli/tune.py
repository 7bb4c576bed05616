"""`specpaged tune`: what drafting costs and brings on this machine, and from which batch size on it stops paying."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import specpaged.cli.options as options
from specpaged.cli.job import prepare
from specpaged.cli.printing import checked, console, print_json

if TYPE_CHECKING:
    from specpaged.comparison.pair_profile import PairProfile, RoundTimes
    from specpaged.speculative_config import SpeculativeConfig


def tune(
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: options.Method = None,
    drafter: options.Drafter = None,
    speculative_config: options.SpeculativeConfig = None,
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = 32,
    max_prompt_tokens: options.MaxPromptTokens = None,
    max_num_seqs: options.MaxNumSeqs = 32,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory_bytes: options.KVCacheMemory = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    dtype: options.DType = "auto",
    device: options.Device = "cpu",
    numerics: options.Numerics = "exact",
    attention_backend: options.AttentionBackend = "auto",
    model_impl: options.ModelImpl = "auto",
    enforce_eager: options.EnforceEager = False,
    threads: options.Threads = 1,
    trust_remote_code: options.TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for tune.json and tune.png.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure a pair on this machine: passes by rows, rounds by K, acceptance, the best K by batch size, and whether
    drafting pays at all.

    Engines measure and decide by themselves: this says what they will find, and what to ask vLLM for.
    """
    arguments = {k: v for k, v in locals().items() if k not in ("out", "as_json")}
    job = prepare(arguments | {"num_speculative_tokens": None, "output": None, "measures_k": True})
    from specpaged.comparison.pair_profile import PairProfile

    profile = checked(PairProfile.measure, job, lambda line: console.print(f"[dim]{line}[/]"))
    _print_tables(profile)
    console.print(f"here, {_where_it_pays(profile.rounds)}")
    console.print(f"in vLLM, which runs single rounds, {_where_it_pays(profile.single_rounds)}")
    asked = _ask_vllm(job.llm.config.speculative_config, profile.most_in_vllm)
    figures = profile.as_dict() | {"speculative_config": None} | asked
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tune.json").write_text(json.dumps(figures, indent=1) + "\n")
        console.print(_draw(profile, out / "tune.png"))
    if as_json:
        print_json(figures)


def _ask_vllm(speculative: SpeculativeConfig, most: int) -> dict[str, Any]:
    """Print what to ask vLLM for, if for anything. Returns its arguments, by name."""
    from specpaged.comparison.vllm_arguments import vllm_arguments

    if not most:
        console.print("leave --speculative-config out")
        return {}
    try:
        asked = vllm_arguments(speculative, most)
    except ValueError as error:  # which is no fault: it was measured for our own engine
        console.print(str(error), highlight=False, markup=False)
        return {}
    line = " ".join(f"--{name.replace('_', '-')} {shlex.quote(json.dumps(value))}" for name, value in asked.items())
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    return asked


def _where_it_pays(rounds: RoundTimes) -> str:
    sizes = list(rounds.seconds)
    pays = [size for size in sizes if rounds.best(size)]
    if not pays:
        return "drafting does not pay at any batch size"
    where = "at each" if pays == sizes else f"at {', '.join(map(str, pays))}"
    return f"of the batch sizes {', '.join(map(str, sizes))}, drafting pays {where}"


def _print_tables(profile: PairProfile) -> None:
    costs = profile.costs
    draft = costs.draft
    table = Table(
        title="milliseconds",
        caption="of a pass, by rows; the rest is what a step, and a proposal, of one sequence take besides",
    )
    rows = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= max(costs.target.num_rows)]
    for column in ("", *map(str, rows), "rest"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("target", *(f"{costs.target.of_rows(n) * 1e3:.2f}" for n in rows), f"{costs.rest(1) * 1e3:.2f}")
    of_draft = ["" if draft is None else f"{draft.of_rows(n) * 1e3:.2f}" for n in rows]
    table.add_row("draft", *of_draft, f"{costs.proposal(1) * 1e3:.2f}")
    console.print(table)
    table = Table(title="acceptance by position", caption="of drafts with all before them standing")
    for column in ("", *map(str, range(1, len(profile.acceptance) + 1))):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("all prompts", *(f"{p:.2f}" for p in profile.acceptance))
    for category, rates in profile.by_category.items() if len(profile.by_category) > 1 else ():
        table.add_row(category, *(f"{p:.2f}" for p in rates))
    console.print(table)
    for rounds, where in ((profile.rounds, ""), (profile.single_rounds, ", single rounds")):
        _print_rounds(rounds, where)


def _print_rounds(rounds: RoundTimes, where: str) -> None:
    table = Table(title=f"expected speed over plain decoding{where}, by K", caption="and milliseconds of a plain round")
    for column in ("B", *map(str, range(1, len(rounds.tokens))), "best K", "plain"):
        table.add_column(column, justify="right")
    for size, seconds in rounds.seconds.items():
        speeds = [f"{x:.2f}" for x in rounds.speeds(size)[1:]]
        table.add_row(str(size), *speeds, str(rounds.best(size)), f"{seconds[0] * 1e3:.2f}")
    console.print(table)


def _draw(profile: PairProfile, path: Path) -> str:
    """Write a PNG of the expected speeds. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for i, size in enumerate(profile.rounds.seconds):
        left.plot(profile.rounds.speeds(size), color=f"C{i}", marker="o", label=f"B = {size}")
        left.plot(profile.single_rounds.speeds(size), color=f"C{i}", linestyle=":", linewidth=1)
    left.axhline(1.0, color="grey", linestyle="--")
    left.set_xlabel("K (dotted: single rounds, as in vLLM)")
    left.set_ylabel("expected speed over plain decoding")
    left.legend(fontsize=8)
    right.plot(range(1, len(profile.acceptance) + 1), profile.acceptance, marker="o", color="black", label="all")
    for category, rates in profile.by_category.items() if len(profile.by_category) > 1 else ():
        right.plot(range(1, len(rates) + 1), rates, label=category, linewidth=0.8)
    right.set_ylim(0, 1)
    right.set_xlabel("position of the draft")
    right.set_ylabel("acceptance, all before it standing")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"picture: {path.name}"

"""How much of EXSPEC's gain over EQSPEC is what: drafter caching, slot refill, grouping and realignment apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specpaged.studies import paper, plots
from specpaged.studies.environment import environment
from specpaged.studies.method import Method
from specpaged.studies.result import Column, Result, Row, spread
from specpaged.studies.rounds import play
from specpaged.studies.workload import Options

COLUMNS = (
    Column("effect", "effect"),
    Column("with", "with"),
    Column("without", "without"),
    Column("B", "B", "d"),
    Column("median", "ratio", ".2f"),
    Column("min", "min", ".2f"),
    Column("max", "max", ".2f"),
    Column("paper", "paper", ".2f"),
    Column("models", "models"),
)
PUBLISHED = "EXSPEC / EQSPEC, as published"
# (effect, with it, without it): two methods that differ in nothing else.
EFFECTS = (
    (PUBLISHED, "exspec/group/uncached", "eqspec/repad/uncached"),
    ("  of which: slot refill", "exspec/group/uncached/ungrouped", "eqspec/group/uncached"),
    ("  of which: grouping", "exspec/group/uncached", "exspec/group/uncached/ungrouped"),
    ("  of which: caches of their own", "eqspec/group/uncached", "eqspec/repad/uncached"),
    ("drafter caching", "eqspec/repad", "eqspec/repad/uncached"),
    ("drafter caching", "exspec/group", "exspec/group/uncached"),
    ("slot refill", "continuous/repad", "eqspec/repad"),
    ("slot refill", "continuous/truncate", "eqspec/truncate"),
    ("grouping", "exspec/group", "exspec/group/ungrouped"),
    ("grouping", "exspec/truncate", "exspec/truncate/ungrouped"),
    ("no realignment", "eqspec/truncate", "eqspec/repad"),
    ("no realignment", "continuous/truncate", "continuous/repad"),
    ("no realignment", "exspec/truncate", "exspec/group"),
)
METHODS = list(dict.fromkeys(Method.parse(name) for _, *names in EFFECTS for name in names))


def run(options: Options, progress: Callable[[str, int], Callable[[int], object]]) -> Result:
    """Run all METHODS side by side at every batch size, and compare the two of each effect."""
    rows: list[Row] = []
    options = replace(options, methods=METHODS)
    for workload in options.workloads():
        for batch_size in options.batch_sizes:
            advance = progress(f"B = {batch_size}", len(workload.prompts) * len(METHODS) * options.rounds)
            runs = play(workload, METHODS, batch_size, options.rounds, advance)
            for effect, *names in EFFECTS:
                pairs = zip(*(runs[Method.parse(name)] for name in names), strict=True)
                published = paper.TOKENS_PER_SECOND["exspec"] / paper.TOKENS_PER_SECOND["eqspec"]
                rows.append(
                    {
                        "models": workload.pair.name,
                        "effect": effect,
                        "with": names[0],
                        "without": names[1],
                        "B": batch_size,
                        **spread([a.tokens_per_second / b.tokens_per_second for a, b in pairs]),
                        "paper": published if effect == PUBLISHED and batch_size == 4 else None,
                    }
                )
    return Result(
        "ablation",
        f"effects apart: speed with over speed without; {options.max_tokens} tokens at most, "
        f"K = {options.num_speculative_tokens}, {options.rounds} rounds",
        COLUMNS,
        rows,
        environment(options.threads),
        options.as_dict(),
        "medians of the rounds' ratios; paper: Vicuna on an A100, B = 4 (arXiv 2510.22876)",
        draw=lambda result, out: [plots.effects(result, out / "ablation.png")],
    )

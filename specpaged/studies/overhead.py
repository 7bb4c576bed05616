"""Where a step's time and bytes go: the form of the paper's Table 2 and Figure 5b."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specpaged.studies import paper, plots
from specpaged.studies.environment import environment
from specpaged.studies.method import Method
from specpaged.studies.result import Column, Result, Row, spread
from specpaged.studies.rounds import play
from specpaged.studies.workload import Options, Run

COLUMNS = (
    Column("method", "method"),
    Column("B", "B", "d"),
    Column("tokens_per_second", "tok/s", ".0f"),
    Column("verify", "verify %", ".1f"),
    Column("draft", "draft %", ".1f"),
    Column("realignment", "realign %", ".1f"),
    Column("realignment_range", "min-max"),
    Column("rest", "rest %", ".1f"),
    Column("paper", "paper"),
    Column("calls", "calls", "d"),
    Column("ms_per_verify", "ms/call", ".2f"),
    Column("rollback_mib", "rollback", ".2f"),
    Column("gather_mib", "gather", ".2f"),
    Column("other_mib", "other", ".2f"),
    Column("total_mib", "MiB", ".2f"),
    Column("models", "models"),
)
SHARES = ("verify", "draft", "realignment", "rest")


def run(options: Options, progress: Callable[[str, int], Callable[[int], object]]) -> Result:
    """Run all methods side by side at every batch size."""
    rows: list[Row] = []
    for workload in options.workloads():
        for batch_size in options.batch_sizes:
            advance = progress(f"B = {batch_size}", len(workload.prompts) * len(options.methods) * options.rounds)
            played = play(workload, options.methods, batch_size, options.rounds, advance, synchronized=True)
            for method, runs in played.items():
                rows.append(
                    {
                        "models": workload.pair.name,
                        "method": method.name,
                        "B": batch_size,
                        "tokens_per_second": spread([of_round.tokens_per_second for of_round in runs])["median"],
                        **shares(runs),
                        "paper": published(method, batch_size),
                        **per_round(runs),
                    }
                )
    return Result(
        "overhead",
        f"where time goes, and MiB of KV copied in a round; {options.max_tokens} tokens at most, "
        f"K = {options.num_speculative_tokens}",
        COLUMNS,
        rows,
        environment(options.threads),
        options.as_dict(),
        "medians of the rounds' shares of wall time, prefills included; realign: truncation or the copies of "
        "realignment, both models'; rest: scheduling, packing, acceptance, the client; MiB: written by copying because "
        "drafts were rejected, so that attention could read it, and otherwise; paper: realignment in EQSPEC, at B = 4 "
        "verify / draft / overhead, all of it with an uncached draft (arXiv 2510.22876)",
        draw=lambda result, out: [plots.shares(result, out / "overhead.png", SHARES)],
    )


def shares(runs: Sequence[Run]) -> Row:
    """Percent of wall time, by stage: the medians of the rounds."""
    by_stage: dict[str, list[float]] = {name: [] for name in SHARES}
    for of_round in runs:
        metrics = of_round.metrics
        seconds = {
            "verify": metrics.seconds["score"],
            "draft": metrics.seconds["propose"],
            "realignment": metrics.rollback_seconds,
        }
        seconds["rest"] = of_round.seconds - sum(seconds.values())
        for name, value in seconds.items():
            by_stage[name].append(100 * value / of_round.seconds)
    medians = {name: spread(values, 2)["median"] for name, values in by_stage.items()}
    realignment = spread(by_stage["realignment"], 2)
    return medians | {"realignment_range": f"{realignment['min']:.1f}-{realignment['max']:.1f}"}


def per_round(runs: Sequence[Run]) -> Row:
    """Calls of the target's pass, its time, and the bytes of KV that a round copies."""
    metrics = runs[0].metrics  # the same in every round, but for the time
    ms = spread([1e3 * of_round.metrics.seconds["score"] / of_round.metrics.steps for of_round in runs])["median"]
    columns = {
        "rollback_mib": metrics.rollback_bytes,
        "gather_mib": metrics.gathered_bytes,
        "other_mib": metrics.other_copied_bytes + metrics.fork_copied_bytes,
    }
    columns["total_mib"] = sum(columns.values())
    return {
        "calls": metrics.steps,
        "ms_per_verify": ms,
        **{name: round(num_bytes / metrics.rounds / 2**20, 4) for name, num_bytes in columns.items()},
    }


def published(method: Method, batch_size: int) -> str | None:
    """The paper's figure for a method of its own; None for any other."""
    if (method.schedule, method.rollback) not in (("eqspec", "repad"), ("exspec", "group")):
        return None
    if batch_size == 4:
        return "/".join(map(str, paper.SHARES[method.schedule]))
    return paper.REALIGNMENT_SHARE.get(batch_size) if method.schedule == "eqspec" else None

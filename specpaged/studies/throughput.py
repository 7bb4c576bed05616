"""Tokens per second by B (the paper's Figures 1 and 5a), and latency where requests arrive over time (its Table 4)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import quantiles

from specpaged.studies import paper, plots
from specpaged.studies.environment import environment
from specpaged.studies.method import PLAIN, Method
from specpaged.studies.result import Column, Result, Row, spread
from specpaged.studies.rounds import num_identical, play
from specpaged.studies.workload import Options, Run

COLUMNS = (
    Column("method", "method"),
    Column("B", "B", "d"),
    Column("median", "tokens/s", ".0f"),
    Column("min", "min", ".0f"),
    Column("max", "max", ".0f"),
    Column("over_plain", "x plain", ".2f"),
    Column("truncate_over", "truncate is", ".2f"),
    Column("truncate_min", "from", ".2f"),
    Column("truncate_max", "to", ".2f"),
    Column("identical", "identical", ".1%"),
    Column("paper", "paper, tokens/s", ".1f"),
    Column("models", "models"),
)
ONLINE_COLUMNS = (
    Column("method", "method"),
    Column("B", "B", "d"),
    Column("rate", "requests/s", ".2f"),
    Column("median", "tokens/s", ".0f"),
    Column("p50", "P50 s", ".2f"),
    Column("p90", "P90 s", ".2f"),
    Column("p99", "P99 s", ".2f"),
    Column("identical", "identical", ".1%"),
    Column("models", "models"),
)


def run(options: Options, progress: Callable[[str, int], Callable[[int], object]]) -> Result:
    """Run plain decoding and all methods side by side at every batch size."""
    rows: list[Row] = []
    methods = with_plain(options.methods)
    for workload in options.workloads():
        for batch_size in options.batch_sizes:
            advance = progress(f"B = {batch_size}", len(workload.prompts) * len(methods) * options.rounds)
            runs = play(workload, methods, batch_size, options.rounds, advance)
            for method in methods:
                rows.append(
                    {
                        "models": workload.pair.name,
                        "method": method.name,
                        "B": batch_size,
                        **spread([of_round.tokens_per_second for of_round in runs[method]]),
                        **ratios(runs, method),
                        "identical": _identical(runs, method),
                        "paper": paper.TOKENS_PER_SECOND.get(method.schedule)
                        if _is_papers(method, batch_size)
                        else None,
                    }
                )
    return Result(
        "throughput",
        f"tokens per second, prefill included; {options.max_tokens} tokens at most, "
        f"K = {options.num_speculative_tokens}, {options.rounds} rounds",
        COLUMNS,
        rows,
        environment(options.threads),
        options.as_dict(),
        "medians; ratios are taken within a round. truncate is: its speed under the same schedule over the method's. "
        "identical: outputs equal to plain's. paper: Vicuna on an A100, B = 4 (arXiv 2510.22876)",
        draw=lambda result, out: [plots.lines(result, out / "throughput.png", "median", "tokens/s")],
    )


def run_online(options: Options, rates: list[float], progress: Callable[[str, int], Callable[[int], object]]) -> Result:
    """Run all methods on requests that arrive as a Poisson process, at each rate in requests per second."""
    rows: list[Row] = []
    for workload in options.workloads():
        for batch_size in options.batch_sizes:
            for rate in rates:
                arrivals = poisson_arrivals(len(workload.prompts), rate)
                advance = progress(
                    f"B = {batch_size}, {rate} requests/s",
                    len(workload.prompts) * len(options.methods) * options.rounds,
                )
                runs = play(workload, options.methods, batch_size, options.rounds, advance, arrivals)
                for method, of_method in runs.items():
                    rows.append(
                        {
                            "models": workload.pair.name,
                            "method": method.name,
                            "B": batch_size,
                            "rate": rate,
                            **spread([of_round.tokens_per_second for of_round in of_method]),
                            **percentiles([x for of_round in of_method for x in of_round.latencies]),
                            "identical": _identical(runs, method),
                        }
                    )
    return Result(
        "online",
        f"requests that arrive over time (Poisson); {options.max_tokens} tokens at most, "
        f"K = {options.num_speculative_tokens}",
        ONLINE_COLUMNS,
        rows,
        environment(options.threads),
        options.as_dict() | {"request_rates": rates},
        "latency: from arrival to the last token, over all rounds; identical: outputs equal to the first method's",
        draw=lambda result, out: [plots.latencies(result, out / "online.png")],
    )


def with_plain(methods: list[Method]) -> list[Method]:
    """Plain decoding first, then the others."""
    return [Method.parse(PLAIN), *(method for method in methods if not method.plain)]


def ratios(runs: dict[Method, list[Run]], method: Method) -> Row:
    """Speed over plain's, and over it the speed of truncate under the same schedule: medians of the rounds' ratios."""
    speeds = {other: [of_round.tokens_per_second for of_round in of_method] for other, of_method in runs.items()}
    row: Row = {}
    plain = next((other for other in runs if other.plain), None)
    if plain is not None:
        row["over_plain"] = spread([a / b for a, b in zip(speeds[method], speeds[plain], strict=True)])["median"]
    paged = replace(method, rollback="truncate")
    if not method.plain and paged in runs:
        over = spread([a / b for a, b in zip(speeds[paged], speeds[method], strict=True)])
        row |= {"truncate_over": over["median"], "truncate_min": over["min"], "truncate_max": over["max"]}
    return row


def poisson_arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """When `count` requests arrive, in seconds from the start, ascending; `rate` of them a second on average."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals


def percentiles(latencies: list[float]) -> Row:
    """P50, P90 and P99 of latencies in seconds."""
    cuts = quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else latencies * 99
    return {f"p{p}": round(cuts[p - 1], 4) for p in (50, 90, 99)}


def _identical(runs: dict[Method, list[Run]], method: Method) -> float:
    expected = next(iter(runs.values()))
    return num_identical(runs[method], expected) / sum(len(of_round.token_ids) for of_round in expected)


def _is_papers(method: Method, batch_size: int) -> bool:
    return batch_size == 4 and method in (Method.parse("eqspec/repad/uncached"), Method.parse("exspec/group/uncached"))

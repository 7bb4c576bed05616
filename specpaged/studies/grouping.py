"""How often EXSPEC finds sequences of one length: the paper's Figure 5c."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

from specpaged.studies import paper, plots
from specpaged.studies.environment import environment
from specpaged.studies.result import Column, Result, Row
from specpaged.studies.workload import Options

COLUMNS = (
    Column("method", "method"),
    Column("prompts", "prompts"),
    Column("B", "B", "d"),
    Column("rate", "grouped %", ".1f"),
    Column("paper", "paper, %", ".1f"),
    Column("grouped", "grouped rounds", "d"),
    Column("fallback", "fallback rounds", "d"),
    Column("num_prompts", "outputs", "d"),
    Column("models", "models"),
)


def run(options: Options, progress: Callable[[str, int], Callable[[int], object]]) -> Result:
    """Run every exspec method at every batch size but 1, on prompts as they are and on prompts cut to one length."""
    rows: list[Row] = []
    methods = [method for method in options.methods if method.schedule == "exspec"]
    if not methods:
        raise ValueError(
            f"--arms={','.join(m.name for m in options.methods)} has no method of schedule 'exspec', which alone groups"
        )
    batch_sizes = [batch_size for batch_size in options.batch_sizes if batch_size > 1]
    if not batch_sizes:
        raise ValueError(f"--batch-sizes={options.batch_sizes} has none above 1: one sequence is always of one length")
    for workload in options.workloads():
        for method in methods:
            for kind, prompts in (("random", workload.prompts), ("equal", of_one_length(workload.prompts))):
                for batch_size in batch_sizes:
                    advance = progress(f"{kind} prompts, B = {batch_size}", len(prompts))
                    metrics = workload.decode(workload.make_llm(method, batch_size), prompts, progress=advance).metrics
                    rows.append(
                        {
                            "models": workload.pair.name,
                            "method": method.name,
                            "prompts": kind,
                            "B": batch_size,
                            "grouped": metrics.grouped_rounds,
                            "fallback": metrics.fallback_rounds,
                            "rate": round(
                                100 * metrics.grouped_rounds / max(1, metrics.grouped_rounds + metrics.fallback_rounds),
                                2,
                            ),
                            "paper": paper.GROUPING[kind].get(batch_size),
                            "num_prompts": len(prompts),
                        }
                    )
    return Result(
        "grouping",
        f"rounds of sequences of one length; window {options.window or 'by default'}, "
        f"K = {options.num_speculative_tokens}, {options.max_tokens} tokens at most",
        COLUMNS,
        rows,
        environment(options.threads),
        options.as_dict(),
        "of all rounds of B sequences but prefills, those in which all B had one length; equal: the longer half of the "
        "prompts, cut to one length; sorted: the window is kept by length; paper: window 48 (arXiv 2510.22876)",
        draw=lambda result, out: [plots.grouping(result, out / "grouping.png")],
    )


def of_one_length(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The prompts that are no shorter than their median, cut to that."""
    length = median_low(map(len, prompts))
    return [list(prompt[:length]) for prompt in prompts if len(prompt) >= length]

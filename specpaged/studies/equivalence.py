"""Which methods' outputs are those of plain decoding: the form of the paper's Table 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean

from specpaged.comparison.equivalence import first_divergence
from specpaged.comparison.one_at_a_time import decode, num_processes
from specpaged.comparison.reference import PlainReference
from specpaged.studies import paper, plots
from specpaged.studies.environment import environment
from specpaged.studies.method import PLAIN, Method
from specpaged.studies.result import Column, Result, Row
from specpaged.studies.workload import Options

COLUMNS = (
    Column("method", "method"),
    Column("B", "B", "d"),
    Column("outputs", "outputs", "d"),
    Column("identical", "identical", "d"),
    Column("exact", "exact %", ".1f"),
    Column("partial", "partial %", ".1f"),
    Column("paper", "paper, exact %"),
    Column("acceptance", "acceptance", ".1%"),
    Column("models", "models"),
)


def run(options: Options, progress: Callable[[str, int], Callable[[int], object]]) -> Result:
    """Compare every method at every batch size with plain decoding of one prompt at a time.

    Plain batches are compared, too: what they differ by is no method's fault.
    """
    rows: list[Row] = []
    workloads = options.workloads()
    methods = [Method.parse(PLAIN), *(method for method in options.methods if not method.plain)]
    for workload in workloads:
        llm = workload.make_llm(methods[0], 1)
        model = llm.engine.target.model
        references = decode(
            partial(PlainReference.of, llm.config),
            workload.prompts,
            [workload.params] * len(workload.prompts),
            num_processes(len(workload.prompts), model.weight_bytes, model.device),
        )
        for method in methods:
            for batch_size in options.batch_sizes:
                advance = progress(f"{method.name}, B = {batch_size}", len(workload.prompts))
                decoded = workload.decode(workload.make_llm(method, batch_size), progress=advance)
                published = paper.EXACT_MATCH.get((PLAIN if method.plain else method.schedule, batch_size))
                rows.append(
                    {
                        "models": workload.pair.name,
                        "method": method.name,
                        "B": batch_size,
                        "outputs": len(references),
                        **compare(references, decoded.token_ids),
                        "paper": " / ".join(map(str, published)) if published else None,
                        "acceptance": decoded.metrics.acceptance_rate,
                    }
                )
    return Result(
        "equivalence",
        f"outputs against plain decoding, one prompt at a time; numerics {options.numerics}",
        COLUMNS,
        rows,
        environment(options.threads),
        options.as_dict(),
        "exact: outputs with all tokens equal; partial: share of an output before it parts from the reference, mean; "
        "paper: EQSPEC, EXSPEC or plain batches of Vicuna / Qwen3 / GLM-4 in fp16 (arXiv 2510.22876)",
        draw=lambda result, out: [plots.bars(result, out / "equivalence.png", "exact", "outputs identical, %")],
    )


def compare(references: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Row:
    """How many outputs are identical, and which share of each is so from its beginning on."""
    shares = []
    for reference, output in zip(references, outputs, strict=True):
        position = first_divergence(reference, output)
        shares.append(1.0 if position is None else position / max(len(reference), len(output)))
    num_identical = sum(share == 1.0 for share in shares)
    return {
        "identical": num_identical,
        "exact": round(100 * num_identical / len(shares), 2),
        "partial": round(100 * mean(shares), 2),
    }

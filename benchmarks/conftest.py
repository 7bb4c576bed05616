"""Options, and the end of a benchmark run: tables, a picture if asked for, and one line of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.environment import environment
from specpaged.studies.result import Result

RESULTS = pytest.StashKey[dict]()


def pytest_addoption(parser):
    group = parser.getgroup("specpaged")
    group.addoption("--threads", type=int, default=1, help="Torch threads, for every contender.")
    group.addoption("--rounds", type=int, help="Rounds at every B (default: 5, 5, 3, 2, by B).")
    group.addoption(
        "--waves", type=int, help="Full batches of prompts in a round (default: 4, 2, 1, 1 at B = 1, 8, 32, 128)."
    )
    group.addoption("--kv-shape", default="8,4,32", help="L,Hkv,D[,dtype] of the rollback benchmark (default: 8,4,32).")
    group.addoption(
        "--out",
        type=Path,
        default=os.environ.get("SPECPAGED_BENCH_OUT"),
        help="Write throughput.png and results.json there, e.g. benchmarks/results (default: $SPECPAGED_BENCH_OUT).",
    )


def pytest_configure(config):
    # Before torch is imported: transformers' generate_batch computes in a thread of its own, which takes its
    # number of threads from here.
    threads = config.getoption("--threads")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    config.stash[RESULTS] = environment(threads)


@pytest.fixture(scope="session")
def results(pytestconfig):
    """What the last line says; benchmarks add to it."""
    return pytestconfig.stash[RESULTS]


@pytest.fixture(scope="session", autouse=True)
def threads(pytestconfig):
    import torch

    torch.set_num_threads(pytestconfig.getoption("--threads"))
    return torch.get_num_threads()


def pytest_terminal_summary(terminalreporter, config):
    from benchmarks.table import print_tables

    terminalreporter.ensure_newline()
    results = config.stash[RESULTS]
    print_tables(results)
    if results.get("rollback", {}).get("rows"):
        from specpaged.studies.rollback import result

        results["rollback"] = matrix = result(**results["rollback"], threads=config.getoption("--threads"))
        matrix.print(Console(width=150))


def pytest_unconfigure(config):
    results = config.stash.get(RESULTS, {})
    measured = {"throughput", "roofline", "k_sweep", "draft_step", "memory", "paging"} & results.keys()
    matrix = results.pop("rollback", None)  # a study's result, which has a file of its own
    matrix = matrix if isinstance(matrix, Result) else None
    if not measured and matrix is None:
        return
    out = config.getoption("--out")
    if out is not None:
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        if matrix is not None:
            print("wrote", *(path.name for path in matrix.write(out)))
        if measured:
            (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        if "throughput" in results:
            from benchmarks.picture import draw

            print(draw(results, out / "throughput.png"))
    print(json.dumps(results | ({} if matrix is None else {"rollback": matrix.as_dict()})))

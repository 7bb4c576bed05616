"""Passes of a target that is split over ranks, captured: what is gathered lies within, and no rank goes its own way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specpaged.modeling.cuda_graphs import CudaGraphs
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.modeling.rank_agreement import RankAgreement, RankError
from specpaged.paging.kv_cache import PagedKVCache
from tests import toys
from tests.kernels import references
from tests.kernels.test_cuda_graphs import Kept
from tests.modeling.test_shard import Ranks

BATCHES = [
    [RaggedRow([5, 9, 2], 0, [1], 3), RaggedRow([8, 8], 0, [3], 1)],
    [RaggedRow([4], 3, [1], 1), RaggedRow([6], 2, [3], 1)],
    [RaggedRow([7], 4, [1], 1), RaggedRow([1], 3, [3], 1)],
]


@pytest.fixture(scope="module", autouse=True)
def _references():
    with pytest.MonkeyPatch.context() as monkeypatch:
        references.put_in_place(monkeypatch)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("split")
    toys.model(num_hidden_layers=1).save_pretrained(path)
    return str(path)


def on_ranks(run, size=2):
    """What `run(rank, ranks)` comes to on each, in step; an exception of each in its place."""
    ranks = Ranks(size)

    def safely(rank):
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                return run(rank, ranks)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(safely, range(size)))


def runner_of(path, shard=None) -> ModelRunner:
    model = load_model(path, max_model_len=64, attention_backend="triton", shard=shard)
    cache = PagedKVCache(model.kv_spec, 4, 16, model.dtype, "cpu")
    for layer in cache.layers:
        layer.zero_()
    return ModelRunner(model, cache)


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    return [runner.forward(pack(rows, 16)).logits for rows in BATCHES]


class Counted:
    """A gather that counts how often this rank was asked."""

    def __init__(self, gather):
        self.gather, self.calls = gather, 0

    def __call__(self, x):
        self.calls += 1
        return self.gather(x)


@pytest.mark.parametrize("fails_at", [None, 0, 1])
def test_captured_passes_of_ranks_compute_what_one_device_does_eagerly(path, fails_at):
    """Where one rank has no memory for a bucket's capture, both run it eagerly, and replay the others."""
    expected = logits_of(runner_of(path))

    def run(rank, ranks):
        runner = runner_of(path, ranks.shard(rank))
        kept, asked = Kept(), []

        def record(run):
            asked.append(run)
            if rank == 1 and fails_at == len(asked) - 1:
                run()  # which the other rank waits for, in its own
                raise torch.OutOfMemoryError("no room for a graph")
            return kept(run)

        agreement = RankAgreement(Counted(ranks.shard(rank).all_gather))
        runner.graphs = CudaGraphs(runner.model, runner.kv_cache, 64, record, agreement)
        return logits_of(runner), runner.graphs.num_captured, agreement._gather.calls, kept.num_replayed

    results = on_ranks(run)
    for logits, num_captured, num_asked, num_replayed in results:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits, expected, strict=True))
        assert num_captured == 2 - (fails_at is not None)  # of the first batch, and of the two that are alike
        assert num_asked == 2 * 2  # before and behind each capture, and never for a replay
        assert num_replayed == {None: 3, 0: 2, 1: 1}[fails_at]
    assert len(results) == 2


def test_ranks_that_are_about_other_passes_are_told_before_they_run_any(path):
    ran = []

    def run(rank, ranks):
        runner = runner_of(path, ranks.shard(rank))
        agreement = RankAgreement(ranks.shard(rank).all_gather)
        runner.graphs = CudaGraphs(runner.model, runner.kv_cache, 64, ran.append, agreement)
        return runner.forward(pack(BATCHES[rank], 16))

    errors = on_ranks(run)
    assert [type(error) for error in errors] == [RankError, RankError]
    assert "ranks are to capture different passes; this one's is of Bucket(rows=8" in str(errors[0])
    assert "this one's is of Bucket(rows=2" in str(errors[1])
    assert ran == []

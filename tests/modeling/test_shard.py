"""A target that is split over ranks computes what one device computes, bit for bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.modeling.shard import Shard
from specpaged.paging.kv_cache import PagedKVCache
from tests.modeling.families import save_toy
from tests.modeling.test_flat import FLAT

ROWS = [RaggedRow([5, 9, 2, 7, 1], 0, [1, 2], 5), RaggedRow([8, 8, 3], 0, [3], 1)]


class Ranks:
    """Threads in step with each other, and what they gather."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts = [None] * size

    def shard(self, rank):
        def all_gather(x):
            self.parts[rank] = x
            self.barrier.wait()
            whole = torch.cat(self.parts, dim=-1)
            self.barrier.wait()
            return whole

        return Shard(rank, self.size, all_gather)


def logits(model):
    """A prefill, then a token more of each: [8, V]."""
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 4, 4, model.dtype, "cpu"))
    first = runner.forward(pack(ROWS, 4)).logits
    then = [RaggedRow([4], 5, [1, 2], 1), RaggedRow([6], 3, [3], 1)]
    return torch.cat([first, runner.forward(pack(then, 4)).logits])


def split_logits(path, size, **options):
    """Every rank's, run in step."""
    ranks = Ranks(size)

    def run(rank):
        torch.set_num_threads(1)
        with torch.inference_mode():
            return logits(load_model(path, max_model_len=64, shard=ranks.shard(rank), **options))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("name", FLAT)
def test_split_over_two_ranks_a_model_has_the_bits_of_one(name, toy_path, toy_model):
    """Heads, inner rows and outputs split in two, fused matrices and biases among them."""
    path = toy_path(name)
    whole = logits(toy_model(name, model_impl="flat", attention_backend="cpp", max_model_len=64))
    for of_rank in split_logits(path, 2, attention_backend="cpp"):
        assert torch.equal(of_rank, whole)


def test_torch_kernels_agree_to_rounding_and_the_report_says_so(toy_path, toy_model):
    whole = logits(toy_model("llama", model_impl="flat", attention_backend="torch", max_model_len=64))
    for of_rank in split_logits(toy_path("llama"), 2, attention_backend="torch"):
        torch.testing.assert_close(of_rank, whole, rtol=0, atol=1e-4)


def test_what_cannot_be_split_is_refused_by_name(toy_path, tmp_path):
    def shard(size):
        return Shard(0, size, lambda x: torch.cat([x] * size, dim=-1))

    with pytest.raises(ValueError, match=r"cannot be split over 4 ranks: its num_kv_heads=2 cannot be split over 4"):
        load_model(toy_path("llama"), max_model_len=64, shard=shard(4))
    with pytest.raises(ValueError, match="cannot be split over 2 ranks: "):
        load_model(toy_path("olmo2"), max_model_len=64, shard=shard(2))
    odd = save_toy("llama", tmp_path, intermediate_size=95)
    with pytest.raises(ValueError, match=r"its intermediate_size=95 cannot be split over 2 ranks"):
        load_model(odd, max_model_len=64, shard=shard(2))


def test_a_rank_holds_its_part_of_the_kv_and_says_whose_bits_it_has(toy_path, toy_model):
    ranks = Ranks(1)
    whole = toy_model("llama", model_impl="flat", attention_backend="cpp", max_model_len=64)
    alone = load_model(toy_path("llama"), max_model_len=64, attention_backend="cpp", shard=ranks.shard(0))
    assert torch.equal(logits(alone), logits(whole))
    assert alone.kv_spec == whole.kv_spec
    assert "rank 0 of 1, the bits of one" in alone.numerics_scheme
    for arguments in ({"attention_backend": "torch"}, {"attention_backend": "cpp", "numerics": "fast"}):
        other = load_model(toy_path("llama"), max_model_len=64, shard=ranks.shard(0), **arguments)
        assert "rank 0 of 1, bits differ from those of one" in other.numerics_scheme

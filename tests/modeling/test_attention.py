"""The CPU backend against the kernels' references, on ragged batches with NaN in every slot that nobody owns."""

import pytest
import torch

from specpaged.modeling.attention.torch_pass import TorchPass
from specpaged.modeling.numerics import AttentionScheme, fast_attention_scheme
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged_kernels.paged_attention import paged_attention_ref
from specpaged_kernels.store_kv import store_kv_ref

SCHEMES = {
    "sdpa x4": AttentionScheme("sdpa", 4, (64, 128, 192, 384, 512), False, 128),
    "sdpa x16": AttentionScheme("sdpa", 16, (512,), False, 7),
    "chunked x4": AttentionScheme("chunked", 4, (64, 128, 192, 256, 320, 384, 448, 512), True, 5),
    "fast": fast_attention_scheme(torch.float32, torch.device("cpu"), 2),
}
# (context, query tokens) of each sequence
BATCHES = {
    "decode": [(0, 1), (5, 1), (63, 1), (64, 1), (200, 1)],
    "verify beside prefill and decode": [(9, 6), (0, 33), (70, 6), (12, 1), (61, 6), (3, 2), (40, 1)],
    "chunked prefill": [(0, 1), (130, 70), (511, 3), (17, 150)],
    "one": [(7, 1)],
}
VARIANTS = {
    "plain": {},
    "scaling": {"scaling": 0.7},
    "window": {"window": 9},
    "softcap": {"softcap": 1.5, "scaling": 0.5},
    "sinks": {"sinks": True},
    "all": {"scaling": 0.4, "window": 21, "softcap": 2.0, "sinks": True},
}


def ragged_world(batch, block_size, heads, kv_heads, dim, filler, dtype):
    """A pool that holds the contexts, in shuffled blocks, and a pass on top of them."""
    generator = torch.Generator().manual_seed(3)
    num_blocks = sum(-(-(c + q) // block_size) for c, q in batch) + 3
    free = (torch.randperm(num_blocks, generator=generator) + 1).tolist()
    rows, owned = [], []
    for context, query_len in batch:
        blocks = [free.pop() for _ in range(-(-(context + query_len) // block_size))]
        owned += [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
        rows.append(RaggedRow([0] * query_len, context, blocks, 0))
    pool = torch.full(((num_blocks + 1) * block_size, 2, kv_heads, dim), float("nan"), dtype=dtype)
    pool[:block_size] = 0
    pool[owned] = torch.randn(len(owned), 2, kv_heads, dim, generator=generator).to(dtype)
    packed = pack(rows, block_size)
    num_rows = packed.num_tokens + filler
    query, key, value = (
        torch.randn(num_rows, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)
    )
    return packed, pool, query, key, value


def run_both(batch, scheme, variant, block_size=16, heads=4, kv_heads=2, dim=16, filler=3, dtype=torch.float32):
    packed, pool, query, key, value = ragged_world(batch, block_size, heads, kv_heads, dim, filler, dtype)
    options = dict(VARIANTS[variant])
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 2, heads)
    expected_pool = pool.clone()
    store_kv_ref(key, value, expected_pool, packed.slot_mapping, torch.tensor(len(packed.slot_mapping)))
    expected = paged_attention_ref(
        query, expected_pool, packed.page_table, packed.cu_query_lens, packed.context_lens, block_size, **options
    )
    paged_pass = TorchPass(packed, packed.num_tokens + filler, [pool], scheme, dtype)
    scaling = options.pop("scaling", None)
    got = paged_pass.attend(0, query, key, value, scaling, **options)
    assert torch.equal(pool.nan_to_num(7), expected_pool.nan_to_num(7)), "stores what the reference stores"
    return got, expected, paged_pass


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("batch", BATCHES)
def test_backend_matches_the_reference(batch, scheme, variant):
    got, expected, _ = run_both(BATCHES[batch], SCHEMES[scheme], variant)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (7, 1, 8), (6, 2, 64), (1, 1, 16)])
@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_geometries_and_block_sizes(heads, kv_heads, dim, block_size):
    shape = dict(heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, filler=0)
    got, expected, _ = run_both(BATCHES["verify beside prefill and decode"], SCHEMES["sdpa x4"], "plain", **shape)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("variant", ["plain", "softcap"])
@pytest.mark.parametrize("upcast", [True, False])
def test_bfloat16(upcast, variant):
    scheme = AttentionScheme("sdpa", 4, (64, 512), upcast, 64)
    got, expected, _ = run_both(BATCHES["chunked prefill"], scheme, variant, dtype=torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_gathered_bytes_are_those_of_the_kv_buckets():
    batch = [(9, 1), (70, 1), (9, 1)]
    _, _, paged_pass = run_both(batch, SCHEMES["sdpa x4"], "plain", heads=4, kv_heads=2, dim=16)
    assert paged_pass.gathered_bytes == (64 + 128 + 64) * 2 * 2 * 16 * 4


def test_sequences_are_never_padded_to_a_mate():
    """A long mate changes nothing in what a short sequence gathers."""
    short = run_both([(9, 1)], SCHEMES["sdpa x4"], "plain")[2].gathered_bytes
    long = run_both([(500, 1)], SCHEMES["sdpa x4"], "plain")[2].gathered_bytes
    assert run_both([(9, 1), (500, 1)], SCHEMES["sdpa x4"], "plain")[2].gathered_bytes == short + long


def test_kv_buckets():
    scheme = SCHEMES["sdpa x4"]
    edges = [1, 64, 65, 128, 129, 192, 193, 384, 385, 512, 513, 576, 577, 1024, 1025]
    assert [scheme.kv_bucket(n) for n in edges] == [
        64, 64, 128, 128, 192, 192, 384, 384, 512, 512, 576, 576, 640, 1024, 1088,
    ]  # fmt: skip

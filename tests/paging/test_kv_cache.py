from __future__ import annotations

import math

import pytest
import torch

from specpaged.paging.kv_cache import KVSpec, PagedKVCache

SPEC = KVSpec(((2, 8), (1, 4), (3, 8)))  # layers need not be alike
NUM_BLOCKS = 6


def make_cache(block_size: int = 4, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    """Every slot but the null block's holds its own values."""
    cache = PagedKVCache(SPEC, NUM_BLOCKS, block_size, dtype, "cpu")
    for i, layer in enumerate(cache.layers):
        owned = layer[block_size:]
        owned.copy_(torch.arange(owned.numel()).reshape(owned.shape) % 251 + i)
    return cache


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_have_one_slot_per_token_of_every_block(block_size, dtype):
    cache = PagedKVCache(SPEC, NUM_BLOCKS, block_size, dtype, "cpu")
    num_slots = (NUM_BLOCKS + 1) * block_size
    assert [tuple(layer.shape) for layer in cache.layers] == [(num_slots, 2, h, d) for h, d in SPEC.layers]
    assert all(layer.dtype == dtype for layer in cache.layers)
    assert cache.num_bytes == sum(layer.nbytes for layer in cache.layers)
    assert cache.bytes_per_token * num_slots == cache.num_bytes


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_null_block_is_zeros_and_stays_so(block_size):
    cache = PagedKVCache(SPEC, NUM_BLOCKS, block_size, torch.float32, "cpu")
    for change in (
        lambda: None,
        lambda: cache.fill_unowned([]),
        lambda: cache.copy_blocks([(1, 2), (3, 6)]),
        lambda: cache.fill_unowned(range(block_size), value=7.0),
    ):
        change()
        assert all(not layer[:block_size].any() for layer in cache.layers)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(2, 5)],
        [(2, 5), (2, 6)],  # one source, two destinations
        [(1, 2), (2, 3)],  # a chain: 3 receives what 2 held before
        [(1, 2), (2, 1)],  # an exchange
    ],
)
def test_copy_blocks_copies_exactly_the_pairs_in_every_layer(block_size, pairs):
    cache = make_cache(block_size)
    before = [layer.clone() for layer in cache.layers]
    num_bytes = cache.copy_blocks(pairs)
    source_of = {destination: source for source, destination in pairs}
    for layer, old in zip(cache.layers, before, strict=True):
        for block in range(NUM_BLOCKS + 1):
            source = source_of.get(block, block)
            expected = old[source * block_size : (source + 1) * block_size]
            assert torch.equal(layer[block * block_size : (block + 1) * block_size], expected)
    assert num_bytes == len(pairs) * block_size * cache.bytes_per_token


@pytest.mark.parametrize("pairs", [[(0, 1)], [(1, 0)], [(1, 7)], [(7, 1)], [(-1, 1)], [(2, 3), (1, -1)]])
def test_copy_blocks_refuses_blocks_outside_the_pool_and_changes_nothing(pairs):
    cache = make_cache()
    before = [layer.clone() for layer in cache.layers]
    with pytest.raises(ValueError, match=r"pairs must name blocks in 1..6, got"):
        cache.copy_blocks(pairs)
    assert all(map(torch.equal, cache.layers, before))


def test_copy_blocks_refuses_two_sources_for_one_destination():
    with pytest.raises(ValueError, match="must not name a destination twice"):
        make_cache().copy_blocks([(1, 3), (2, 3)])


def test_fill_unowned_leaves_owned_slots_untouched():
    cache = make_cache()
    before = [layer.clone() for layer in cache.layers]
    owned = [4, 9, 10, 27]
    cache.fill_unowned(owned)
    for layer, old in zip(cache.layers, before, strict=True):
        for slot in range(layer.shape[0]):
            if slot < 4 or slot in owned:
                assert torch.equal(layer[slot], old[slot])
            else:
                assert layer[slot].isnan().all()


def test_fill_unowned_takes_a_tensor_and_a_value():
    cache = make_cache(dtype=torch.bfloat16)
    cache.fill_unowned(torch.arange(4, 12), value=math.inf)
    for layer in cache.layers:
        assert layer[:12].isfinite().all()
        assert layer[12:].isinf().all()


@pytest.mark.parametrize("slot", [-1, 28])
def test_fill_unowned_refuses_slots_outside_the_pool(slot):
    with pytest.raises(ValueError, match=r"owned_slots must be in 0..27, got"):
        make_cache().fill_unowned([5, slot])


@pytest.mark.parametrize("layers", [(), ((0, 8),), ((2, -1),), ((2, 8), (2, 0))])
def test_a_kv_spec_has_layers_of_positive_size(layers):
    with pytest.raises(ValueError, match="must"):
        KVSpec(layers)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"dtype": torch.int8}, "dtype"),
    ],
)
def test_bad_sizes_are_named(changes, name):
    args = {"num_blocks": 2, "block_size": 4, "dtype": torch.float32, **changes}
    with pytest.raises(ValueError, match=f"{name} must be"):
        PagedKVCache(SPEC, device="cpu", **args)

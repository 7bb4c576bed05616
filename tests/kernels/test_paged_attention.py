"""The attention kernel, in Triton's interpreter, against its reference and against itself in other batches."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged_kernels.paged_attention import Tiles, choose_tiles, paged_attention, paged_attention_ref, work_list_ref
from tests.kernels.world import World, make_world

SPLIT = 32


def small_tiles(group: int, block_size: int) -> Tiles:
    """The engine's tiles, with short splits, and steps of two blocks where blocks are small."""
    return Tiles(choose_tiles(64, group, torch.float16).block_m, 32 if block_size == 16 else 16, SPLIT, 4, 1)


def run(world: World, **options) -> torch.Tensor:
    group = world.query.shape[1] // world.kv_pool.shape[2]
    tiles = small_tiles(group, world.block_size)
    work_list = work_list_ref(world.cu_query_lens, world.context_lens, tiles.tokens(group), tiles.split_len)
    output = torch.full_like(world.query, float("nan"))
    got = paged_attention(*world.arguments, work_list, **options, output=output, tiles=tiles)
    assert got is output
    return got


def assert_matches_reference(world: World, **options) -> None:
    expected = paged_attention_ref(*world.arguments, **options)
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3}[world.query.dtype]
    torch.testing.assert_close(run(world, **options), expected, rtol=tolerance, atol=tolerance)


# (group, head_dim, block_size, dtype, window, softcap, sinks): every pair of values of any two occurs.
PAIRWISE = [
    (1, 32, 16, "float16", None, None, False),
    (1, 64, 32, "float32", 7, 20.0, False),
    (1, 128, 64, "float32", 40, 20.0, True),
    (2, 32, 32, "float16", 40, None, False),
    (2, 64, 16, "float16", 7, 20.0, True),
    (2, 128, 64, "float32", None, None, True),
    (4, 32, 32, "float32", 7, None, True),
    (4, 64, 16, "float32", 40, None, True),
    (4, 64, 64, "float16", None, 20.0, False),
    (4, 128, 16, "float16", 7, 20.0, False),
    (8, 32, 64, "float16", 7, 20.0, True),
    (8, 32, 16, "float32", 40, None, False),
    (8, 64, 64, "float32", 7, None, True),
    (8, 128, 32, "float16", None, None, False),
]


VALUES = [(1, 2, 4, 8), (32, 64, 128), (16, 32, 64), ("float32", "float16"), (None, 7, 40), (None, 20.0), (False, True)]


def test_the_table_has_every_pair():
    for (i, some), (j, others) in combinations(enumerate(VALUES), 2):
        assert {(row[i], row[j]) for row in PAIRWISE} == set(product(some, others))


@pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype", "window", "softcap", "sinks"), PAIRWISE)
def test_kernel_equals_its_reference(group, head_dim, block_size, dtype, window, softcap, sinks):
    world = make_world(
        [1, 6, 0, 9, 3], [3 * SPLIT + 1, 0, 40, 27, 64],
        num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, block_size=block_size,
        dtype=getattr(torch, dtype), filler=3,
    )  # fmt: skip
    sink_logits = torch.linspace(-1, 2, 2 * group) if sinks else None
    assert_matches_reference(world, window=window, softcap=softcap, sinks=sink_logits)


@settings(max_examples=8)
@given(data=st.data())
def test_kernel_equals_its_reference_whatever_the_raggedness(data):
    lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3 * SPLIT + 1)), min_size=1, max_size=3)
    pairs = data.draw(lengths.filter(lambda pairs: any(q for q, _ in pairs)))
    world = make_world(
        [q for q, _ in pairs], [c for _, c in pairs],
        num_heads=4, num_kv_heads=2, head_dim=32, block_size=data.draw(st.sampled_from([16, 32, 64])),
        filler=data.draw(st.integers(0, 2)), seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    assert_matches_reference(world, window=data.draw(st.sampled_from([None, 1, 17, 50])))


def part_of(world: World, b: int, start: int, stop: int) -> World:
    """Tokens start .. stop-1 of one sequence of `world` as a batch of their own."""
    row = int(world.cu_query_lens[b])
    return World(
        world.query[row + start : row + stop],
        world.kv_pool,
        world.page_table[b : b + 1],
        torch.tensor([0, stop - start], dtype=torch.int32),
        world.context_lens[b : b + 1] + start,
        world.block_size,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("group", "window"), [(2, None), (4, 40)])
def test_a_row_is_bitwise_the_same_in_decode_verify_and_chunked_prefill(dtype, group, window):
    """40 tokens of prefill (splits one after another in a program), verify (side by side), and one by one."""
    world = make_world(
        [40, 6], [50, 30], num_heads=group, num_kv_heads=1, head_dim=64, block_size=32, dtype=dtype, filler=1
    )
    together = run(world, window=window)
    for b, query_len in ((0, 40), (1, 6)):
        row = int(world.cu_query_lens[b])
        for start, stop in ((0, query_len), (query_len - 6, query_len), *((t, t + 1) for t in range(0, query_len, 5))):
            alone = run(part_of(world, b, start, stop), window=window)
            assert torch.equal(alone, together[row + start : row + stop])

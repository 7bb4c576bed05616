"""The C++ attention against the references, on ragged batches with NaN in every slot that nobody owns."""

import ctypes
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged_kernels.cpu.build import CACHE, load
from specpaged_kernels.cpu.library import POINTER, SIZE, SOURCE
from specpaged_kernels.kv_storage import as_stored
from specpaged_kernels.paged_attention import paged_attention_ref
from specpaged_kernels.store_kv import store_kv_ref
from tests.kernels.cpu.lanes import load_with_other_lanes
from tests.kernels.cpu.world import World

# (context, query tokens) of each sequence
BATCHES = {
    "decode": [(0, 1), (5, 1), (63, 1), (64, 1), (127, 1), (128, 1), (200, 1)],
    "verify beside prefill and decode": [(9, 6), (0, 33), (70, 6), (12, 1), (61, 6), (3, 2), (40, 1)],
    "chunked prefill": [(0, 1), (130, 70), (31, 3), (17, 66)],
}
OPTIONS = {
    "plain": {},
    "scaling": {"scaling": 0.4},
    "window": {"window": 9},
    "window past a chunk": {"window": 100},
    "softcap": {"softcap": 1.5, "scaling": 0.5},
    "sinks": {"sinks": True},
    "all": {"scaling": 0.4, "window": 21, "softcap": 2.0, "sinks": True},
}
GEOMETRIES = [(4, 2, 16), (8, 1, 32), (3, 3, 20), (2, 2, 64), (6, 2, 24), (4, 1, 128), (80, 1, 72)]  # Hq, Hkv, D


ARGUMENTS = [POINTER, *[POINTER, SIZE, SIZE] * 3, POINTER, POINTER]


def options_for(name: str, num_heads: int) -> dict:
    options = dict(OPTIONS[name])
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 2, num_heads)
    return options


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_it_stores_and_attends_as_the_references_do(batch, geometry, options):
    check(World(BATCHES[batch], *geometry), options_for(options, geometry[0]), 1e-5)


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("batch", BATCHES)
def test_bfloat16(batch, options):
    check(World(BATCHES[batch], 4, 2, 16, dtype=torch.bfloat16), options_for(options, 4), 2**-7)


KV_DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("dtype", "kv_dtype"), KV_DTYPES)
def test_pages_may_be_of_another_dtype(dtype, kv_dtype, geometry, options):
    """Which every token reads, those of its own pass, too."""
    for batch in BATCHES.values():
        world = World(batch, *geometry, dtype=dtype, kv_dtype=kv_dtype)
        check(world, options_for(options, geometry[0]), 1e-5 if dtype == torch.float32 else 2**-7)


def test_what_is_stored_is_rounded_as_torch_does():
    """Ties, subnormal numbers, the largest ones, infinities, NaN; but 8 bits have none larger than their largest."""
    for kv_dtype, bits in (
        (torch.float16, torch.int16),
        (torch.bfloat16, torch.int16),
        (torch.float8_e4m3fn, torch.uint8),
    ):
        every = torch.arange(2 ** (8 * bits.itemsize), dtype=torch.int32)
        narrow = every.to(bits).view(kv_dtype).float()
        up, down = (torch.nextafter(narrow, torch.tensor(to)) for to in (torch.inf, -torch.inf))
        following = (every + 1).to(bits).view(kv_dtype).float()
        middle = (narrow.double() + following.double()).div(2).float()  # as far from both
        values = torch.cat(
            [narrow, up, down, middle, torch.tensor([65519.9, 65520.0, -1e30, 465.0, 2.0**-25, 2.0**-26])]
        )
        values = torch.nn.functional.pad(values, (0, -len(values) % 1024)).view(-1, 1, 1024)
        world = World([(0, len(values))], 1, 1, 1024, kv_dtype=kv_dtype, filler=0)
        world.key = world.value = values
        world.query = torch.zeros_like(values)
        world.attend()
        slots = world.slot_mapping
        for stored in world.pool[slots].unbind(1):
            torch.testing.assert_close(
                stored.float(), as_stored(values, kv_dtype).float(), rtol=0, atol=0, equal_nan=True
            )


@pytest.fixture
def without_f16c(tmp_path, monkeypatch):
    """The vectors of a CPU that has no instruction for float16, in a library of what is given."""
    monkeypatch.setenv(CACHE, str(tmp_path / "built"))
    for path in SOURCE.parent.glob("*.h"):
        shutil.copy(path, tmp_path)

    def make(code):
        source = tmp_path / "converted.cpp"
        source.write_text(f'#undef __F16C__\n#include "vectors.h"\n{code}\n')
        return load(source)

    return make


def test_float16_is_rounded_alike_where_no_instruction_does(without_f16c):
    library = without_f16c(
        """extern "C" void rounded(const float* from, int64_t count, float16* to) {
            for (int64_t i = 0; i < count; ++i) from_float(from[i], to + i);
        }"""
    )
    bits = torch.cat([torch.arange(-(2**31), 2**31, 4099), torch.arange(0x38000000, 0x38900000, 61)])
    values = bits.to(torch.int32).view(torch.float32)
    got = torch.empty(len(values), dtype=torch.float16)
    library.rounded(ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(len(values)), ctypes.c_void_p(got.data_ptr()))
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got.nan_to_num(0, 7, -7).view(torch.int16), values.half().nan_to_num(0, 7, -7).view(torch.int16))


def test_eight_bits_are_what_torch_has_for_them_with_and_without_an_instruction(without_f16c):
    """Read by a pass whose only key has the value 1, and by the vectors alone."""
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    library = without_f16c(
        """extern "C" void widened(const float8* from, int64_t count, float* to) {
            for (int64_t i = 0; i < count; i += LANES) store(to + i, load(from + i));
        }"""
    )
    got = torch.empty(256)
    library.widened(ctypes.c_void_p(every.data_ptr()), ctypes.c_int64(256), ctypes.c_void_p(got.data_ptr()))
    torch.testing.assert_close(got, every.float(), rtol=0, atol=0, equal_nan=True)
    world = World([(0, 1)], 1, 1, 256, kv_dtype=torch.float8_e4m3fn, filler=0)
    world.query, world.key, world.value = torch.zeros(1, 1, 256), torch.ones(1, 1, 256), every.float().view(1, 1, 256)
    torch.testing.assert_close(world.attend().view(256), every.float(), rtol=0, atol=0, equal_nan=True)


def check(world: World, options: dict, tolerance: float) -> None:
    expected_pool = world.pool.clone()
    store_kv_ref(world.key, world.value, expected_pool, world.slot_mapping, torch.tensor(world.num_tokens))
    expected = paged_attention_ref(
        world.query, expected_pool, world.page_table, world.cu_query_lens, world.context_lens, world.block_size,
        **options,
    )  # fmt: skip
    got = world.attend(**options)
    assert torch.equal(world.pool.float().nan_to_num(7), expected_pool.float().nan_to_num(7)), (
        "stores what the reference stores"
    )
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=40)
@given(
    batch=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), min_size=1, max_size=6).filter(
        lambda batch: any(query_len for _, query_len in batch)
    ),
    block_size=st.sampled_from([1, 4, 16, 64]),
    window=st.none() | st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_ragged_batches(batch, block_size, window, seed):
    check(World(batch, 4, 2, 16, block_size=block_size, seed=seed), {"window": window}, 1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, None), (torch.bfloat16, None), *KV_DTYPES[:2]])
def test_a_token_has_the_same_bits_in_decode_verify_and_prefill(dtype, kv_dtype, head_dim, options):
    """Beside mates, in any tile and any blocks, on any threads."""
    length, geometry = 150, (4, 2, head_dim)
    whole = World([(0, length)], *geometry, dtype=dtype, kv_dtype=kv_dtype)
    given_options = options_for(options, 4)
    expected = whole.attend(**given_options)

    def rows(start: int, stop: int, mates: list[tuple[int, int]], seed: int) -> torch.Tensor:
        world = World([*mates, (start, stop - start)], *geometry, dtype=dtype, seed=seed, kv_dtype=kv_dtype)
        world.copy_sequence(whole, start, stop)
        return world.attend(**given_options)[sum(query_len for _, query_len in mates) :][: stop - start]

    for start in (1, 7, 8, 63, 64, 65, 127, 128, 149):
        assert torch.equal(rows(start, start + 1, [], 1), expected[start : start + 1])
    for start, stop in ((30, 36), (63, 70), (100, 107), (5, 120)):
        got = rows(start, stop, [(17, 3), (90, 1), (0, 40)], stop)
        assert torch.equal(got, expected[start:stop]), (start, stop)
    torch.set_num_threads(2)
    try:
        # A few tiles, whose heads go to different threads; and many, whose heads stay together.
        for mates in ([(17, 3), (90, 1)], [(3 * i, 1) for i in range(12)]):
            assert torch.equal(rows(63, 70, mates, 3), expected[63:70])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("num_tokens", range(1, 12))
@pytest.mark.parametrize("head_dim", [8, 24, 32, 40])
def test_few_rows_have_the_bits_that_they_have_among_many(head_dim, num_tokens):
    """From some rows on, a chunk's keys and values are packed: all rows but one read what a draft spoils."""
    geometry, context = (6, 2, head_dim), 75
    whole = World([(0, context + num_tokens)], *geometry)
    expected = whole.attend(softcap=3.0, window=70)[context : context + num_tokens]
    world = World([(context, num_tokens)], *geometry, seed=1)
    world.copy_sequence(whole, context, context + num_tokens)
    assert torch.equal(world.attend(softcap=3.0, window=70)[:num_tokens], expected)
    world.value[num_tokens - 1] = world.key[num_tokens - 1] = float("nan")
    assert torch.equal(world.attend(softcap=3.0, window=70)[: num_tokens - 1], expected[:-1])


# What `divide` draws: tokens of two sequences, at most three in a tile.
DIVIDE = """
extern "C" int64_t divided(int64_t num_seqs, const int32_t* cu_query_lens, int64_t num_wanted, const int64_t* wanted,
                           int most, int32_t* tiles) {
    Pass pass{};
    pass.num_seqs = num_seqs;
    pass.cu_query_lens = cu_query_lens;
    const std::vector<int64_t> rows(wanted, wanted + std::max<int64_t>(0, num_wanted));
    std::vector<Tile> found;
    divide(pass, num_wanted < 0 ? nullptr : &rows, most, found);
    for (const Tile& tile : found) *tiles++ = tile.seq, *tiles++ = tile.first, *tiles++ = tile.last;
    return int64_t(found.size());
}
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The kernel with as many lanes as that of this processor does not have, and `divided`."""
    return load_with_other_lanes(tmp_path_factory.mktemp("attention"), "paged_attention", behind=DIVIDE)


def test_sixteen_lanes_give_the_bits_of_eight(other, monkeypatch):
    got = []
    for library in (load(SOURCE), other):
        functions = {torch.float32: library.paged_attention_float32, torch.bfloat16: library.paged_attention_bfloat16}
        for function in functions.values():
            function.argtypes = ARGUMENTS
        monkeypatch.setattr("specpaged_kernels.cpu.paged_attention._functions", lambda found=functions: found)
        got.append([
            World(batch, *geometry, dtype=dtype).attend(**options_for(options, geometry[0]))
            for batch in BATCHES.values()
            for geometry in GEOMETRIES
            for dtype, options in ((torch.float32, "plain"), (torch.float32, "all"), (torch.bfloat16, "plain"))
        ])  # fmt: skip
    for eight, sixteen in zip(*got, strict=True):
        assert torch.equal(eight, sixteen)


@pytest.fixture(scope="module")
def divided(other):
    def tiles(query_lens: list[int], wanted: list[int] | None, most: int) -> list[tuple[int, int, int]]:
        bounds = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        rows = torch.tensor(wanted or [0], dtype=torch.int64)
        found = torch.zeros(sum(query_lens) + 1, 3, dtype=torch.int32)
        count = other.divided(
            ctypes.c_int64(len(query_lens)), ctypes.c_void_p(bounds.data_ptr()),
            ctypes.c_int64(-1 if wanted is None else len(wanted)), ctypes.c_void_p(rows.data_ptr()), most,
            ctypes.c_void_p(found.data_ptr()),
        )  # fmt: skip
        return [tuple(tile) for tile in found[:count].tolist()]

    return tiles


def test_tiles_cover_what_is_wanted(divided):
    assert divided([5, 2], None, 3) == [(0, 0, 3), (0, 3, 5), (1, 0, 2)]
    assert divided([5, 2], [1, 2, 4, 6], 3) == [(0, 1, 3), (0, 4, 5), (1, 1, 2)]
    assert divided([5, 2], [], 3) == []


@settings(max_examples=100)
@given(
    query_lens=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    most=st.integers(1, 5),
    data=st.data(),
)
def test_each_wanted_token_is_in_one_tile_and_no_other_token_is(divided, query_lens, most, data):
    num_rows = sum(query_lens)
    filler = 3  # whose rows may be wanted, and are in no tile
    wanted = data.draw(st.none() | st.sets(st.integers(0, num_rows + filler - 1)).map(sorted))
    tiles = divided(query_lens, wanted, most)
    starts = [sum(query_lens[:seq]) for seq in range(len(query_lens))]
    covered = [starts[seq] + token for seq, first, last in tiles for token in range(first, last)]
    assert covered == (list(range(num_rows)) if wanted is None else [row for row in wanted if row < num_rows])
    assert all(0 < last - first <= most and last <= query_lens[seq] for seq, first, last in tiles)


def test_nan_in_a_drafts_kv_does_not_reach_the_rows_before_it():
    world = World([(40, 6), (3, 2)], 4, 2, 16)
    clean = world.attend()
    world.value[3] = float("nan")
    world.key[4] = float("nan")
    spoilt = world.attend()
    assert torch.equal(spoilt[:3], clean[:3])
    assert spoilt[3:6].isnan().all()
    assert torch.equal(spoilt[6:8], clean[6:8])


def test_nan_before_a_window_does_not_reach_it():
    world = World([(40, 3), (3, 2)], 4, 2, 16)
    clean = world.attend(window=9)
    world.pool[[world.slot(0, position) for position in range(32)]] = float("nan")
    world.value[1] = world.value[2] = 0.0
    expected = world.attend(window=9)
    assert torch.equal(expected[0], clean[0])
    assert torch.isfinite(expected[:5]).all()
    world.pool[world.slot(0, 32), 1] = float("nan")  # the first position that the first row reads
    spoilt = world.attend(window=9)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1:5], expected[1:5])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_does_not_fit_the_pool_is_refused(name):
    world = World([(5, 2)], 4, 2, 16)
    setattr(world, name, getattr(world, name).bfloat16())
    with pytest.raises(ValueError, match=r"(kv_pool|key|value) is \[.*; allowed: \["):
        world.attend()


def test_filler_rows_are_zeros_and_store_nothing():
    world = World([(5, 2)], 4, 2, 16, filler=5)
    got = world.attend(output=torch.full((7, 4, 16), float("nan")))
    assert not got[2:].any()

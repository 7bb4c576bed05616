"""Dense realignment, in Triton's interpreter."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged_kernels.realign import realign, realign_ref


def run_both(cache, slots, lengths, shifts):
    """The cache after the kernel, which is also that of the reference."""
    caches = cache.clone(), cache.clone()
    moves = torch.tensor(slots), *(torch.tensor(x, dtype=torch.int32) for x in (lengths, shifts))
    realign(caches[0], *moves)
    realign_ref(caches[1], *moves)
    assert torch.equal(*(c.nan_to_num(7.0) for c in caches))
    return caches[0]


def test_the_worked_example_of_the_docstring():
    cache = torch.full((1, 3 * 7, 2, 1, 2), float("nan"))
    for row, length in enumerate((5, 2, 4)):
        cache[0, 7 * row + 2 : 7 * row + 2 + length] = torch.arange(1.0, length + 1)[:, None, None, None]
    got = run_both(cache, [9, 16], [2, 4], [3, 1]).view(3, 7, 4)[..., 0]
    assert [row[i:].tolist() for row, i in zip(got, (2, 5, 3), strict=True)] == [[1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 4]]


@settings(max_examples=15)
@given(data=st.data())
def test_kernel_equals_its_reference_and_touches_nothing_else(data):
    """Rows of one width; moves to both sides, by less and by more than a tile, some of them onto themselves."""
    num_layers, num_rows, width = (
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 200)),
    )
    slots, lengths, shifts = [], [], []
    for row in range(num_rows):
        length = data.draw(st.integers(0, width))
        start, end = (data.draw(st.integers(0, width - length)) for _ in range(2))
        slots.append(row * width + start)
        lengths.append(length)
        shifts.append(end - start)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    cache = torch.randn(num_layers, num_rows * width, 2, data.draw(st.integers(1, 2)), 20, generator=generator).to(
        dtype
    )
    run_both(cache, slots, lengths, shifts)

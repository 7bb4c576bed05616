"""Dense realignment, in Triton's interpreter."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged_kernels.realign import realign, realign_ref


def run_both(cache, starts, lengths, new_length):
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in (starts, lengths))
    got, expected = (f(cache, starts, lengths, new_length) for f in (realign, realign_ref))
    assert torch.equal(got, expected)  # NaN in what is not kept must not show
    return got


def test_the_worked_example_of_the_docstring():
    cache = torch.full((3, 1, 7, 2), float("nan"))
    for b, length in enumerate((5, 2, 4)):
        cache[b, 0, 2 : 2 + length] = torch.arange(1.0, length + 1)[:, None]
    got = run_both(cache, [2, 2, 2], [5, 2, 4], 5)
    assert got[:, 0, :, 0].tolist() == [[1, 2, 3, 4, 5], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_kernel_equals_its_reference(data):
    num_seqs, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 130))
    lengths = [data.draw(st.integers(0, width)) for _ in range(num_seqs)]
    starts = [data.draw(st.integers(0, width - n)) for n in lengths]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    stored = (
        torch.randn(num_seqs, width, 2, 40, generator=generator).to(dtype).transpose(1, 2)
    )  # heads behind positions
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        stored[b, :, :start] = float("nan")
        stored[b, :, start + length :] = float("nan")
    run_both(stored, starts, lengths, max(lengths) + data.draw(st.integers(0, 2)) or 1)

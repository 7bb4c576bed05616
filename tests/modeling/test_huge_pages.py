"""Weights that fill a huge page lie side by side in such pages, and are what they were."""

import gc
import weakref

import pytest
import torch

from specpaged.modeling.huge_pages import CACHE_LINE, HUGE_PAGE, HugePages, gather_weights
from specpaged.modeling.linear import CppKernel, runs_cpp

pytestmark = pytest.mark.skipif(not runs_cpp(torch.float32, torch.device("cpu")), reason="no C++ kernels here")


def kernels(*shapes: tuple[int, int]) -> list[CppKernel]:
    return [CppKernel(torch.randn(shape), None) for shape in shapes]


def test_weights_lie_one_behind_the_other_from_the_start_of_a_huge_page_and_outputs_stay():
    # 600 x 1000 floats, padded to 608 outputs, are 2.4 MB; 17 x 3, padded to 32, are 384 bytes; 16 x 5 are 320.
    linears = kernels((600, 1000), (17, 3), (16, 5))
    inputs = [torch.randn(4, linear.weight.shape[1]) for linear in linears]
    expected = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
    gather_weights(linears)
    starts = [linear.weight.data_ptr() for linear in linears]
    assert starts[0] % HUGE_PAGE == 0
    assert [start - starts[0] for start in starts] == [0, 608 * 1000 * 4, 608 * 1000 * 4 + 384]
    for linear, x, y in zip(linears, inputs, expected, strict=True):
        assert torch.equal(linear(x), y)


def test_a_copy_starts_at_a_cache_line():
    pages = HugePages(4 * CACHE_LINE)
    first, second = pages.copy_of(torch.arange(17.0)), pages.copy_of(torch.arange(3, dtype=torch.bfloat16))
    assert second.data_ptr() - first.data_ptr() == 2 * CACHE_LINE
    assert first.tolist() == list(range(17))
    assert second.tolist() == [0, 1, 2]


def test_weights_that_fill_no_huge_page_stay_where_they_are():
    linears = kernels((64, 64))
    start = linears[0].weight.data_ptr()
    gather_weights(linears)
    assert linears[0].weight.data_ptr() == start


def test_what_was_moved_is_freed_before_the_next_is_moved(monkeypatch):
    linears = kernels((600, 1000), (600, 1000))
    before = [weakref.ref(linear.weight) for linear in linears]
    seen = []
    copy_of = HugePages.copy_of

    def watched(pages, tensor):
        gc.collect()
        seen.append([ref() is not None for ref in before])
        return copy_of(pages, tensor)

    monkeypatch.setattr(HugePages, "copy_of", watched)
    gather_weights(linears)
    assert seen == [[True, True], [False, True]]

import pytest
import torch

from specpaged.sampling.elementwise import exp_fp32, log_fp32_, log_softmax_fp32, softmax_fp32


def test_exp_is_accurate_and_exact_at_its_ends():
    x = torch.cat([torch.linspace(-87, 0, 50_001), -torch.logspace(-8, 0, 1000)])
    exact = x.double().exp()
    assert ((exp_fp32(x) - exact).abs() / exact).max() < 2e-7
    ends = torch.tensor([0.0, -0.0, -87.5, float("-inf"), float("nan")])
    assert exp_fp32(ends).tolist() == [1, 1, 0, 0, 0]


def test_log_is_accurate_near_one_too():
    x = torch.cat([torch.logspace(-37, 37, 50_001), 1 + torch.linspace(-0.01, 0.01, 2001)])
    x = x[x != 1]
    exact = x.double().log()
    assert ((log_fp32_(x.clone()) - exact).abs() / exact.abs()).max() < 3e-7


def test_softmax_and_log_softmax_match_torch():
    x = torch.randn(5, 3001, generator=torch.Generator().manual_seed(0)) * 6
    x[0, :50] = float("-inf")
    torch.testing.assert_close(softmax_fp32(x), x.double().softmax(-1).float(), rtol=3e-6, atol=1e-11)
    torch.testing.assert_close(log_softmax_fp32(x), x.double().log_softmax(-1).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("vocab_size", "threads"), [(2048, 1), (50_257, 1), (50_257, 2)])
def test_rows_do_not_depend_on_other_rows_or_on_memory_layout(vocab_size, threads):
    torch.set_num_threads(threads)
    try:
        x = torch.randn(48, vocab_size + 3, generator=torch.Generator().manual_seed(1))[:, 1:-2] * 5
        for function in (softmax_fp32, log_softmax_fp32):
            together = function(x - 30)
            for r in (7, 47):
                assert torch.equal(function((x - 30)[r : r + 1]), together[r : r + 1])
            assert torch.equal(function(x[3:9] - 30), together[3:9])
    finally:
        torch.set_num_threads(1)


def test_a_row_with_nan_stays_nan_and_alone():
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    clean = log_softmax_fp32(x)
    x[1, 4] = float("nan")
    got = log_softmax_fp32(x)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[[0, 2]], clean[[0, 2]])

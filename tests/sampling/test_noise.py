import random

import pytest
import torch

from specpaged.sampling.noise import ACCEPT, RECOVER, SAMPLE, _gumbel, gumbel_noise, hash_bits, uniform

GOLDEN = [
    [-1092492580, -1111379269, 1072928160, 1042973458],
    [1040744076, -1104671704, 1061705514, 1069530954],
]  # seeds 0 and 12345 at output indices 0 and 7


def _popcount(x):
    x = x.to(torch.int64) & 0xFFFFFFFF
    return sum(((x >> bit) & 1).double().mean().item() for bit in range(32))


def _lowbias32(x):
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def _mix64(x):
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def test_the_hash_equals_its_definition_in_python_ints():
    for seed, t, purpose in [(0, 0, SAMPLE), (7, 3, SAMPLE), (-5, 10**6, ACCEPT), (2**64 - 1, 1, RECOVER)]:
        first = _mix64(_mix64(_mix64(seed % 2**64) ^ purpose) ^ t)
        second = _mix64(first)
        expected = []
        for v in range(300):
            x = _lowbias32(v ^ (first & 0xFFFFFFFF))
            x = _lowbias32((x + (first >> 32)) & 0xFFFFFFFF)
            expected.append(x ^ (second & 0xFFFFFFFF))
        got = hash_bits([seed], [t], 300, "cpu", purpose)[0].to(torch.int64) & 0xFFFFFFFF
        assert got.tolist() == expected


def test_the_noise_of_a_seed_does_not_change_between_versions():
    # Outputs with a seed are promised to repeat: changing the noise changes them all.
    got = gumbel_noise([0, 12345], [0, 7], 4, "cpu")
    assert got.view(torch.int32).tolist() == GOLDEN


@pytest.mark.parametrize("threads", [1, 2])
def test_noise_is_the_same_in_any_batch_order_and_vocabulary(threads):
    torch.set_num_threads(threads)
    try:
        rng = random.Random(0)
        keys = [(rng.getrandbits(64), rng.randrange(2000)) for _ in range(7 if threads == 1 else 2)]
        alone = {key: gumbel_noise([key[0]], [key[1]], 70_001, "cpu")[0] for key in keys}
        # 2 threads share the work from 32768 elements on.
        for vocab_size in (1, 3, 63, 64, 2049, 70_001) if threads == 1 else (70_001,):
            for _ in range(3 if threads == 1 else 1):
                some = rng.choices(keys, k=rng.randrange(1, 9 if threads == 1 else 3))
                got = gumbel_noise([s for s, _ in some], [t for _, t in some], vocab_size, "cpu")
                for row, key in zip(got, some, strict=True):
                    assert torch.equal(row, alone[key][:vocab_size])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 63])
def test_neighbouring_seeds_give_unrelated_bits(bit):
    flipped = hash_bits([11], [5], 4096, "cpu") ^ hash_bits([11 ^ (1 << bit)], [5], 4096, "cpu")
    assert abs(_popcount(flipped) - 16) < 0.25


@pytest.mark.parametrize("change", ["output index", "token id", "purpose"])
def test_neighbouring_indices_ids_and_purposes_give_unrelated_bits(change):
    base = hash_bits([11], [5], 4096, "cpu")
    if change == "output index":
        other = hash_bits([11], [6], 4096, "cpu")
    elif change == "purpose":
        other = hash_bits([11], [5], 4096, "cpu", RECOVER)
    else:
        other = base.roll(1, dims=-1)
    assert abs(_popcount(base ^ other) - 16) < 0.25


def test_seed_and_output_index_do_not_trade_places():
    keys = [(s, t) for s in range(40) for t in range(40)]
    rows = hash_bits([s for s, _ in keys], [t for _, t in keys], 4, "cpu")
    assert len({tuple(row) for row in rows.tolist()}) == len(keys)


def test_every_bit_is_set_half_of_the_time():
    bits = hash_bits(list(range(64)), [0] * 64, 4096, "cpu")
    for bit in range(32):
        assert abs(((bits >> bit) & 1).double().mean().item() - 0.5) < 0.004  # 4 sigma


def test_noise_follows_the_gumbel_distribution():
    noise = gumbel_noise(list(range(8)), [0] * 8, 50_000, "cpu").double().flatten()
    n = noise.numel()
    assert bool(noise.isfinite().all())
    assert abs(noise.mean().item() - 0.577216) < 4 * 1.2825 / n**0.5
    # Kolmogorov-Smirnov against exp(-exp(-x)), 0.1 % level.
    cdf = (-(-noise.sort().values).exp()).exp()
    steps = torch.arange(n, dtype=torch.float64) / n
    assert max((cdf - steps).max().item(), (steps + 1 / n - cdf).max().item()) < 1.95 / n**0.5


def test_the_map_from_bits_to_gumbel_is_accurate_and_finite_at_its_ends():
    bits = torch.cat([torch.arange(5000), 2 ** torch.arange(31), torch.linspace(0, 2**31 - 2**22, 20_001).long()])
    w = (bits.double() + 0.5) * 2.0**-31
    error = (_gumbel(bits.to(torch.int32)) - -(-torch.log1p(-w)).log()).abs()
    assert error.max() < 1e-5
    ends = _gumbel(torch.tensor([0, 2**31 - 1], dtype=torch.int32))
    assert ends.tolist() == pytest.approx([22.18, -2.81], abs=0.01)


def test_the_tail_is_finer_than_24_bits():
    # argmax picks from the upper tail: over 2^26 draws values above ln 2^24 must occur, and not as a few repeated ones.
    top = torch.cat([gumbel_noise([s], [0], 2**20, "cpu")[0].topk(4).values for s in range(16)])
    assert top.unique().numel() == top.numel()


def test_uniform_is_uniform_and_never_0_or_1():
    draws = [uniform(seed, 3, ACCEPT) for seed in range(20_000)]
    assert min(draws) > 0
    assert max(draws) < 1
    counts = [0] * 20
    for u in draws:
        counts[int(u * 20)] += 1
    assert sum((c - 1000) ** 2 / 1000 for c in counts) < 50  # 19 degrees of freedom, p = 1e-4
    assert uniform(5, 3, ACCEPT) != uniform(5, 3, RECOVER)
    assert uniform(5, 3, ACCEPT) != uniform(5, 4, ACCEPT)

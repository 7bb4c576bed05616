"""Which tokens of a large vocabulary top-k, top-p and min-p let stay: token by token, what the torch path says.

Noise can be made for a token: its largest, so that it is chosen if it stays. The kernel guesses where the last token
that stays lies from a sample of larger vocabularies than hypothesis draws; rows are made here for it to be wrong, too.
"""

import math
import random
import shutil

import pytest
import torch

from specpaged.sampling.processors import process_rows
from specpaged.sampling.request import Row, SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged_kernels.cpu import build, sampling
from specpaged_kernels.cpu.library import SOURCE
from specpaged_kernels.cpu.sampling import Choice, choose
from tests.kernels.cpu.lanes import QUICK_FLAGS, other_lanes

NEG_INF = float("-inf")
V = 40_003


def mix(x: int) -> int:
    """The hash of `noise`, of one int."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def keys_for(token_id: int) -> tuple[int, int, int]:
    """Keys under which all bits of the token's noise are 0: the noise is 22.18, and that of no other token is."""
    first, second = 0x12345678, 0x9ABCDEF0
    return first, second, mix(mix(token_id ^ first) + second & 0xFFFFFFFF)


def stays(logits, choice, token_id: int) -> bool:
    return choose(logits, [choice._replace(keys=keys_for(token_id))]).token_ids.tolist() == [token_id]


def processed(logits, choice):
    """[V]: -inf where a token does not stay, by the torch path."""
    params = SamplingParams(
        temperature=choice.temperature, min_p=choice.min_p, top_k=choice.top_k, top_p=choice.top_p, seed=0
    )
    return process_rows(logits, [Row(SamplingRequest(params, 0, [0], []), [])])[0]


def looked_at(vocab_size: int):
    """[V]: the tokens that are counted in place of eight, one vector of each span of 64."""
    ids = torch.arange(vocab_size)
    return ids // 8 % 8 == ids // 64 % 8


def row_of(kind: str):
    generator = torch.Generator().manual_seed(len(kind))
    normal = torch.randn(1, V, generator=generator)
    ids = torch.arange(V)
    likely = torch.randperm(V, generator=generator)[:40]
    if kind == "peaked":
        return 2.5 * normal
    if kind == "in steps":
        return torch.randint(-8, 9, (1, V), generator=generator) / 4
    if kind == "equal":
        return torch.zeros(1, V)
    if kind == "forty likely ones":
        return normal.index_add(1, likely, torch.full((1, 40), 9.0))
    if kind == "low ids likely":
        return normal - 0.5 * torch.log1p(ids)
    if kind == "those looked at are too large":
        return normal + 1.5 * looked_at(V)
    if kind == "those looked at are too small":
        return normal - 1.5 * looked_at(V)
    if kind == "half of them ruled out":
        return normal.masked_fill(ids % 3 == 0, NEG_INF)
    if kind == "half of them far behind":
        return normal.masked_fill(ids % 2 == 0, -1e9)
    if kind == "no fractions":
        return 2.0**24 + 8 * normal.round()
    return normal


KINDS = [
    "normal", "peaked", "in steps", "equal", "forty likely ones", "low ids likely", "those looked at are too large",
    "those looked at are too small", "half of them ruled out", "half of them far behind", "no fractions",
]  # fmt: skip
CHOICES = [
    *[Choice(top_p=p) for p in (1e-9, 0.25, 0.5, 0.9, 0.999, 1 - 2**-53)],
    *[Choice(0.8, top_k=k) for k in (1, 150, 160, 700, 5000, V - 1)],
    *[Choice(0.8, top_k=k, top_p=p) for k in (50, 5000, V - 1) for p in (0.3, 0.95)],
    Choice(1.3, min_p=0.02),
    Choice(1.3, min_p=0.02, top_k=900, top_p=0.9),
    Choice(0.7, min_p=0.01, top_p=0.9),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_token_that_stays_and_the_first_that_does_not_are_those_of_the_torch_path(kind):
    logits = row_of(kind)
    chance = random.Random(0)
    for choice in CHOICES:
        expected = processed(logits, choice)
        values = logits[0] / torch.tensor(choice.temperature)
        order = values.argsort(descending=True, stable=True)
        num_kept = int((expected > NEG_INF).sum())
        assert bool((expected[order[:num_kept]] > NEG_INF).all())  # a prefix of the order: there is one boundary
        near = [num_kept - 1 - i for i in range(2)] + [num_kept + i for i in range(2)]
        ranks = {*near, *(chance.randrange(num_kept) for _ in range(3)), *(chance.randrange(V) for _ in range(3))}
        for rank in ranks:
            # A token so far behind the largest one could lose even so.
            if 0 <= rank < V and values[order[rank]] > values.max() - 9:
                token_id = int(order[rank])
                assert stays(logits, choice, token_id) == (rank < num_kept), (choice, rank, num_kept)
        chosen = choose(logits, [choice._replace(keys=(1, 2, 3))], wants_logprobs=True)
        logprob = float(expected.log_softmax(0)[chosen.token_ids[0]])
        assert chosen.logprobs.tolist() == pytest.approx([logprob], abs=2e-5)


def test_most_kinds_of_rows_have_their_boundary_where_it_is_probed():
    """Or the test before this one would ask nothing."""
    probed = 0
    for kind in KINDS:
        logits = row_of(kind)
        for choice in CHOICES:
            expected = processed(logits, choice)
            stay = expected[expected > NEG_INF]
            probed += len(stay) < V and bool(stay.min() > expected.max() - 9)
    assert probed > 0.7 * len(KINDS) * len(CHOICES)


EXACT = [
    *[(Choice(top_p=n / 2**14), n) for n in (1, 4095, 4096, 10_000)],
    *[(Choice(top_k=n), n) for n in (1, 60, 4096, 2**14 - 1)],
    *[(Choice(top_k=k, top_p=0.75), 3 * k // 4) for k in (40, 4096)],
    (Choice(top_k=2**14 - 1, top_p=1 - 2**-53), 2**14 - 1),
]


@pytest.mark.parametrize(("choice", "num_kept"), EXACT)
def test_a_boundary_that_is_met_exactly_ends_there(choice, num_kept):
    """Of 2^14 equals top_p = n / 2^14 keeps the first n, not one more: what comes before that one is not less."""
    logits = torch.zeros(1, 2**14)
    assert stays(logits, choice, num_kept - 1)
    assert not stays(logits, choice, num_kept)
    logprobs = choose(logits, [choice], wants_logprobs=True).logprobs
    assert logprobs.tolist() == pytest.approx([-math.log(num_kept)], abs=1e-6)


def test_of_several_infinite_logits_the_first_is_chosen_whatever_noise_says():
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    logits[0, [700, 900, 30_000]] = float("inf")
    for choice in (Choice(), Choice(top_p=0.9), Choice(top_k=2), Choice(top_k=9000, top_p=0.5), Choice(min_p=0.5)):
        for token_id in (3, 700, 900):
            found = choose(logits, [choice._replace(keys=keys_for(token_id))])
            assert found.ok.tolist() == [True]
            assert found.token_ids.tolist() == [700]


def test_every_number_of_lanes_and_every_instruction_set_gives_the_same_tokens(tmp_path, monkeypatch):
    for path in [*SOURCE.parent.glob("*.cpp"), *SOURCE.parent.glob("*.h")]:
        shutil.copy(path, tmp_path)
    plain = "#undef __AVX512F__\n#undef __AVX2__\n"  # C++ alone, where there are instructions
    rows = torch.cat([row_of(kind) for kind in KINDS])
    choices = [choice._replace(keys=(5, 6, 7)) for choice in CHOICES]
    expected = [choose(rows, [choice] * len(rows), wants_logprobs=True) for choice in choices]
    monkeypatch.setenv(build.CACHE, str(tmp_path / "built"))
    monkeypatch.setattr(build, "FLAGS", QUICK_FLAGS)
    try:
        for name, before in (
            ("other", f"#define WIDE_LANES {other_lanes()}\n"),
            ("plain_8", f"{plain}#define WIDE_LANES 8\n"),
            ("plain_16", f"{plain}#define WIDE_LANES 16\n"),
        ):
            source = tmp_path / f"{name}.cpp"
            source.write_text(before + '#include "sampling.cpp"\n')
            monkeypatch.setattr(sampling, "SOURCE", source)
            sampling._function.cache_clear()
            for choice, (token_ids, ok, logprobs) in zip(choices, expected, strict=True):
                found = choose(rows, [choice] * len(rows), wants_logprobs=True)
                assert torch.equal(found.token_ids, token_ids), (name, choice)
                assert torch.equal(found.ok, ok)
                assert found.logprobs.tolist() == pytest.approx(logprobs.tolist(), abs=1e-6)
    finally:
        sampling._function.cache_clear()

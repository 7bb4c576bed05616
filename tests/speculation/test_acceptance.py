"""The model of acceptance: calibrated online, quick to follow a request, and not fooled by what selection hides."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from specpaged.speculation.acceptance import AcceptanceModel, RequestAcceptance, logit, logits_of, sigmoid


def drawn(rng, mean):
    """A draft's probability to stand, as drafts differ: mean in the mean."""
    return min(max(rng.betavariate(mean * 1.5, (1 - mean) * 1.5), 1e-4), 1 - 1e-4)


def run(model, request, rng, mean, num_drafts, distort=lambda p: p):
    """Single drafts, of whose probabilities the drafter has a distorted idea."""
    for _ in range(num_drafts):
        p = drawn(rng, mean)
        stood = rng.random() < p
        model.observe(request, stood, not stood, [logit(distort(p))])


def test_chances_fall_along_a_draft_and_none_is_left_behind_nan():
    model, request = AcceptanceModel(), RequestAcceptance()
    evidence = logits_of([-0.1, -2.0, 0.0, float("nan"), -0.1])
    chances = model.chances_of(request, evidence)
    assert all(0 <= after <= before <= 1 for before, after in itertools.pairwise(chances))
    assert chances[2] > 0
    assert chances[3:] == [0, 0]
    assert model.chances(model.expected_logit(request), 3) == pytest.approx([0.6, 0.36, 0.216])
    assert model.chances_of(request, logits_of([float("-inf")]))[0] < 0.01
    model.observe(request, 3, 1, evidence)
    assert all(map(math.isfinite, [model.slope, model.spread, *model.intercepts]))


def test_the_less_is_hoped_of_a_request_the_more_is_known_of_it_or_of_all():
    model, request = AcceptanceModel(), RequestAcceptance()
    hopes = [model.hope(request)]
    for _ in range(3):
        model.observe(request, 1, 0)
        hopes.append(model.hope(request))
    assert hopes == sorted(hopes, reverse=True)
    assert len(set(hopes)) == 4
    for _ in range(40):
        model.observe(RequestAcceptance(), 3, 1)
    assert 0 < model.hope(RequestAcceptance()) < 0.2 * hopes[0]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_it_is_calibrated_whatever_the_drafter_believes(power):
    """A drafter that is too sure of itself, or not sure enough: of drafts that are given 70 %, 70 % stand."""
    rng = random.Random(5)
    model, request = AcceptanceModel(), RequestAcceptance()
    run(model, request, rng, 0.6, 60_000, distort=lambda p: p**power)
    bins = [[] for _ in range(5)]
    for _ in range(20_000):
        p = drawn(rng, 0.6)
        (chance,) = model.chances_of(request, [logit(p**power)])
        bins[min(4, int(chance * 5))].append((chance, p))
    for of_bin in bins:
        said, true = (sum(values) / len(of_bin) for values in zip(*of_bin, strict=True))
        assert said == pytest.approx(true, abs=0.08)


def test_without_evidence_that_says_anything_there_is_no_spread():
    rng = random.Random(6)
    model, told, requests = AcceptanceModel(), AcceptanceModel(), [RequestAcceptance(), RequestAcceptance()]
    for _ in range(3000):
        x = rng.gauss(0, 2)
        stood = rng.random() < 0.6
        model.observe(requests[0], stood, not stood, [x])
        stood = rng.random() < sigmoid(x)
        told.observe(requests[1], stood, not stood, [x])
    assert model.spread < 0.6 < 1.5 < told.spread


def test_evidence_that_misleads_has_no_spread_long_before_its_slope_is_learned():
    rng = random.Random(7)
    model, request = AcceptanceModel(), RequestAcceptance()
    spreads = []
    for _ in range(30):
        stood = rng.random() < 0.6
        model.observe(request, stood, not stood, [rng.gauss(0, 4)])
        spreads.append(model.spread)
    assert model.slope > 0.6
    assert not any(spreads[10:])


def test_outcomes_against_all_certainty_are_learned_from():
    model, request = AcceptanceModel(), RequestAcceptance()
    model.slope, model.request_weight, request.lead = 3.0, 2.0, 12.0  # as far as each goes
    model.observe(request, 0, 1, [6.0])
    assert -math.inf < model.gain < 0.0


@pytest.mark.parametrize(("kinds", "are_alike"), [((0.8,), True), ((0.9, 0.2), False)])
def test_requests_are_told_to_be_alike_only_once_they_have_shown_it(kinds, are_alike):
    rng, model = random.Random(3), AcceptanceModel()
    assert not model.requests_are_alike
    for i in range(200):
        request = RequestAcceptance()
        for _ in range(20):
            stood = rng.random() < kinds[i % len(kinds)]
            model.observe(request, stood, not stood)
    assert model.requests_are_alike == are_alike


@pytest.mark.parametrize(("first", "later"), [(0.95, 0.7), (0.4, 0.8)])
def test_the_first_drafts_of_requests_do_not_speak_for_their_later_ones(first, later):
    rng, model = random.Random(1), AcceptanceModel()
    means = []
    for _ in range(200):
        request = RequestAcceptance()
        run(model, request, rng, first, 2)
        run(model, request, rng, later, 30)
        means.append(model.mean)
    assert sum(means[50:]) / 150 == pytest.approx(later, abs=0.04)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.3), (0.3, 0.8)])
def test_the_mean_of_a_large_batch_whose_texts_all_turn_is_one_of_shares(before, after):
    rng, model = random.Random(2), AcceptanceModel()
    requests = [RequestAcceptance() for _ in range(256)]
    for of_turn in [before] * 30 + [after] * 60:
        for request in requests:
            run(model, request, rng, of_turn, 1)
            assert 0.0 <= model.num_accepted <= model.num_seen
    assert model.mean == pytest.approx(after, abs=0.08)


def test_a_request_remembers_its_last_fifteen_drafts():
    model, request = AcceptanceModel(), RequestAcceptance()
    model.observe(request, 1, 1)
    assert (request.num_seen, request.num_accepted) == pytest.approx((1.93, 0.93))
    model.observe(request, 1000, 0)
    assert request.num_seen == pytest.approx(1 / 0.07)
    assert request.num_accepted == pytest.approx(request.num_seen)


def test_a_request_that_turns_is_followed_within_some_tens_of_drafts():
    rng = random.Random(7)
    model, requests = AcceptanceModel(), [RequestAcceptance() for _ in range(8)]
    means = [0.9, 0.2] * 4
    for _ in range(300):
        for request, mean in zip(requests, means, strict=True):
            run(model, request, rng, mean, 1)
    first, second = requests[:2]
    assert model.expected(first) > 0.75
    assert model.expected(second) < 0.4
    run(model, second, rng, 0.9, 30)
    assert model.expected(second) > 0.65


def test_outcomes_that_contradict_all_before_leave_little_of_it_and_others_add_to_it():
    model = AcceptanceModel()
    steady, turned = RequestAcceptance(), RequestAcceptance()
    for request in (steady, turned):
        model.count(request, 14, 1)
        model.count(request, 14, 1)
    model.count(steady, 5, 3)
    model.count(turned, 1, 7)
    assert steady.num_seen > 12
    assert turned.num_seen < 9
    assert turned.num_accepted / turned.num_seen < 0.4 < 0.6 < steady.num_accepted / steady.num_seen


def test_counts_and_proposals_with_as_many_outcomes_show_about_the_same():
    """Of a draft the newest one has fallen; of counts nobody knows which."""
    model, counted, proposed = AcceptanceModel(), RequestAcceptance(), RequestAcceptance()
    for _ in range(20):
        model.count(counted, 6, 4)
        for num_accepted in (1, 2, 1, 2):
            model.observe(proposed, num_accepted, 1)
    assert counted.num_seen == pytest.approx(proposed.num_seen)
    assert counted.num_accepted == pytest.approx(proposed.num_accepted, abs=0.6)


def test_where_several_drafts_stand_the_next_one_is_likely_to():
    """Half of the texts are easy, half are hard: deep drafts are of easy ones, whatever the request."""
    rng = random.Random(9)
    model, request = AcceptanceModel(), RequestAcceptance()
    stood = [0] * 5
    for n in range(20_000):
        mean = rng.choice((0.95, 0.35))
        num_accepted = next((j for j in range(5) if rng.random() > mean), 5)
        model.observe(request, num_accepted, int(num_accepted < 5))
        for j in range(num_accepted if n >= 10_000 else 0):
            stood[j] += 1
    chances = model.chances(logit(model.mean), 5)
    assert chances == pytest.approx([count / 10_000 for count in stood], abs=0.06)
    assert chances[4] > 2 * chances[0] ** 5


@pytest.mark.parametrize(
    ("means", "differ"), [((0.3, 0.3), False), ((0.6, 0.6), False), ((0.9, 0.9), False), ((0.9, 0.2), True)]
)
def test_requests_differ_where_they_are_of_two_kinds_and_not_by_chance(means, differ):
    rng, model = random.Random(0), AcceptanceModel()
    assert not model.requests_differ
    for i in range(40):
        request = RequestAcceptance()
        run(model, request, rng, means[i % 2], 30)
        if i >= 9:
            assert model.requests_differ == differ


def test_requests_that_do_not_differ_are_not_told_apart():
    rng = random.Random(8)
    model, requests = AcceptanceModel(), [RequestAcceptance() for _ in range(8)]
    for _ in range(800):
        for request in requests:
            run(model, request, rng, 0.5, 1)
    assert model.share < 0.35
    assert max(map(model.expected, requests)) - min(map(model.expected, requests)) < 0.25


def test_requests_whose_drafts_stand_do_not_outvote_the_others():
    """They have far more drafts, 0.86 of which stand in all; a new request is as likely to be of the other kind."""
    rng = random.Random(10)
    model, means = AcceptanceModel(), []
    for n in range(200):
        request, (mean, rounds) = RequestAcceptance(), ((0.9, 20), (0.2, 4))[n % 2]
        for _ in range(rounds):
            num_accepted = next((j for j in range(5) if rng.random() > mean), 5)
            model.observe(request, num_accepted, int(num_accepted < 5))
        means.append(model.mean)
    assert 0.55 < sum(means[100:]) / 100 < 0.77

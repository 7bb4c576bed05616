"""Faults that a controller might have are seen by the tests on simulated time: each is planted, and a test fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specpaged.speculation.acceptance import AcceptanceModel
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.looks import Looks
from specpaged.speculation.selection import Selection
from specpaged.speculation.step_times import StepTimes
from specpaged.speculation.trials import Trials
from tests.speculation import test_adaptive


def never_drafts(patch):
    patch.setattr(AdaptiveController, "_depths", lambda self, chances: Selection([0] * len(chances), 1.0))


def always_drafts(patch):
    def depths(self, chances):
        times = self._times.of(len(chances), sum(map(len, chances)))
        return Selection([*map(len, chances)], 1.1 * len(chances) / times.plain)

    patch.setattr(AdaptiveController, "_depths", depths)


def takes_drafting_for_free(patch):
    honest = StepTimes.of.__func__

    def of(cls, *arguments):
        times = honest(cls, *arguments)
        return replace(times, first=[0.0] * len(times.first), later=[0.0] * len(times.later))

    patch.setattr(StepTimes, "of", classmethod(of))


def takes_rows_for_free(patch):
    honest = StepTimes.of.__func__

    def of(cls, *arguments):
        times = honest(cls, *arguments)
        return replace(times, verify=[times.verify[0]] * len(times.verify))

    patch.setattr(StepTimes, "of", classmethod(of))


def learns_nothing_of_drafts(patch):
    for name in ("observe", "count"):
        patch.setattr(AcceptanceModel, name, lambda self, *arguments: None)


def takes_requests_for_alike(patch):
    honest = AcceptanceModel._add

    def add(self, request, *arguments):
        honest(self, request, *arguments)
        request.lead = 0.0

    patch.setattr(AcceptanceModel, "_add", add)


def never_looks_back(patch):
    patch.setattr(Looks, "choose", lambda self, candidates, *_: ([], []))


def looks_without_bound(patch):
    def earn(self, num_steps, plain_seconds, since_plan=False):
        self.most = self.credit = self._per_step = 100.0 * plain_seconds

    patch.setattr(Looks, "earn", earn)


def never_tries_rows(patch):
    patch.setattr(Trials, "next_rows", lambda self, *arguments: None)


def near_the_best(*arguments):
    return lambda: test_adaptive.test_it_is_near_the_best_fixed_k_and_never_slower_than_none(*arguments)


@pytest.mark.parametrize(
    ("plant", "seen_by"),
    [
        (never_drafts, near_the_best(0.05, 0.9, 4, True)),
        (always_drafts, near_the_best(0.4, 0.3, 4, True)),
        (takes_drafting_for_free, near_the_best(0.4, 0.3, 4, False)),
        (takes_rows_for_free, near_the_best(0.05, 0.3, 16, False)),
        (learns_nothing_of_drafts, near_the_best(0.15, 0.3, 4, False)),
        (
            takes_requests_for_alike,
            lambda: test_adaptive.test_in_a_mixed_batch_it_drafts_for_those_whose_drafts_stand(8),
        ),
        (
            never_looks_back,
            lambda: test_adaptive.test_a_change_in_the_middle_of_an_output_is_followed_within_64_tokens(0.2, 0.9),
        ),
        (looks_without_bound, near_the_best(0.4, 0.3, 4, False)),
        (
            never_tries_rows,
            lambda: test_adaptive.test_rows_that_were_probed_as_too_dear_are_found_out_though_nobody_drafts(8),
        ),
    ],
)
def test_a_planted_fault_is_seen(monkeypatch, plant, seen_by):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        seen_by()

"""A controller hears what came of drafts, and who is gone, once each and in that order."""

from types import SimpleNamespace

import pytest

from specpaged.drafting.draft import Draft
from specpaged.engine.outcomes import Outcomes, outcome_of


class Controller:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def observe_drafts(self, sequence, num_accepted, num_rejected, evidence):
        self.told.append((sequence.name, num_accepted, num_rejected))

    def observe_lookup(self, drafter, sequence, num_accepted, num_rejected, evidence):
        self.told.append((sequence.name, drafter, num_accepted, num_rejected))

    def observe_end(self, num_tokens, most_tokens):
        self.told.append((num_tokens, most_tokens))

    def forget(self, sequence):
        self.told.append(sequence.name)


class Member(SimpleNamespace):
    """As much of a sequence as is asked for its end."""

    __hash__ = object.__hash__


def member(name: str, has_ended: bool = True, error: str | None = None) -> Member:
    params = SimpleNamespace(max_tokens=9)
    reason = "length" if has_ended else None
    return Member(
        name=name, has_ended=has_ended, finish_reason=reason, error=error, output_token_ids=[1, 2], params=params
    )


def test_who_is_gone_is_told_behind_what_came_of_its_drafts_and_nothing_is_told_twice():
    outcomes, a = Outcomes(controller := Controller()), member("a")
    outcomes.add(a, Draft([1, 2, 3], found=[Draft([1, 5], drafter=2)]), [1, 2, 4])
    outcomes.add(a, Draft([7, 8], drafter=1), [7, 8])  # a lookup's, of which only what it found would be told
    outcomes.forget(a)
    assert not controller.told
    outcomes.tell()
    outcomes.tell()
    assert controller.told == [("a", 2, 1), ("a", 1, 1, 1), (2, 9), "a"]


def test_an_end_is_told_of_who_has_ended_when_it_left_and_of_nobody_who_failed_or_was_aborted():
    outcomes, a = Outcomes(controller := Controller()), member("a", has_ended=False)
    outcomes.forget(a)  # it gives up its KV,
    a.has_ended = True  # and ends before anything is told
    outcomes.forget(a)
    outcomes.forget(member("b", error="out of memory"))
    aborted, unheard = member("c"), member("d")
    aborted.finish_reason = "abort"
    unheard.output_token_ids = []
    outcomes.forget(aborted)
    outcomes.forget(unheard)
    outcomes.tell()
    assert controller.told == ["a", (2, 9), "a", "b", "c", "d"]


def test_who_comes_back_is_forgotten_before_anything_new_is_known_of_it():
    outcomes, (a, b) = Outcomes(controller := Controller()), (member(name, has_ended=False) for name in "ab")
    outcomes.add(a, Draft([1, 2]), [1, 3])
    outcomes.forget(a)
    outcomes.add(b, Draft([1]), [1])
    assert not controller.told
    outcomes.add(a, Draft([4, 5]), [4, 5, 6])
    outcomes.tell()
    assert controller.told == [("a", 1, 1), ("b", 1, 0), "a", ("a", 2, 0)]


@pytest.mark.parametrize("how", ["looked_back", "verified"])
def test_who_comes_back_is_forgotten_before_its_text_is_said_to_have_turned(how):
    class Observing(Controller):
        def observe_outcomes(self, sequence, num_accepted, num_rejected):
            self.told.append((sequence.name, num_accepted, num_rejected))

    outcomes, a = Outcomes(controller := Observing()), member("a", has_ended=False)
    outcomes.forget(a)
    for _ in range(8):
        getattr(outcomes, how)(a, 4, 0)
    assert controller.told[:1] == ["a"]
    assert "a" not in controller.told[1:]


def test_who_is_gone_is_not_kept_for_long():
    outcomes = Outcomes(controller := Controller())
    for i in range(8):
        assert not controller.told
        outcomes.forget(member(str(i), has_ended=False))
    assert controller.told == [str(i) for i in range(8)]


@pytest.mark.parametrize(
    ("drafted", "came", "outcome"),
    [([1, 2], [1, 2, 3], (2, 0)), ([1, 2], [1], (1, 0)), ([1, 2], [1, 3], (1, 1)), ([1, 2], [4], (0, 1))],
)
def test_the_first_draft_that_did_not_come_has_fallen_and_of_those_behind_it_nothing_is_known(drafted, came, outcome):
    assert outcome_of(Draft(drafted), came) == outcome


@pytest.mark.parametrize(("num_stood", "is_surprise"), [(8, True), (7, True), (3, False), (0, False)])
def test_a_look_that_nobody_expected_is_one_however_little_was_seen_before(num_stood, is_surprise):
    class Expecting(Controller):
        def expects(self, sequence):
            return 0.25 if not self.told else 0.9  # before it hears of the look

        def observe_outcomes(self, sequence, num_accepted, num_rejected):
            self.told.append((num_accepted, num_rejected))

    outcomes = Outcomes(controller := Expecting())
    assert outcomes.looked_back(member("a"), num_stood, 8 - num_stood) is is_surprise
    assert controller.told == [(num_stood, 8 - num_stood)]

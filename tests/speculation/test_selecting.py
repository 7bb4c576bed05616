"""Selecting is done as often as it is worth it, and not twice."""

from types import SimpleNamespace

from specpaged.speculation.selecting import Selecting


def test_one_sequence_that_a_rule_has_stopped_is_selected_from_now_and_then_only():
    selecting, times = Selecting(), SimpleNamespace(verify=[1.0, 2.0])
    assert all(selecting.is_due() for _ in range(5))  # as long as it pays
    selecting.is_ruled = True
    for _ in range(2):
        assert selecting.could_gain(times, 1)  # it has been asked
        assert [selecting.is_due() for _ in range(8)] == [False] * 7 + [True]
    selecting.is_ruled = False
    assert selecting.is_due()

"""What was decided for one sequence is remembered for others like it, and not for long."""

from __future__ import annotations

from specpaged.speculation.decisions import Decision, Decisions


def test_what_is_alike_is_decided_once_in_eight_plans():
    decisions, asked = Decisions(), []

    def decision_of(key):
        return decisions.of(key, lambda: asked.append(key) or Decision([len(asked)], 1.0, [len(asked)], None))

    found = [decision_of(key) for key in "abaabbab"]
    assert asked == ["a", "b"]
    assert [decision.counts[0] for decision in found] == [1, 2, 1, 1, 2, 2, 1, 2]
    decision_of("a")  # eight plans later
    decision_of("a")
    assert asked == ["a", "b", "a"]
    decisions.forget()
    decision_of("a")
    assert asked == ["a", "b", "a", "a"]

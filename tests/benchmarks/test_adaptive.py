"""What the benchmark of decisions puts beside one another."""

from __future__ import annotations

from benchmarks.adaptive.cell import ADAPTIVE, AGAIN, PLAIN, ways_of


def test_ways_are_plain_twice_every_k_tetris_with_what_is_extra_and_what_is_decided():
    ways = ways_of([1, 5], ["2", "3+1"])
    assert list(ways) == [PLAIN, "K = 1", "K = 5", "TETRIS 2 + 2", "TETRIS 3 + 1", AGAIN, ADAPTIVE]
    assert ways["K = 5"] == {"num_speculative_tokens": 5}
    assert ways["TETRIS 3 + 1"] == {
        "selection": "tetris",
        "num_speculative_tokens": 3,
        "tetris_extra_proposals": 1,
    }
    assert ways[AGAIN] == ways[PLAIN] == {"num_speculative_tokens": 0}
    assert ways[ADAPTIVE] == {"num_speculative_tokens": "auto"}

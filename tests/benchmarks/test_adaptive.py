"""What the benchmark of decisions puts beside one another."""

from __future__ import annotations

from benchmarks.adaptive.cell import ADAPTIVE, AGAIN, PLAIN, ways_of
from benchmarks.adaptive.pairs import make_pair


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


def test_edited_code_is_the_code_and_its_beginning_with_one_other_token(tmp_path):
    pair = make_pair("suffix, edited", tmp_path, 64)
    for prompt in pair.prompts:
        code, again = prompt[:-20], prompt[-20:]
        assert len(again) == len(code) // 2 == 20
        assert [i for i in range(20) if again[i] != code[i]] in ([3], [])  # the token is that of another text
    assert sum(prompt[3] != prompt[-17] for prompt in pair.prompts) > 32
    assert pair.speculative == {"method": "suffix", "suffix_decoding_max_cached_requests": 0}

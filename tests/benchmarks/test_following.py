"""What `benchmarks.adaptive.following` says a token took is of the part behind a turn that the token is in."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from benchmarks.adaptive import following, pairs
from benchmarks.ours import Ours
from specpaged.testing import synthetic_pair

TURNS_AFTER, OUTPUT_LEN = 64, 300


def test_tokens_are_counted_by_how_long_ago_their_text_has_turned(tmp_path):
    shape = pairs._shape(64, 1, 1) | {"intermediate_size": 32}
    made = synthetic_pair(
        shape, shape, directory=tmp_path, acceptance=(0.9, 0.2), turns_after=TURNS_AFTER, dtype="float32"
    )
    ours = Ours("auto", "exact", OUTPUT_LEN, made.target, model=made.draft, num_speculative_tokens=3)
    seconds = defaultdict(lambda: [0.0, 0.0])
    outputs = following._decode(ours, pairs._random_prompts(3, halves=True), seconds)
    expected: dict[tuple[bool, int], int] = defaultdict(int)
    for token_ids in outputs:
        assert len(token_ids) == OUTPUT_LEN
        stands = [token_id < pairs.VOCAB_SIZE // 2 for token_id in token_ids]
        turns = [j for j in range(1, OUTPUT_LEN) if stands[j] != stands[j - 1]]
        assert [b - a for a, b in pairwise(turns)] == [TURNS_AFTER] * (len(turns) - 1)
        for j, stood in enumerate(stands):
            last = max([turn for turn in turns if turn <= j], default=None)
            expected[stood, -1 if last is None else (j - last) // following.PART] += 1
    assert {part: num_tokens for part, (_, num_tokens) in seconds.items()} == expected
    assert all(of_part > 0 for of_part, _ in seconds.values())

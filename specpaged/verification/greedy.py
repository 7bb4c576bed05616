"""Accept drafts that are the target's own tokens: the ragged rule, in ints."""

from __future__ import annotations

from collections.abc import Sequence


def accept_matching(
    drafts: Sequence[Sequence[int]], sampled: Sequence[int], ok: Sequence[bool]
) -> tuple[list[list[int]], list[int], list[bool]]:
    """Keep, per sequence, the longest prefix of drafts that the target samples too, and the target's next token.

    `sampled` holds the target's token for each row, `ok` whether the row has one; sequence i owns
    len(drafts[i]) + 1 rows. Rows behind the first mismatch follow a token that was never emitted: they don't count.
    Three sequences:

        drafts    5 6 7        -    8 9
        sampled   5 6 2 1      4    3 9 0
        match     y y n             n
        output    5 6 2        4    3            token ids: the drafts accepted, then the bonus
        accepted  2            0    0

    Returns the output token ids, the number of accepted drafts, and whether the row behind them was not ok (then the
    output ends with them: plain decoding would have come as far, and may have stopped there).
    """
    token_ids: list[list[int]] = []
    num_accepted: list[int] = []
    failed: list[bool] = []
    start = 0
    for draft in drafts:
        accepted = 0
        while accepted < len(draft) and ok[start + accepted] and sampled[start + accepted] == draft[accepted]:
            accepted += 1
        # Rows start .. start + accepted - 1 are ok: each of them matched.
        bad = not ok[start + accepted]
        token_ids.append(list(sampled[start : start + accepted + (not bad)]))
        num_accepted.append(accepted)
        failed.append(bad)
        start += len(draft) + 1
    return token_ids, num_accepted, failed

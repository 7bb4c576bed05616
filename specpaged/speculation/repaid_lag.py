"""How far behind a drafter may be, so that its drafts are worth catching up for."""

from __future__ import annotations

from typing import NamedTuple

NEAR = 4  # tokens: catching up with so few is part of any proposal


class RepaidLag(NamedTuple):
    """The more tokens may still come, the more of those that the drafter has not run are repaid."""

    per_token: float  # tokens of lag, for each that may still come
    most_tokens: float  # that are waited for, however many may come

    def repays(self, lag: int, num_left: float | None) -> bool:
        """Whether drafts repay so much of it, with so many tokens that may still come; None: nobody knows."""
        num_left = self.most_tokens if num_left is None else min(num_left, self.most_tokens)
        return lag <= max(NEAR, self.per_token * num_left)

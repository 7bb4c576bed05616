"""What was counted of a draft: rounds and accepted drafts by K and output, and the tokens of a round. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specpaged.studies.scaling.drafts import DraftPoint

MOST_DRAFTS = 8
NUM_REPLICATES = 400


@dataclass(frozen=True)
class Counts:
    """A draft's rounds and accepted drafts: of each K, 1 to MOST_DRAFTS, and each output."""

    draft: DraftPoint
    rounds: np.ndarray  # [K, outputs]
    accepted: np.ndarray  # [K, outputs]

    def tokens(self, num_drafts: int) -> float:
        """Of a round, the target's own one among them."""
        return float(1 + self.accepted[num_drafts - 1].sum() / self.rounds[num_drafts - 1].sum())

    def replicates(self, num_drafts: int) -> np.ndarray:
        """[NUM_REPLICATES] the same of outputs drawn with replacement, the same ones for every draft."""
        num_outputs = self.rounds.shape[1]
        drawn = np.random.default_rng(0).multinomial(num_outputs, [1 / num_outputs] * num_outputs, NUM_REPLICATES)
        rounds = np.maximum(1, drawn @ self.rounds[num_drafts - 1])
        return 1 + drawn @ self.accepted[num_drafts - 1] / rounds

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return self.draft.as_dict() | {"rounds": self.rounds.tolist(), "accepted": self.accepted.tolist()}

    @classmethod
    def of_dict(cls, draft: DraftPoint, values: dict[str, Any]) -> Counts:
        """The reverse of `as_dict`."""
        return cls(draft, np.array(values["rounds"]), np.array(values["accepted"]))

"""The naive floor: every sequence keeps no more than the one with the fewest."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from specpaged.research.gather import Gather
from specpaged.verification.base import VerifyOutput


class BatchMin(Gather):
    """All rows gain as many tokens as the row that gains the fewest: they stay aligned, and nothing moves for it.

    What the others had accepted beyond is lost, and proposed and scored anew. Rows move where one joins a batch.
    """

    name = "batch_min"

    @override
    def limit(self, verified: VerifyOutput) -> VerifyOutput:
        # The last token of each row takes the place of the bonus token: its KV goes.
        gained = [
            len(token_ids) for token_ids, failed in zip(verified.token_ids, verified.failed, strict=True) if not failed
        ]
        if not gained:
            return verified
        fewest = min(gained)
        return replace(
            verified,
            token_ids=[token_ids[:fewest] for token_ids in verified.token_ids],
            num_accepted=[min(num_accepted, fewest - 1) for num_accepted in verified.num_accepted],
            failed=[
                failed and len(token_ids) < fewest
                for token_ids, failed in zip(verified.token_ids, verified.failed, strict=True)
            ],
            logprobs=[of_row and of_row[:fewest] for of_row in verified.logprobs],
        )

"""Prompt lookup: what followed the newest tokens where they stood before. No model, no KV."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from typing_extensions import override

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.modeling.rounds import Lookup
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.stop_rule import StopRule


class NgramDrafter:
    """Drafts from a sequence's own prompt and output (A. Saxena, "Prompt lookup decoding", 2023).

    The last `prompt_lookup_max` tokens are looked for, then fewer, down to `prompt_lookup_min`; where nothing matches,
    nothing is proposed.
    """

    hidden_states = None
    looks_back = False
    stops = False

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int):
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max
        self.in_rounds = Lookup(prompt_lookup_min, prompt_lookup_max)

    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        """Of a row only `request_idx` and `num_draft_tokens` are read."""
        drafts = [NO_DRAFT] * len(sampling.requests)
        for row in rows:
            request = sampling.requests[row.request_idx]
            known = [*request.prompt_token_ids, *request.output_token_ids]
            token_ids, num_matched = lookup(known, self.prompt_lookup_min, self.prompt_lookup_max, row.num_draft_tokens)
            drafts[row.request_idx] = Draft(token_ids, num_matched=num_matched)
        return drafts

    @override
    def forget(self, sequence: Hashable) -> None:
        pass  # nothing is kept


def lookup(token_ids: Sequence[int], shortest: int, longest: int, count: int) -> tuple[list[int], int]:
    """`count` tokens that followed the last n of token_ids the last time they stood there, and n; or none, and 0.

    n is the largest in shortest .. longest that occurs before. Where the match reaches up to the end, it goes on with
    what it has found: what repeats, repeats. For n = 2:

        a b c d a b          ->  c d a b c ..
            ^ followed a b
    """
    data = array("q", token_ids)
    width, text = data.itemsize, data.tobytes()
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        end = len(text) - width  # something is to follow
        place = text.rfind(text[-n * width :], 0, end)
        while place % width and place >= 0:  # it began within a token
            place = text.rfind(text[-n * width :], 0, place + n * width - 1)
        if place >= 0:
            start = place // width + n
            period = len(token_ids) - start
            return [token_ids[start + i % period] for i in range(count)], n
    return [], 0

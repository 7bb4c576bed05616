"""Prompt lookup: what followed the newest tokens the last time that they stood there. No model, no KV."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from typing_extensions import override

from specpaged.drafting.draft import Draft
from specpaged.drafting.lookup import Indexes, LookupDrafter, why_no_indexes
from specpaged_kernels.cpu.ngram_index import NgramIndex, ngram_ref


class NgramDrafter(LookupDrafter):
    """Drafts from a sequence's own prompt and output (A. Saxena, "Prompt lookup decoding", 2023).

    The last `prompt_lookup_max` tokens are looked for, then fewer, down to `prompt_lookup_min`; where nothing matches,
    nothing is proposed. Where there is no C++ library for indexes, all tokens are looked through every time.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int):
        super().__init__(NgramIndexes(prompt_lookup_min, prompt_lookup_max))
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max
        if why_no_indexes() is not None:
            self.in_rounds = None

    @override
    def find(self, sequence: Hashable, prompt: Sequence[int], output: Sequence[int], num_tokens: int) -> Draft:
        if self.in_rounds is not None:
            return super().find(sequence, prompt, output, num_tokens)
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        token_ids, num_matched = ngram_ref([*prompt, *output], shortest, longest, num_tokens)
        return Draft(token_ids, num_matched=num_matched)

    @override
    def forget(self, sequence: Hashable) -> None:
        if self.in_rounds is not None:
            super().forget(sequence)


class NgramIndexes(Indexes):
    """See NgramIndex."""

    evidence_is_length = True

    def __init__(self, shortest: int, longest: int):
        super().__init__()
        self.shortest = shortest
        self.longest = longest

    @override
    def new_index(self) -> NgramIndex:
        return NgramIndex(self.shortest, self.longest)

"""Suffix decoding: what mostly followed the newest tokens, in a sequence's own text and in outputs of others."""

from __future__ import annotations

from collections.abc import Hashable

from typing_extensions import override

from specpaged.drafting.lookup import Indexes, LookupDrafter, why_no_indexes
from specpaged_kernels.cpu.suffix_index import SuffixIndex, SuffixTexts


class SuffixDrafter(LookupDrafter):
    """Drafts what is likely behind the longest suffixes (G. Oliaro et al., "SuffixDecoding", 2411.04975).

    `depth`, `max_cached_requests`, `max_factor` and `min_probability` are vLLM's suffix_decoding_max_tree_depth,
    max_cached_requests, max_spec_factor and min_token_prob. Outputs of other requests count once these have ended; in
    vLLM's own, from the first token. Of all of them, 4 million tokens are kept at most, at some 60 bytes each.

    Raises:
        ValueError: there is no C++ library, which counts.
    """

    def __init__(self, depth: int, max_cached_requests: int, max_factor: float, min_probability: float):
        reason = why_no_indexes()
        if reason is not None:
            raise ValueError(f"method 'suffix' needs the C++ kernels: {reason}; allowed here: method 'ngram'")
        super().__init__(SuffixIndexes(depth, max_cached_requests, max_factor, min_probability))


class SuffixIndexes(Indexes):
    """Of each sequence that has drafted, and of the outputs of whoever has ended, the newest ones."""

    evidence_is_length = False

    def __init__(self, depth: int, max_cached_requests: int, max_factor: float, min_probability: float):
        super().__init__()
        self.depth = depth
        self.max_factor = max_factor
        self.min_probability = min_probability
        self.others = SuffixTexts(max_cached_requests) if max_cached_requests else None

    @override
    def new_index(self) -> SuffixIndex:
        return SuffixIndex(self.others, self.depth, self.max_factor, self.min_probability)

    @override
    def forget(self, sequence: Hashable) -> None:
        super().forget(sequence)
        if self.others is not None and sequence.has_ended and sequence.output_token_ids:
            self.others.add(sequence.output_token_ids)

"""Sampling by the C++ kernel: a row is processed, given noise and searched in one call, and nothing of it is stored."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from specpaged.sampling.batch import ChosenTokens, SamplingBatch
from specpaged.sampling.noise import row_keys
from specpaged.sampling.processors import edit_rows
from specpaged_kernels.cpu.sampling import Choice, choose


class CppSamplingBatch(SamplingBatch):
    """A SamplingBatch that chooses tokens with the kernel."""

    @override
    def choose(
        self,
        logits: Tensor,  # [M, V] fp32
        request_idx: Sequence[int],
        num_drafts_seen: Sequence[int],
        drafts: Sequence[Sequence[int]],
        wants_logprobs: bool = False,
    ) -> ChosenTokens:
        if self.needs_processing:
            logits = edit_rows(logits, self._rows(request_idx, num_drafts_seen, drafts))
        choices = list(map(self._choice, request_idx, num_drafts_seen))
        chosen = choose(logits, choices, wants_logprobs)
        return ChosenTokens(chosen.token_ids, chosen.ok, chosen.logprobs if wants_logprobs else None)

    @override
    def draw_noise(self, request_idx: Sequence[Sequence[int]]) -> None:
        """Nothing to do: the kernel makes noise where it adds it."""

    def _choice(self, request_idx: int, num_drafts_seen: int) -> Choice:
        request = self.requests[request_idx]
        params = request.params
        keys = None if params.greedy else row_keys(request.seed, self.output_idx(request_idx, num_drafts_seen))
        return Choice(params.temperature, params.min_p, max(0, params.top_k), params.top_p, keys)

"""The sequences of one step as sampling sees them: process rows of logits, sample from them.

A row of logits belongs to request `request_idx[r]` after `num_drafts_seen[r]` of its drafts. Its history is the
request's output tokens and those drafts; its output index t is their number. With noise g(seed, t, v) of
`noise.gumbel_noise`, the token sampled is argmax_v(processed_v + g), which is distributed as softmax(processed); the
same row processed for the draft model meets the same noise (*coupled* sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specpaged.sampling.elementwise import softmax_fp32
from specpaged.sampling.noise import gumbel_noise, noise_keys
from specpaged.sampling.processors import process_rows
from specpaged.sampling.request import Row, SamplingRequest

Noise = dict[tuple[int, int], Tensor]  # by (seed, output index): [V] fp32


class ChosenTokens(NamedTuple):
    """A token of each of M rows, as `SamplingBatch.sample` says."""

    token_ids: Tensor  # [M] int64
    ok: Tensor  # [M] bool
    logprobs: Tensor | None  # [M] fp32: its log-softmax of the processed logits, where that was wanted


class SamplingBatch:
    """Requests of one step. Valid for that step alone, as outputs committed later are another batch's, unless it
    `takes_argmax`.

    The target meets the noise that the draft has met: `drawn` is the `noise` of the batch before, a proposal's for the
    one that verifies it, so that nothing is drawn twice.
    """

    def __init__(
        self,
        requests: Sequence[SamplingRequest],
        vocab_size: int,
        device: torch.device | str,
        drawn: Noise | None = None,
    ):
        self.requests = requests
        self.vocab_size = vocab_size
        self.device = device
        self.all_greedy = all(request.params.greedy for request in requests)  # no row gets noise
        self.needs_processing = any(request.needs_processing for request in requests)
        self.noise: Noise = {}  # what this batch has met
        self._drawn = {} if self.takes_argmax else drawn or {}

    @property
    def takes_argmax(self) -> bool:
        """Whether each token is its row's most likely one: nothing else is asked of the logits to choose it."""
        return self.all_greedy and not self.needs_processing

    @property
    def wants_logprobs(self) -> bool:
        """Whether any request asks for those of its output."""
        return any(request.params.logprobs is not None for request in self.requests)

    def output_idx(self, request_idx: int, num_drafts_seen: int) -> int:
        """The output index t that a row decides."""
        return len(self.requests[request_idx].output_token_ids) + num_drafts_seen

    def process(
        self,
        logits: Tensor,  # [M, V] fp32
        request_idx: Sequence[int],
        num_drafts_seen: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> Tensor:
        """[M, V] fp32: masks, biases, penalties, temperature, min_p, top_k and top_p applied.

        The input stays untouched and is itself returned where no request asks for anything.
        """
        if not self.needs_processing:
            return logits
        return process_rows(logits, self._rows(request_idx, num_drafts_seen, drafts))

    def sample(
        self,
        processed: Tensor,  # [M, V] fp32
        request_idx: Sequence[int],
        num_drafts_seen: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Token ids [M] int64 and ok [M] bool (False: the row's maximum is NaN, or no token is allowed).

        Of equals the lowest id is taken. An id whose row is not ok means nothing, but is within the vocabulary.
        """
        if not self.all_greedy:
            processed = self._add_noise(processed, request_idx, num_drafts_seen)
        values, token_ids = processed.max(dim=-1)
        return token_ids, values > float("-inf")

    def choose(
        self,
        logits: Tensor,  # [M, V] fp32
        request_idx: Sequence[int],
        num_drafts_seen: Sequence[int],
        drafts: Sequence[Sequence[int]],
        wants_logprobs: bool = False,
    ) -> ChosenTokens:
        """`process`, then `sample`: for who needs nothing in between."""
        processed = self.process(logits, request_idx, num_drafts_seen, drafts)
        token_ids, ok = self.sample(processed, request_idx, num_drafts_seen)
        logprobs = None
        if wants_logprobs:
            logprobs = processed.gather(1, token_ids.unsqueeze(-1)).squeeze(-1) - processed.logsumexp(dim=-1)
        return ChosenTokens(token_ids, ok, logprobs)

    def draw_noise(self, request_idx: Sequence[Sequence[int]]) -> None:
        """Make the noise of all drafts at once: request_idx[s] are the requests that draft after s drafts."""
        rows = [(i, self.output_idx(i, seen)) for seen, step in enumerate(request_idx) for i in step]
        self._draw([(self.requests[i].seed, t) for i, t in rows if not self.requests[i].params.greedy])

    def probs(self, processed: Tensor) -> Tensor:
        """[M, V] fp32: the distribution that `sample` draws from (temperature 0 aside)."""
        return softmax_fp32(processed)

    def noise_keys(self, request_idx: Sequence[int], num_drafts_seen: Sequence[int]) -> Tensor | None:
        """[M, 4] int32: the keys of each row's noise, and whether it has any; None if none has."""
        if self.all_greedy:
            return None
        seeds = [self.requests[i].seed for i in request_idx]
        output_idx = [self.output_idx(i, seen) for i, seen in zip(request_idx, num_drafts_seen, strict=True)]
        keys = noise_keys(seeds, output_idx, "cpu")
        keys[:, 3] = torch.tensor([not self.requests[i].params.greedy for i in request_idx])
        return keys.to(self.device)

    def _rows(
        self, request_idx: Sequence[int], num_drafts_seen: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[Row]:
        return [
            Row(self.requests[i], drafts[i][:seen] if seen else ())
            for i, seen in zip(request_idx, num_drafts_seen, strict=True)
        ]

    def _add_noise(self, processed: Tensor, request_idx: Sequence[int], num_drafts_seen: Sequence[int]) -> Tensor:
        rows, keys = [], []
        for r, (i, seen) in enumerate(zip(request_idx, num_drafts_seen, strict=True)):
            if not self.requests[i].params.greedy:
                rows.append(r)
                keys.append((self.requests[i].seed, self.output_idx(i, seen)))
        if not rows:
            return processed
        self._draw(keys)
        noise = torch.stack([self.noise[key] for key in keys])
        if len(rows) == processed.shape[0]:
            return noise.add_(processed)
        noisy = processed.clone()
        idx = torch.tensor(rows, device=processed.device)
        noisy[idx] += noise
        return noisy

    def _draw(self, keys: Sequence[tuple[int, int]]) -> None:
        missing = []
        for key in dict.fromkeys(keys):
            if key in self._drawn:
                self.noise[key] = self._drawn[key]
            elif key not in self.noise:
                missing.append(key)
        if missing:
            noise = gumbel_noise(*zip(*missing, strict=True), self.vocab_size, self.device)
            self.noise.update(zip(missing, noise.unbind(), strict=True))

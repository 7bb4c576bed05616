"""What a forward pass is asked for, and what comes out of it. Dimensions are those of `ragged_batch`, and H hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Argmax(NamedTuple):
    """The most likely token of each row of logits, where nothing else is asked of them."""

    token_ids: Tensor  # [M] int64; of equals the lowest, and any id where not ok
    ok: Tensor  # [M] bool: False where the row's maximum is NaN or -inf

    def on_host(self) -> tuple[list[int], list[bool]]:
        """Both as lists; waits for the device."""
        return self.token_ids.tolist(), self.ok.tolist()

    @classmethod
    def of(cls, logits: Tensor) -> Argmax:
        """The argmax of logits [M, V]."""
        values, token_ids = logits.max(dim=-1)
        return cls(token_ids, values > float("-inf"))


class GreedyTokens(NamedTuple):
    """The most likely token of each row, on the host already."""

    token_ids: list[int]  # [M]; of equals the lowest
    logprobs: list[float]  # [M]: NaN where a row has a NaN or is -inf everywhere; elsewhere its log-softmax, if wanted

    def on_host(self) -> tuple[list[int], list[bool]]:
        """As Argmax has it."""
        return self.token_ids, [logprob == logprob for logprob in self.logprobs]


class DraftedTokens(NamedTuple):
    """What a step of a draft model proposes: a token of each row, and how likely it is to the draft."""

    token_ids: Tensor  # [M] int64; the most likely ones of a greedy step, of equals the lowest
    logprobs: Tensor  # [M] float32: the token's log-softmax; NaN where the row has a NaN or is -inf everywhere

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor | None = None) -> DraftedTokens:
        """Tokens that were sampled from logits [M, V] float32, [M] int64; None: the most likely ones."""
        if token_ids is None:
            values, token_ids = logits.max(dim=-1)
        else:
            values = logits.gather(1, token_ids.unsqueeze(-1)).squeeze(-1)
        return cls(token_ids, values - logits.logsumexp(dim=-1))


@dataclass(frozen=True, slots=True)
class HiddenStatesRequest:
    """Which hidden states a drafter asks of the target; of which rows, the batch says (`RaggedBatch.hidden_idx`)."""

    last: bool = False  # the residual stream behind the last layer, which the final norm reads
    layer_inputs: tuple[int, ...] = ()  # the residual stream that enters these layers: transformers' hidden_states[i]

    def check(self, num_layers: int) -> None:
        """Raises ValueError where an entry of `layer_inputs` names no layer of a model of `num_layers`."""
        for layer_idx in self.layer_inputs:
            if not 0 <= layer_idx < num_layers:
                raise ValueError(
                    f"layer_inputs must name layers 0 .. {num_layers - 1} of the model, got {self.layer_inputs}"
                )


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The hidden states that a HiddenStatesRequest names, of the R rows that ask."""

    last: Tensor | None  # [R, H] the model's dtype; None where not asked for
    layer_inputs: tuple[Tensor, ...]  # [R, H] the model's dtype, one per entry of the request, in its order

    def side_by_side(self) -> Tensor:
        """[R, F]: what heads read, the last ones or all layers' inputs."""
        return torch.cat(self.layer_inputs, dim=-1) if self.last is None else self.last

    def split(self, counts: Sequence[int]) -> list[HiddenStates]:
        """The hidden states of the first counts[0] rows, of the next counts[1] rows, and so on up to all R."""
        counts = list(counts)
        last = [None] * len(counts) if self.last is None else self.last.split(counts)
        layer_inputs = zip(*(states.split(counts) for states in self.layer_inputs), strict=True)
        return list(map(HiddenStates, last, layer_inputs if self.layer_inputs else [()] * len(counts)))

    def first(self, num_rows: int) -> HiddenStates:
        """The hidden states of the first rows."""
        last = None if self.last is None else self.last[:num_rows]
        return HiddenStates(last, tuple(states[:num_rows] for states in self.layer_inputs))


@dataclass(frozen=True, slots=True)
class Features:
    """What heads read beside the tokens of N rows: hidden states of the target, or their own of the pass before."""

    values: Tensor  # [N, F] the model's dtype; may be overwritten
    are_own: bool = False

    def filled_up(self, num_rows: int) -> Features:
        """With zeros for so many more rows."""
        return Features(F.pad(self.values, (0, 0, 0, num_rows)), self.are_own)


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """What a decoder's pass over N rows, filler included, is asked for. Indices are rows of the pass.

    `output_idx` are the rows that logits or `hidden.last` are wanted of: behind its attention, the last layer runs for
    no other. It holds every entry of `logits_idx`, and every entry of `hidden_idx` if `hidden.last` is asked for.
    """

    logits_idx: Tensor | None = None  # [M] int64; None: every row
    output_idx: Tensor | None = None  # [U] int64, ascending; None: every row
    argmax_of: int | None = None  # take the argmax of as many leading columns, in place of logits
    hidden: HiddenStatesRequest | None = None
    hidden_idx: Tensor | None = None  # [R] int64; None: every row
    features: Features | None = None  # of every row, which heads read beside their tokens

    def wants_input_of(self, layer_idx: int) -> bool:
        """Whether the residual stream that enters this layer is asked for."""
        return self.hidden is not None and layer_idx in self.hidden.layer_inputs

    @property
    def wants_last(self) -> bool:
        return self.hidden is not None and self.hidden.last

    def output_rows(self, outputs: Tensor, idx: Tensor | None) -> Tensor:
        """Of `outputs` [U, ...], one for each entry of `output_idx`, those of the rows `idx`."""
        if idx is self.output_idx:
            return outputs
        if self.output_idx is not None:
            idx = torch.searchsorted(self.output_idx, idx)
        return outputs.index_select(0, idx)

    def hidden_states(self, last: Tensor | None, layer_inputs: dict[int, Tensor]) -> HiddenStates | None:
        """`last` and the `layer_inputs` by layer, [R, H] each, in the order of the request; None without one."""
        if self.hidden is None:
            return None
        return HiddenStates(last, tuple(layer_inputs[layer_idx] for layer_idx in self.hidden.layer_inputs))


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass computes. Exactly one of `logits` and `argmax` is there."""

    logits: Tensor | None  # [M, V] float32 (the model's dtype as it comes from a decoder)
    argmax: Argmax | None  # in place of logits, where asked for
    hidden_states: HiddenStates | None  # where asked for, and rows of the batch ask

    def first_rows(self, num_logits: int) -> ForwardOutput:
        """The same without the filler rows behind the first num_logits of logits or argmax."""
        if num_logits == len(self.logits if self.argmax is None else self.argmax.ok):
            return self
        if self.argmax is not None:
            argmax = Argmax(*(values[:num_logits] for values in self.argmax))
            return ForwardOutput(None, argmax, self.hidden_states)
        return ForwardOutput(self.logits[:num_logits], None, self.hidden_states)

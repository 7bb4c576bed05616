"""What every drafter takes and gives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from specpaged.drafting.draft import Draft
from specpaged.modeling.forward_output import HiddenStates, HiddenStatesRequest
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.rounds import Lookup, Together
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.stop_rule import StopRule


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence's share of a proposal, as values: made of its ScheduledSequence once that has been committed.

    A draft model makes RaggedRows of it: one for its known tokens, one for each draft that it runs.

    `token_ids` are the known tokens, in order, that the drafter has not seen (KV missing in its pool from
    `context_len` on); `blocks` covers them and `num_draft_tokens - 1` slots more. With `num_draft_tokens` = 0
    the drafter only catches up; otherwise `request_idx` is the sequence's index in the sampling batch. With
    `num_looked_back` it has one, too, and the drafter says what it would have drafted behind so many of `token_ids`,
    the last ones; if it `is_glance`, these are the sequence's last ones as if they were all, and their KV is nobody's
    afterwards. `lookup` says when it takes a lookup's draft in place of the model's, where there are several
    drafters: its `num_tokens` fit behind the known ones, too, and it has a `request_idx`.

    A drafter that reads the target gets the hidden states of the known tokens that the target has just run, in every
    step that the sequence goes on from, whether or not it drafts or has tokens to catch up with: of those at positions
    `hidden_position`, `hidden_position` + 1, ... Its KV at a position is that of the hidden state there and of the
    token behind, so it never has more than the target's, and nothing of drafts: it runs `token_ids` but for the first
    one, each in the place of the one before it. Of a sequence of 9 known tokens the target has just run three, one that
    was known before and 2 drafts that stand, and beside them a draft that was rejected; it has not run the newest one
    yet:

        position         0 .. 4 | 5  6  7 | 8          hidden_position 5, 3 rows; context_len 5
                                | run     | bonus      token_ids: those at 5 to 8, with or without drafts
                                               KV at 5, 6, 7: of the hidden states there, and the tokens at 6, 7, 8
    """

    sequence: Hashable  # whose it is, for a drafter that keeps something by sequence
    token_ids: Sequence[int]
    context_len: int
    blocks: Sequence[int]
    num_draft_tokens: int
    request_idx: int
    hidden_states: HiddenStates | None = None
    hidden_position: int = 0
    num_looked_back: int = 0
    lookup: LookupChoice | None = None
    is_glance: bool = False


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Drafts of the sequences of a sampling batch, in its order, as verification reads them."""

    token_ids: list[Sequence[int]]
    probs: list[Tensor | None]  # per sequence [k_i, V] fp32, processed; only for rejection sampling

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> DraftOutput:
        """The token ids and the probabilities of each draft, in two lists."""
        return cls([draft.token_ids for draft in drafts], [draft.probs for draft in drafts])


class Drafter(Protocol):
    """Proposes tokens; never decides any. Who derives from it has to write `propose` alone.

    `propose` and `forget` are called between two steps, one at a time, and what is handed over stays as it is. With
    schedule="overlap", `propose` is called from a thread of its own while the target runs for others.
    """

    hidden_states: HiddenStatesRequest | None = None  # what it reads of the target
    looks_back: bool = False  # whether it can say what it would have drafted
    stops: bool = False  # whether it heeds a stop rule
    # What stands for it where several rounds are one call, if anything does.
    in_rounds: ModelRunner | Lookup | Together | None = None
    # Of a custom drafter: whether its drafts come with the `probs` that they were drawn from, or are certain, without.
    gives_probs: bool = False

    @abstractmethod
    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        """A draft for each sequence of `sampling`, in its order, by the rows that name them in `request_idx`.

        Each has as many tokens as its row asks for, or fewer, or none; with a `stop_rule`, whose rows are those that
        draft, in order, none goes deeper than it says, where it is asked: in one pass over all rows, by a drafter that
        `stops`. Of a row that looks back it has `num_looked_back` tokens. The
        drafter's KV of all rows is brought up to date: afterwards its pool holds KV for `token_ids` of every row, then
        for the draft's tokens but the last; of a drafter that reads the target, as DraftRow says. Who was to draft, and
        has taken a lookup's draft, is left out of that by a drafter that does not read the target: its KV is as it was.
        """
        ...

    def forget(self, sequence: Hashable) -> None:
        """The sequence has ended, or given up its KV, or a proposal for it has failed: whatever was kept of it goes.

        Of a sequence that was never proposed for, too.
        """
        return


class ModelDrafter(Drafter):
    """One that runs a model."""

    runner: ModelRunner

    @property
    @override
    def stops(self) -> bool:
        """Where it decodes greedily, in one call: nobody waits for a device to know."""
        return self.runner.runs_greedy

    @property
    @override
    def in_rounds(self) -> ModelRunner | None:
        """Its model, where that decodes greedily in one call."""
        return self.runner if self.stops else None

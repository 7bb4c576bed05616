"""Several rounds of greedy decoding in one call: what is asked, and what comes of it. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specpaged.modeling.forward_output import HiddenStates
    from specpaged.modeling.model_runner import ModelRunner
    from specpaged.speculation.lookup_choice import LookupChoice


class DecodingRow(NamedTuple):
    """A sequence that decodes by the most likely tokens. Of its known tokens the target has run all but the last."""

    token_ids: Sequence[int]  # the known ones from `start` on, which the target or the drafter has not run
    start: int
    draft_context_len: int  # tokens that the draft model has run, pending drafts among them; `start` without one
    draft: Sequence[int]  # pending, for the first round
    num_draft_tokens: int  # to be drafted for each further round
    most_tokens: int  # that may come: 1 at least, and more than are pending; slots reach up to the last but one
    stop_ids: Sequence[int]  # that end it
    blocks: Sequence[int]
    lookup: int = 0  # the address of an index of all its known tokens, which drafts where no model does; 0: none
    # When it takes a draft of one of several such indexes, `lookups`, in place of the model's; None: never.
    choice: LookupChoice | None = None
    lookups: Sequence[int] = ()
    draft_blocks: Sequence[int] | None = None  # of the draft model's KV; None: `blocks`
    # Tokens before `draft_context_len` that the draft model does not read: the next one has a place so much nearer to
    # the beginning of its text, and of `draft_blocks`.
    num_skipped: int = 0


class Round(NamedTuple):
    """What a round comes to, by sequence: the drafts that it verified, and the tokens that stand."""

    drafts: list[list[int]]
    left_out: list[list[int]]  # of drafts that were made in the same call, the first one that a rule has, if any
    evidence: list[list[float]]  # of both, if made in the same call: log-probabilities, or how long a match each had
    token_ids: list[list[int]]  # the drafts that stand, and the token behind them
    num_drafted: int  # in the same call, of all sequences: with all that a rule has left out
    drafters: Sequence[int] = ()  # whose the drafts are, if made in the same call: see Draft
    # What lookups have found besides: whose it is, the tokens whose outcome is known, and what is known of each.
    found: Sequence[Sequence[tuple[int, list[int], list[float]]]] = ()


class Rounds:
    """Rounds one after the other, sequence by sequence: none, where in the first one a row has no most likely token.

    Three rounds of two sequences, of which the first drafts:

             round 0    round 1       round 2      num_drafts     num_tokens     token_ids
        A    -> 4       5 6 -> 5 8    9 -> 9 1     0 2 1          1 2 2          4 5 8 9 1
        B    -> 7       -> 7          -> 3               0 0 0          1 1 1    7 7 3

    Drafts that wait are for the round that would be next, made in the same call.
    """

    def __init__(
        self,
        num_rounds: int,
        num_seqs: int,
        found: list[int],
        beside: array[float],
        seconds: array[float],
        num_told: int = 0,
    ):
        """Of what the call has written: rounds_found.h says how. It tells what so many lookups have found besides."""
        self.num_rounds = num_rounds
        waiting, unread, whose, drafted = (1 + count * num_seqs for count in range(2, 6))
        had = drafted + num_rounds + 1
        missed = had + num_seqs * num_rounds
        got = missed + num_seqs * num_rounds
        made_by = got + num_seqs * num_rounds
        besides = made_by + num_seqs * num_rounds
        start = besides + num_seqs * num_rounds * num_told
        self.drafts_wait = bool(found[0])
        self.draft_context_lens = found[1 + num_seqs : waiting]  # that the draft model has run, of those that wait too
        self.num_waiting = found[waiting:unread]
        self.waiting_drafters = found[whose:drafted]  # whose these are: see Draft
        self.num_unread = found[unread:whose]  # tokens that the target has run, and heads have not
        self.unread: Sequence[HiddenStates] = ()  # of each sequence: of these
        *self.num_drafted, self.num_drafted_ahead = found[drafted:had]  # in front of each round, and behind the last
        self.num_drafts = found[had:missed]
        self.num_left_out = found[missed:got]
        self.num_tokens = found[got:made_by]
        self.drafters = found[made_by:besides]  # whose the drafts were of each round
        self.num_found = found[besides:start]  # tokens that each lookup has found besides, where that is told
        self._num_told = num_told
        self.token_ids = []
        for num_tokens in found[1 : 1 + num_seqs]:
            self.token_ids.append(found[start : start + num_tokens])
            start += num_tokens
        self.num_wanted: list[int] = []  # drafts of each sequence, for each further round, as the host has asked
        self.seconds = seconds  # of each round's target pass, and of what made its drafts, by turns; waiting ones' too
        self._drafts, self._evidence = found[start:], beside
        self._found_start = len(self._drafts) - sum(self.num_found)

    @property
    def drafts(self) -> bool:
        """Whether any drafts were made in the call."""
        return any(self.num_drafted) or self.num_drafted_ahead > 0

    @property
    def last_drafting(self) -> tuple[int, int, float]:
        """Drafts that were made last for a round, or else ahead, of all sequences together; how many tokens had come in
        the round before; and the seconds it took.

        None where a lookup has made some of them in place of the model.
        """
        if any(self.drafters) or any(self.waiting_drafters):
            return 0, 0, 0.0
        emitted = [0, *self.num_emitted]
        if self.num_drafted[-1]:
            return self.num_drafted[-1], emitted[-2], self.seconds[2 * self.num_rounds - 1]
        return self.num_drafted_ahead, emitted[-1], self.seconds[2 * self.num_rounds + 1]

    @property
    def draft_seconds(self) -> float:
        """Of all that made drafts."""
        return sum(self.seconds[1::2])

    @property
    def verify_seconds(self) -> Sequence[float]:
        """Of each round's target pass."""
        return self.seconds[: 2 * self.num_rounds : 2]

    @property
    def num_unverified(self) -> list[int]:
        """Drafts of each round, of all sequences together."""
        return self._by_round(self.num_drafts)

    @property
    def num_emitted(self) -> list[int]:
        """Tokens of each round, of all sequences together."""
        return self._by_round(self.num_tokens)

    def _by_round(self, counts: Sequence[int]) -> list[int]:
        return [sum(counts[i :: self.num_rounds]) for i in range(self.num_rounds)]

    def drop_waiting(self) -> None:
        """Nobody takes the drafts that wait."""
        self.drafts_wait, self.num_waiting = False, [0] * len(self.num_waiting)

    def waiting(self) -> list[tuple[list[int], list[float]]]:
        """The drafts of each sequence that wait, and what is known of them, as `Round.evidence` has it."""
        first, start = sum(self.num_drafts) + sum(self.num_left_out), 0
        drafts, evidence = self._drafts[first:], self._evidence[first : len(self._drafts)].tolist()
        waiting = []
        for count in self.num_waiting:
            waiting.append((drafts[start : start + count], evidence[start : start + count]))
            start += count
        return waiting

    @cached_property
    def rounds(self) -> list[Round]:
        """Round by round, for whoever looks at single ones."""
        rounds = [
            Round([], [], [], [], made, self.drafters[i :: self.num_rounds]) for i, made in enumerate(self.num_drafted)
        ]
        end, counts = 0, zip(self.num_drafts, self.num_left_out, self.num_tokens, strict=True)
        for token_ids in self.token_ids:
            tokens_end = 0
            for of_round, (num_drafts, num_left_out, num_tokens) in zip(rounds, counts, strict=False):
                start, middle, end = end, end + num_drafts, end + num_drafts + num_left_out
                tokens_start, tokens_end = tokens_end, tokens_end + num_tokens
                of_round.drafts.append(self._drafts[start:middle])
                of_round.left_out.append(self._drafts[middle:end])
                of_round.evidence.append(self._evidence[start:end].tolist())
                of_round.token_ids.append(token_ids[tokens_start:tokens_end])
        if self._num_told:
            rounds = [of_round._replace(found=found) for of_round, found in zip(rounds, self._found(), strict=True)]
        return rounds

    def _found(self) -> list[list[list[tuple[int, list[int], list[float]]]]]:
        """Of each round and sequence, what lookups have found besides."""
        found: list[list[list[tuple[int, list[int], list[float]]]]] = [[] for _ in range(self.num_rounds)]
        end, counts = self._found_start, iter(self.num_found)
        for _ in self.token_ids:
            for of_round in found:
                of_sequence = []
                for number in range(1, self._num_told + 1):
                    start, end = end, end + next(counts)
                    if end > start:
                        of_sequence.append((number, self._drafts[start:end], self._evidence[start:end].tolist()))
                of_round.append(of_sequence)
        return found


class Lookup(ABC):
    """Drafting without a model, by an index of each sequence's tokens, which is a C++ object: see lookup.h.

    What is known of its drafts is the length of a match, or how likely each one is, as a logarithm.
    """

    evidence_is_length: bool

    @abstractmethod
    def address(self, sequence: Hashable, token_ids: Sequence[int]) -> int:
        """Of the sequence's index, which holds all its known tokens, these; it lives as long as nobody forgets it."""


class Together(NamedTuple):
    """Several lookups, and a model for those that take nothing of theirs, if there is one."""

    model: ModelRunner | None
    lookups: Sequence[Lookup]

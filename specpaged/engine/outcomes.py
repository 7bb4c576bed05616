"""What has come of drafts, and who is gone, until a controller is told."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial

from specpaged.drafting.draft import Draft, Evidence
from specpaged.engine.sequence import Sequence
from specpaged.engine.step_clock import ask
from specpaged.engine.turns import Turns
from specpaged.speculation.acceptance import contradicts
from specpaged.speculation.controller import Controller

_MOST_GONE = 8  # sequences that are kept, to be told of


class Outcomes:
    """Keeps them: to tell takes far less when there is more to be told at once, and a plan to be made, as between two
    passes of a model nothing of all this is in the caches.
    """

    def __init__(self, controller: Controller):
        self.controller = controller
        self._known: list[tuple[Sequence, Draft, SequenceOf[int]]] = []  # with what came in the draft's place
        self._turns = Turns()
        self._gone: dict[Sequence, tuple[int, int] | None] = {}  # with how many tokens came, of how many

    def add(self, sequence: Sequence, draft: Draft, token_ids: SequenceOf[int]) -> None:
        """These tokens stand where this was drafted."""
        self._come_back(sequence)
        self._known.append((sequence, draft, token_ids))

    def verified(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> bool:
        """So many drafts stood and so many fell; whether its text has turned by that, or is not what was expected.

        Of that the controller hears at once; what else is known of the sequence, and waits, is of the text before, or
        told with it. Without one it hears of such drafts now and then anyway.
        """
        self._come_back(sequence)
        turned = self._turns.add(sequence, num_accepted, num_rejected, self._expects)
        if turned is None:
            return False
        self._known = [known for known in self._known if known[0] is not sequence]
        self._observe(sequence, *turned)
        return True

    def looked_back(self, sequence: Sequence, num_stood: int, num_fallen: int) -> bool:
        """So many drafts would have stood, and so many not; whether its text has turned by that, or is not what was
        expected. It is told here.
        """
        self._come_back(sequence)
        num_seen, expected = num_stood + num_fallen, self._expects(sequence)
        is_surprise = expected is not None and contradicts(num_stood, num_seen, expected)
        self._observe(sequence, num_stood, num_fallen)
        return self._turns.add(sequence, num_stood, num_fallen) is not None or is_surprise

    def _expects(self, sequence: Sequence) -> float | None:
        return ask(getattr(self.controller, "expects", _nobody_knows), sequence)

    def _observe(self, sequence: Sequence, num_accepted: int, num_rejected: int) -> None:
        as_drafts = partial(Controller.observe_outcomes, self.controller)
        ask(getattr(self.controller, "observe_outcomes", as_drafts), sequence, num_accepted, num_rejected)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or given up its KV."""
        self._come_back(sequence)
        self._turns.forget(sequence)
        end, num_tokens, most_tokens = None, len(sequence.output_token_ids), sequence.params.max_tokens
        by_itself = sequence.has_ended and sequence.error is None and sequence.finish_reason != "abort"
        if by_itself and num_tokens and most_tokens:  # a host may call any end the same
            end = num_tokens, most_tokens
        self._gone[sequence] = end
        if len(self._gone) >= _MOST_GONE:
            self.tell()

    def _come_back(self, sequence: Sequence) -> None:
        """Who had given up its KV is here again: it is forgotten before anything new is known of it."""
        if sequence in self._gone:
            self.tell()

    def tell(self) -> None:
        """Tell the controller all of it, in this order."""
        known, self._known = self._known, []
        for sequence, draft, token_ids in known:
            if draft and not draft.drafter:
                ask(self.controller.observe_drafts, sequence, *outcome_of(draft, token_ids), Evidence(draft))
            for found in draft.found:
                outcome = outcome_of(found, token_ids)
                ask(self.controller.observe_lookup, found.drafter - 1, sequence, *outcome, Evidence(found))
        gone, self._gone = self._gone, {}
        for sequence, end in gone.items():
            if end is not None:
                ask(self.controller.observe_end, *end)
            ask(self.controller.forget, sequence)


def _nobody_knows(sequence: Sequence) -> None:
    """What is expected of its drafts."""


def outcome_of(draft: Draft, token_ids: SequenceOf[int]) -> tuple[int, int]:
    """How many of its tokens stand where these came, and whether the next one fell: 0 where that is not known."""
    num_accepted, num_known = 0, min(len(draft), len(token_ids))
    while num_accepted < num_known and draft.token_ids[num_accepted] == token_ids[num_accepted]:
        num_accepted += 1
    return num_accepted, int(num_accepted < num_known)

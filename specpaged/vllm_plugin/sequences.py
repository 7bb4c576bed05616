"""vLLM's requests as sequences, kept up to date by its scheduler's output. No torch.

The scheduler owns blocks and decides what runs. Which tokens are committed and how much KV is valid, the worker knows
best: under asynchronous scheduling a step is planned before the one before it has been verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING

from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence, SequenceStatus, derived_seed
from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.leased_page_table import LeasedPageTable
from specpaged.paging.lent_blocks import LentBlocks
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.sampling.request import SamplingRequest
from specpaged.vllm_plugin.drafted_blocks import DraftedBlocks
from specpaged.vllm_plugin.params import translated

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams as VllmSamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

PLACEHOLDER_TOKEN_ID = -1  # what vLLM puts where it does not know a draft token


class Sequences:
    """The sequences of the requests that vLLM has scheduled and not ended, by its request ids."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_pools: int,
        max_model_len: int,
        max_draft_tokens: int,
        vocab_size: int,
        seed: int,
        engine: int = 0,
        drafts_follow: bool = False,
    ):
        self.num_blocks = num_blocks  # ids are 1 .. num_blocks
        self.block_size = block_size
        self.num_pools = num_pools
        self.max_model_len = max_model_len
        self.max_draft_tokens = max_draft_tokens
        self.vocab_size = vocab_size
        # Engines that decode side by side do not draw the same.
        self.seed = derived_seed(seed, -engine) if engine else seed
        self.has_grammar: set[Sequence] = set()
        self.owes_prompt_logprobs: set[Sequence] = set()  # vLLM takes them with an output token, once and whole
        self._sequences: dict[str, Sequence] = {}
        self._lent = LentBlocks()
        self._gone: list[Sequence] = []  # in the last update
        self.new: list[Sequence] = []  # likewise
        self._most_scheduled = 0  # draft tokens of a sequence that its scheduler takes, as of that
        self._drafted_blocks = DraftedBlocks(block_size, drafts_follow) if num_pools > DRAFT else None
        self._num_seeds_derived = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, request_id: str) -> Sequence:
        """KeyError of one that has not been scheduled, or has ended."""
        return self._sequences[request_id]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def update(self, scheduled: SchedulerOutput) -> tuple[list[ScheduledSequence], list[Sequence]]:
        """Take in what has changed since the last step.

        Returns what this step runs, in vLLM's order, and the sequences that have ended or given up their KV.
        """
        self._gone, self.new = [], []
        self._most_scheduled = scheduled.num_spec_tokens_to_schedule
        if self._drafted_blocks is not None:
            self._drafted_blocks.begin()
        for request_id in scheduled.finished_req_ids:
            self._forget(request_id)
        restarted: set[str] = set()
        for new in scheduled.scheduled_new_reqs:
            token_ids = new.prefill_token_ids or new.prompt_token_ids
            known = self._sequences.get(new.req_id)
            # A known one is back from a preemption, as vLLM's second model runner is told, or a session whose next
            # input has come: its prompt has grown by that, and by what was its output.
            if known is None or len(new.prompt_token_ids) != known.num_prompt_tokens:
                self._forget(new.req_id)
                self._sequences[new.req_id] = self._new(new, known)
                self.new.append(self._sequences[new.req_id])
            self._restart(new.req_id, token_ids, new.block_ids[0], new.num_computed_tokens)
            restarted.add(new.req_id)
        cached = scheduled.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                token_ids = cached.all_token_ids.get(request_id, self._sequences[request_id].token_ids)
                self._restart(request_id, token_ids, new_blocks[0], cached.num_computed_tokens[i])
                restarted.add(request_id)
            elif new_blocks is not None:
                self._sequences[request_id].page_table.lend(new_blocks[0])
                if self._drafted_blocks is not None:
                    self._drafted_blocks.hand_out(new_blocks[0])
        entries = []
        for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
            sequence = self._sequences[request_id]
            given = scheduled.scheduled_spec_decode_tokens.get(request_id, ())
            num_new_tokens = num_scheduled - len(given)
            if restarted and self._drafted_blocks is not None:
                self._drafted_blocks.run(sequence.page_table, num_new_tokens, request_id in restarted)
            entries.append(self._entry(sequence, num_new_tokens, given))
        return entries, self._gone

    def _new(self, new: NewRequestData, earlier: Sequence | None) -> Sequence:
        given = new.sampling_params
        params = translated(given)
        seed = params.seed
        if seed is None:
            seed = earlier.seed if earlier is not None else self._derive_seed()
        asked = params.num_speculative_tokens
        sequence = Sequence(
            new.req_id,
            new.prompt_token_ids,
            params,
            seed,
            LeasedPageTable(self._lent, self.num_blocks, self.block_size, self.num_pools),
            self.max_draft_tokens if asked is None else asked,
        )
        sequence.status = SequenceStatus.RUNNING
        sequence.sampling_request = self._sampling_request(sequence, given)
        sequence.stop_ids = params.stop_token_ids if params.ignore_eos else sequence.sampling_request.stop_ids
        if params.prompt_logprobs is not None:
            self.owes_prompt_logprobs.add(sequence)
        if given.structured_outputs is not None:
            self.has_grammar.add(sequence)
        return sequence

    def _sampling_request(self, sequence: Sequence, given: VllmSamplingParams) -> SamplingRequest:
        """Without token ids that no logits speak of: an embedding may be padded beyond the tokenizer's end."""

        def exists(token_id: int) -> bool:
            return token_id < self.vocab_size

        params = sequence.params
        if params.logit_bias:
            bias = {token_id: value for token_id, value in params.logit_bias.items() if exists(token_id)}
            params = replace(params, logit_bias=bias)
        if params.allowed_token_ids is not None:
            # None that exists: it ends, as one that has no token.
            allowed = tuple(filter(exists, params.allowed_token_ids)) or (
                next(filter(exists, given.all_stop_token_ids), 0),
            )
            params = replace(params, allowed_token_ids=allowed)
        bad_words_ids = [ids for ids in given.bad_words_token_ids or () if all(map(exists, ids))]
        request = SamplingRequest.of(sequence, filter(exists, given.all_stop_token_ids), bad_words_ids)
        prompt_token_ids = request.prompt_token_ids
        if not all(map(exists, prompt_token_ids)):
            prompt_token_ids = list(filter(exists, prompt_token_ids))
        return replace(request, params=params, prompt_token_ids=prompt_token_ids)

    def _restart(self, request_id: str, token_ids: SequenceOf[int], blocks: SequenceOf[int], num_tokens: int) -> None:
        """Give a sequence these tokens and these blocks, which hold the target's KV of its first num_tokens tokens."""
        sequence = self._sequences[request_id]
        sequence.token_ids[:] = token_ids
        sequence.output_token_ids[:] = token_ids[sequence.num_prompt_tokens :]
        if self._drafted_blocks is not None:
            self._drafted_blocks.hand_out(blocks[num_tokens // self.block_size :])
        sequence.page_table.restart(blocks, [num_tokens, 0][: self.num_pools])
        if sequence not in self.new:  # who has just come has left nothing behind
            self._drop(sequence)

    def note_draft_kv(self, sequences: SequenceOf[Sequence]) -> None:
        """The step of these sequences is over, in vLLM's order: whose blocks the drafter has filled is remembered."""
        if self._drafted_blocks is not None:
            self._drafted_blocks.note([sequence.page_table for sequence in sequences])

    def _forget(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.finish_reason = "finished"  # for whatever reason vLLM has
            self._lent.leave(sequence.page_table.blocks)
            self._drop(sequence)
            self.has_grammar.discard(sequence)
            self.owes_prompt_logprobs.discard(sequence)

    def _drop(self, sequence: Sequence) -> None:
        sequence.draft = NO_DRAFT
        self._gone.append(sequence)

    def _entry(self, sequence: Sequence, num_new_tokens: int, given: SequenceOf[int]) -> ScheduledSequence:
        table = sequence.page_table
        context_len = table.context_lens[TARGET]
        samples = context_len + num_new_tokens == sequence.num_tokens
        draft = NO_DRAFT
        if samples and given:
            draft = sequence.draft if sequence.draft.token_ids == given else _given(sequence.draft, given)
            draft = draft.cut(min(self.max_model_len, table.capacity) - sequence.num_tokens)
        return ScheduledSequence(sequence, context_len, num_new_tokens, samples, draft)

    def num_useful_draft_tokens(self, sequence: Sequence, token_ids: SequenceOf[int]) -> int:
        """Drafts that could be emitted behind `token_ids`, its newest output: none if vLLM is about to end it.

        The draft's KV of them, but the last one's, is to fit into the blocks that are there.
        """
        params, num_outputs = sequence.params, len(sequence.output_token_ids)
        for i, token_id in enumerate(token_ids, num_outputs - len(token_ids) + 1):
            if token_id in sequence.stop_ids and i >= params.min_tokens:
                return 0
        room = self.max_model_len - sequence.num_tokens - 1
        if self.num_pools > 1:
            room = min(room, sequence.page_table.capacity - sequence.num_tokens + 1)
        return min(sequence.max_draft_tokens, params.max_tokens - num_outputs - 1, room)

    def reserve_rounds(
        self, sequences: SequenceOf[Sequence], num_rounds: int, wanted: SequenceOf[int] | None = None
    ) -> list[tuple[int, int]]:
        """As `ReserveRounds` says: of one round and, if there are two, the drafts behind it.

        So many tokens may come that these are as many as `num_useful_draft_tokens` will be then.
        """
        reserved = []
        for i, sequence in enumerate(sequences):
            k = min(self._most_scheduled, sequence.max_draft_tokens if wanted is None else wanted[i])
            num_tokens = len(sequence.token_ids)
            most = min(
                len(sequence.draft.token_ids) + k + 2,
                sequence.params.max_tokens - len(sequence.output_token_ids),
                self.max_model_len - num_tokens,
            )
            if self.num_pools > 1:
                most = min(most, sequence.page_table.capacity - num_tokens + 2)
            reserved.append((k, most))
        return reserved

    def _derive_seed(self) -> int:
        self._num_seeds_derived += 1
        return derived_seed(self.seed, self._num_seeds_derived - 1)

    def check_integrity(self) -> None:
        """Every page table is sound; what is kept of a sequence is kept of one that is here."""
        for sequence in self:
            sequence.page_table.check_integrity()
            if max(sequence.page_table.context_lens) > sequence.num_tokens + self.max_draft_tokens:
                raise IntegrityError(f"{sequence!r} has KV of more tokens than it has")
        self._lent.check_integrity(sequence.page_table.blocks for sequence in self)
        if self._drafted_blocks is not None:
            self._drafted_blocks.check_integrity(self.num_blocks)
        strangers = (self.has_grammar | self.owes_prompt_logprobs) - set(self)
        if strangers:
            raise IntegrityError(f"{strangers} have ended, and are still remembered")


def _given(own: Draft, token_ids: SequenceOf[int]) -> Draft:
    """What the scheduler gives of a sequence's own draft, or in its place.

    Placeholders stand for our own drafts, which the scheduler has not seen; where there are none, it pads.
    """
    draft = own.cut(len(token_ids))
    if token_ids[0] == PLACEHOLDER_TOKEN_ID:
        return draft
    known = list(token_ids)
    if PLACEHOLDER_TOKEN_ID in known:
        known = known[: known.index(PLACEHOLDER_TOKEN_ID)]
    return draft.cut(len(known)) if list(draft.token_ids[: len(known)]) == known else Draft(known)

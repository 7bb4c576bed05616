"""The one-token passes of a proposal, laid out ahead: what they need of the host goes up once, before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import Draft
from specpaged.modeling.forward_output import DraftedTokens
from specpaged.modeling.ragged_batch import RaggedBatch, flat_page_table, ints, upload
from specpaged.sampling.batch import SamplingBatch


class DraftSteps:
    """Step s samples draft s + 1 of every row that asks for as many; from step 1 on its pass runs the draft before.

    Rows A, B, C with 8, 3 and 5 known tokens ask for 3, 1 and 2 drafts:

        step        0       1      2
        rows      A B C    A C     A
        source_idx         0 2     0       those rows in the step before (None: all of its rows)
        position           8 5     9       of the draft that runs
    """

    def __init__(
        self,
        rows: Sequence[DraftRow],
        block_size: int,
        device: torch.device | str,
        block_stride: int | None = None,
    ):
        self.block_size = block_size
        self.block_stride = block_stride or block_size
        num_steps = max(row.num_draft_tokens for row in rows)
        members = [[row for row in rows if row.num_draft_tokens > step] for step in range(num_steps)]
        self.request_idx = [[row.request_idx for row in step] for step in members]
        # Rows of a step that go on, by their index in it; None: every row goes on.
        going_on = [
            None if len(after) == len(before) else [i for i, row in enumerate(before) if row.num_draft_tokens > step]
            for step, (before, after) in enumerate(pairwise(members), 1)
        ]
        self._contexts = [
            tuple(row.context_len + len(row.token_ids) + step for row in rows_of_step)
            for step, rows_of_step in enumerate(members[1:])
        ]
        self.source_idx: list[Tensor | None] = [None] * num_steps
        if num_steps == 1:
            return
        counts = [len(rows_of_step) for rows_of_step in members[1:]]
        positions = [position for step in self._contexts for position in step]
        slots = [
            row.blocks[position // block_size] * self.block_stride + position % block_size
            for rows_of_step, contexts in zip(members[1:], self._contexts, strict=True)
            for row, position in zip(rows_of_step, contexts, strict=True)
        ]
        source = [i for rows_idx in going_on if rows_idx is not None for i in rows_idx]
        width = -(-(max(positions) + 1) // block_size)
        first = members[1]
        wide = upload(ints([*positions, *slots, *range(len(first)), *source]), device)
        blocks = flat_page_table([row.blocks for row in first], width)
        narrow = upload(ints([*blocks, *positions, *range(len(first) + 1)], torch.int32), device)
        total = len(positions)
        flat_positions, flat_slots, self._rows, source_rows = wide.split_with_sizes(
            [total, total, len(first), len(source)]
        )
        table_idx, contexts, self._bounds = narrow.split_with_sizes([len(first) * width, total, len(first) + 1])
        self._positions, self._slots, self._context_lens = (
            x.split_with_sizes(counts) for x in (flat_positions, flat_slots, contexts)
        )
        split = iter(source_rows.split_with_sizes([len(rows_idx) for rows_idx in going_on if rows_idx is not None]))
        self.source_idx[1:] = [None if rows_idx is None else next(split) for rows_idx in going_on]
        self._page_tables = [table_idx.view(len(first), width)]
        for of_step in self.source_idx[2:]:
            before = self._page_tables[-1]
            self._page_tables.append(before if of_step is None else before.index_select(0, of_step))

    def __len__(self) -> int:
        return len(self.request_idx)

    def batch(self, step: int, token_ids: Tensor) -> RaggedBatch:
        """The pass of step 1, 2, ...; token_ids [N] are what its rows have sampled in the step before."""
        num_seqs = len(self.request_idx[step])
        return RaggedBatch(
            token_ids=token_ids,
            positions=self._positions[step - 1],
            slot_mapping=self._slots[step - 1],
            page_table=self._page_tables[step - 1],
            cu_query_lens=self._bounds[: num_seqs + 1],
            context_lens=self._context_lens[step - 1],
            logits_idx=self._rows[:num_seqs],
            query_lens=(1,) * num_seqs,
            context_lens_host=self._contexts[step - 1],
            num_logits=(1,) * num_seqs,
            block_size=self.block_size,
            block_stride=self.block_stride,
        )

    def sample(
        self,
        logits: Tensor,
        logits_of: Callable[[int, Tensor], Tensor],
        sampling: SamplingBatch,
        drafts: list[Draft],
        with_probs: bool,
    ) -> None:
        """Put in drafts that meet the noise which their verification will meet, `with_probs` that they are drawn from.

        The first step has these logits [rows, V]; `logits_of` says those of a further one, whose number it gets with
        the tokens [M] int64 of the step before.
        """
        sampling.draw_noise(self.request_idx)
        token_ids: list[list[int]] = [[] for _ in sampling.requests]  # drafts so far, where processing looks at them
        probs: list[list[Tensor]] = [[] for _ in sampling.requests]
        drafted: list[DraftedTokens] = []
        for step, request_idx in enumerate(self.request_idx):
            if step > 0:
                last = drafted[-1].token_ids
                logits = logits_of(step, last)
                if sampling.needs_processing:
                    for i, token_id in zip(self.request_idx[step - 1], last.tolist(), strict=True):
                        token_ids[i].append(token_id)
            seen = [step] * len(request_idx)
            if not with_probs:
                chosen = sampling.choose(logits, request_idx, seen, token_ids, wants_logprobs=True)
                drafted.append(DraftedTokens(chosen.token_ids, chosen.logprobs))
                continue
            processed = sampling.process(logits, request_idx, seen, token_ids)
            drafted.append(DraftedTokens.of(processed, sampling.sample(processed, request_idx, seen)[0]))
            for i, row_probs in zip(request_idx, sampling.probs(processed).unbind(), strict=True):
                probs[i].append(row_probs)
        self.drafts(drafted, drafts)
        for i in self.request_idx[0] if with_probs else ():
            if drafts[i]:
                drafts[i] = replace(drafts[i], probs=torch.stack(probs[i][: len(drafts[i])]))

    def drafts(self, drafted: Sequence[DraftedTokens], drafts: list[Draft]) -> None:
        """Put in the draft of each request, by its request_idx, of what the steps have drafted.

        It ends where a row allows no token: that is none to verify, and no distribution that one was drawn from.
        """
        numbers = torch.cat([step.token_ids for step in drafted]).tolist()
        logprobs = torch.cat([step.logprobs for step in drafted]).tolist()
        of_requests: dict[int, tuple[list[int], list[float]]] = {i: ([], []) for i in self.request_idx[0]}
        requests = (i for request_idx in self.request_idx for i in request_idx)
        for i, token_id, logprob in zip(requests, numbers, logprobs, strict=True):
            of_requests[i][0].append(token_id)
            of_requests[i][1].append(logprob)
        for i, (token_ids, of_tokens) in of_requests.items():
            count = next((j for j, logprob in enumerate(of_tokens) if logprob != logprob), len(token_ids))
            drafts[i] = Draft(token_ids, of_tokens).cut(count)

"""A round of speculative decoding that the device runs by itself: launched at once, whatever it comes to.

    plan      how many drafts each sequence has, and what each pass runs of it     (decoding_round)
    K times   pack -> the draft's pass -> sample -> store the drafts
    at most once, where drafts are selected from: which of them the target verifies         (select_drafts)
    once      pack -> the target's pass -> sample -> settle: what stands, lengths, the next round's inputs, the result

Sizes are those of a bucket, and lengths are data: a pass has rows for the most that its sequences may run, and those
that nobody runs are filler. So a round can be captured as a graph, once for each bucket, and replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specpaged.modeling.attention.triton_pass import PackedPass
from specpaged.modeling.cuda_graphs import Record
from specpaged.modeling.device_state import DeviceState
from specpaged.modeling.forward_output import Argmax, DraftedTokens, ForwardOutput, ForwardRequest
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedBatch
from specpaged_kernels.accept import sample
from specpaged_kernels.decoding_round import NUM_COUNTS, Rows, noise_keys, plan_round, settle_round, store_drafts
from specpaged_kernels.pack import Packed, pack
from specpaged_kernels.paged_attention import choose_tiles
from specpaged_kernels.select_drafts import select_drafts

logger = logging.getLogger("specpaged")

_FIRST_PASS_ROWS = 2  # of the draft, of a sequence: it has not seen the newest token, nor perhaps the last draft


class RoundBucket(NamedTuple):
    """What a round is launched, or was captured, for: the most that its sequences may have."""

    num_seqs: int
    num_drafts: int  # of each: as many passes of the draft are made
    draft_items: int  # of attention's work lists
    target_items: int
    draws: bool  # whether any token is drawn by chance
    has_temperatures: bool  # whether any is drawn at another temperature than 1


@dataclass(frozen=True)
class _Geometry:
    """What a model's attention wants of a work list."""

    tokens: int
    split_len: int

    @classmethod
    def of(cls, runner: ModelRunner) -> _Geometry:
        heads = runner.model.decoder.layers[0].heads  # a flat decoder's layers have one geometry
        group = heads.num_heads // heads.num_kv_heads
        tiles = choose_tiles(heads.head_dim, group, runner.model.dtype)
        return cls(tiles.tokens(group), tiles.split_len)

    def most_items(self, num_rows: int, lengths: Sequence[int]) -> int:
        """Of passes that run up to num_rows tokens of each sequence, which has up to so many behind them; a power of 2.

        Who runs fewer may have more splits than who runs many, but never more than this.
        """
        blocks = -(-num_rows // self.tokens)
        num_items = sum(blocks * -(-length // self.split_len) for length in lengths)
        return 1 << max(0, num_items - 1).bit_length()


class _Sampled(NamedTuple):
    """The token of each row of logits [M], as Argmax has it, and how likely it is to the model."""

    argmax: Argmax
    logprobs: Tensor | None  # [M] float32, where they are wanted


class DeviceRound:
    """Rounds of the sequences in a DeviceState, of at most `num_drafts` drafts each.

    With `num_selected` the target verifies so many for each of the sequences that run, the likeliest of all. Who has no
    token stops, or with `makes_up` goes on with its row's end_id.

    With `record`, a round is captured when the first one of its bucket comes, and replayed from then on. The result
    [num_rows, NUM_COUNTS + K + 1] int32 of the last round is as `settle_round` says.
    """

    def __init__(
        self,
        state: DeviceState,
        target: ModelRunner,
        draft: ModelRunner | None,
        vocab_size: int,
        num_drafts: int,
        record: Record | None = None,
        num_selected: int | None = None,
        makes_up: bool = False,
    ):
        self.state = state
        self.target = target
        self.draft = draft
        self.vocab_size = vocab_size
        self.num_drafts = num_drafts if draft is not None else 0
        self.num_selected = num_selected
        self.makes_up = makes_up
        self._record = record
        self._replays: dict[RoundBucket, object] = {}  # what repeats a round; None: it could not be captured
        self._geometries = {runner: _Geometry.of(runner) for runner in (target, draft) if runner is not None}
        shape = (state.num_rows, NUM_COUNTS + self.num_drafts + 1)
        self.result = torch.zeros(shape, dtype=torch.int32, device=target.model.device)

    def bucket(
        self, num_seqs: int, num_drafts: int, lengths: Sequence[int], draws: bool, has_temperatures: bool
    ) -> RoundBucket:
        """The smallest one for the state's first num_seqs rows, of which some are sequences, of up to `lengths` tokens
        behind the round, drafts among them. With num_drafts = 0, no row may have KV of the draft."""
        num_seqs = self.state.bucket(num_seqs)
        draft_items = self._most_items(self.draft, _FIRST_PASS_ROWS, lengths) if num_drafts else 0
        target_items = self._most_items(self.target, num_drafts + 1, lengths)
        return RoundBucket(num_seqs, num_drafts, draft_items, target_items, draws, has_temperatures)

    @torch.inference_mode()
    def launch(self, bucket: RoundBucket) -> Tensor:
        """Run a round; its result [num_seqs, NUM_COUNTS + K + 1], a view. Nothing waits for the device."""
        if self._record is not None and bucket not in self._replays:
            self._replays[bucket] = self._capture(bucket)
        replay = self._replays.get(bucket)
        if replay is None:
            self._run(bucket)
        else:
            replay()
        return self.result[: bucket.num_seqs]

    @property
    def num_captured(self) -> int:
        """The number of graphs so far."""
        return sum(replay is not None for replay in self._replays.values())

    def _most_items(self, runner: ModelRunner, num_rows: int, lengths: Sequence[int]) -> int:
        return self._geometries[runner].most_items(num_rows, lengths)

    def _capture(self, bucket: RoundBucket) -> object | None:
        """What repeats a round. The first run compiles what is not compiled yet, and is one of nobody: limits are 0."""
        limits = self.state.fields["limits"]
        before = limits.clone()
        limits.zero_()
        logger.info("%s: capturing rounds of up to %d sequences", self.target.model.name, bucket.num_seqs)
        try:
            return self._record(lambda: self._run(bucket))
        except RuntimeError as error:  # out of memory is one
            logger.warning("rounds of up to %d sequences run eagerly: %s", bucket.num_seqs, error)
            return None
        finally:
            limits.copy_(before)

    def _run(self, bucket: RoundBucket) -> None:
        num_seqs, steps = bucket.num_seqs, bucket.num_drafts
        rows = self.state.rows(num_seqs)
        plan = plan_round(rows, steps)
        selects = self.num_selected is not None and self.num_selected < steps
        device = rows.num_tokens.device
        chances = torch.empty(num_seqs, steps, dtype=torch.float32, device=device) if selects else None
        for step in range(steps):
            num_rows = num_seqs * (_FIRST_PASS_ROWS if step == 0 else 1)
            of_step = (plan.starts[step], plan.ends[step], plan.num_logits[step])
            packed = self._pack(self.draft, rows, of_step, num_rows, num_seqs, bucket.draft_items)
            logits_idx = packed.logits_idx if step == 0 else None
            argmax, logprobs = self._sampled(self.draft, bucket, rows, packed, of_step[0], logits_idx, step, selects)
            store_drafts(rows, argmax.token_ids, packed.cu_logits, step, logprobs, chances)
        ends, num_logits, most = plan.ends[steps], plan.num_logits[steps], steps
        if selects:
            ends, num_logits = select_drafts(plan, chances, self.num_selected)
            most = self.num_selected
        of_target = (plan.starts[steps], ends, num_logits)
        num_rows = num_seqs * (most + 1)  # in all, however deep some of them go
        packed = self._pack(self.target, rows, of_target, num_rows, num_rows, bucket.target_items)
        argmax, _ = self._sampled(self.target, bucket, rows, packed, of_target[0], None, 0)
        end_ids = self.state.fields["end_ids"][:num_seqs] if self.makes_up else None
        settle_round(rows, *argmax, packed.cu_logits, plan.num_drafts, self.result[:num_seqs], end_ids)

    def _pack(
        self,
        runner: ModelRunner,
        rows: Rows,
        of_pass: tuple[Tensor, Tensor, Tensor],  # starts, ends, num_logits
        num_rows: int,
        max_logits: int,
        max_items: int,
    ) -> Packed:
        multiple, geometry = runner.model.row_multiple, self._geometries[runner]
        num_seqs = len(rows.num_tokens)
        return pack(
            rows.token_ids, *of_pass, self.state.fields["page_table"][:num_seqs], runner.kv_cache.block_size,
            _up_to(num_rows, multiple), _up_to(max_logits, multiple), max_items, geometry.tokens, geometry.split_len,
        )  # fmt: skip

    def _sampled(
        self,
        runner: ModelRunner,
        bucket: RoundBucket,
        rows: Rows,
        packed: Packed,
        starts: Tensor,
        logits_idx: Tensor | None,  # None: of every row of the pass
        step: int,  # drafts that come before a sequence's first row of logits
        wants_logprobs: bool = False,
    ) -> _Sampled:
        """The token of each row of logits [M], as `SamplingBatch.sample` would have it; likewise for filler rows."""
        greedy = not (bucket.draws or wants_logprobs) and runner.model.has_argmax
        output = self._forward(runner, packed, starts, logits_idx, self.vocab_size if greedy else None)
        if output.argmax is not None:
            return _Sampled(output.argmax, None)
        logits = output.logits.float()[:, : self.vocab_size]
        keys = None
        if bucket.draws:
            fields, num_seqs = self.state.fields, bucket.num_seqs
            of_seeds = (fields[name][:num_seqs] for name in ("seeds", "draws", "num_prompt_tokens"))
            keys = noise_keys(rows, *of_seeds, packed.cu_logits, len(logits), step)
        if bucket.has_temperatures:
            row_idx = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
            owners = torch.searchsorted(packed.cu_logits[1:], row_idx, right=True).clamp_(max=bucket.num_seqs - 1)
            temperatures = self.state.temperatures(bucket.num_seqs)
            logits = logits / temperatures.index_select(0, owners).unsqueeze(-1)
        argmax = Argmax(*sample(logits, keys))
        return _Sampled(argmax, DraftedTokens.of(logits, argmax.token_ids).logprobs if wants_logprobs else None)

    def _forward(
        self, runner: ModelRunner, packed: Packed, starts: Tensor, logits_idx: Tensor | None, argmax_of: int | None
    ) -> ForwardOutput:
        model, cache = runner.model, runner.kv_cache
        batch = RaggedBatch(
            token_ids=packed.token_ids,
            positions=packed.positions,
            slot_mapping=packed.slot_mapping,
            page_table=self.state.fields["page_table"][: len(starts)],
            cu_query_lens=packed.cu_query_lens,
            context_lens=starts,
            logits_idx=packed.logits_idx,
            query_lens=(),  # which the device alone knows
            context_lens_host=(),
            num_logits=(),
            block_size=cache.block_size,
            block_stride=cache.block_stride,
        )
        paged_pass = PackedPass(batch, len(packed.token_ids), cache.layers, packed.work_list)
        request = ForwardRequest(logits_idx, logits_idx, argmax_of)
        return model.run(packed.token_ids, packed.positions, paged_pass, request)


def _up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple

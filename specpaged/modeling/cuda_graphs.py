"""Passes captured as CUDA graphs and replayed: one launch runs a whole model.

A graph repeats its kernels with the addresses and sizes that they had at capture. So a pass copies its batch into
static buffers, which are filled up to a bucket, and whatever depends on lengths is data. There is a graph for each
bucket of rows, of attention's work items and of logits, and for each request of hidden states, captured when the first
pass of that kind comes.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specpaged.modeling.forward_output import Argmax, ForwardOutput, ForwardRequest, HiddenStates, HiddenStatesRequest
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.ragged_batch import RaggedBatch
from specpaged.modeling.rank_agreement import RankAgreement
from specpaged.paging.kv_cache import PagedKVCache

if TYPE_CHECKING:
    from specpaged.modeling.attention.triton_pass import StaticPass
    from specpaged_kernels.paged_attention import WorkList

logger = logging.getLogger("specpaged")

ROW_BUCKETS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Record = Callable[[Callable[[], None]], Callable[[], object]]  # a pass over static buffers -> what repeats it


class Bucket(NamedTuple):
    """What a graph was captured for: the most that a batch may have."""

    rows: int  # and sequences
    items: int  # of attention's work list
    num_logits: int | None  # None: of every row
    argmax_of: int | None  # see ForwardRequest
    hidden: HiddenStatesRequest | None = None  # of every row: a batch's own are picked behind the replay


class Captured(NamedTuple):
    """A pass over static buffers that can be repeated."""

    paged_pass: StaticPass
    replay: Callable[[], object]
    output: ForwardOutput  # the buffers that a replay writes


_CAPTURING = threading.Lock()  # of all models: capturing waits for the device, which no other capture would survive


class Recorder:
    """Captures on a CUDA device. Graphs share one pool of memory, as they are replayed one after the other.

    Meanwhile other threads may use the device, but for captures, which wait for one another. `around` is what has to be
    around every capture, where somebody else's collectives are in it.
    """

    def __init__(self, device: torch.device, around: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.device = device
        self._around = around
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], object]:
        """Captures `run` and returns what replays it. Raises RuntimeError where it cannot be captured."""
        with _CAPTURING, torch.cuda.device(self.device), self._around():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # compiles what is not compiled yet, which a capture cannot
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # On a stream of this device: torch's own is of the one that was captured on first.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        return graph.replay


class CudaGraphs:
    """The graphs of one model on its KV.

    A batch of 3 sequences A, B, C with 2 + 1 + 2 rows in a bucket of 8: the others are sequences without rows, and
    rows without a sequence, which attention skips and nothing stores.

        token_ids      a a b c c . . .        cu_query_lens  0 2 3 5 5 5 5 5 5
        context_lens   A B C . . . . .        cu_items       of the WorkList likewise
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: PagedKVCache,
        max_model_len: int,
        record: Record | None = None,
        agreement: RankAgreement | None = None,
    ):
        from specpaged_kernels.paged_attention import choose_tiles  # where it is wanted: defining kernels takes seconds

        self.model = model
        self.kv_cache = kv_cache
        self._record = record or Recorder(model.device)
        self._agreement = agreement  # of ranks that run the model together
        # None: could not be captured.
        self._captured: dict[Bucket, Captured | None] = {}
        heads = model.decoder.layers[0].heads  # a flat decoder's layers have one geometry
        group = heads.num_heads // heads.num_kv_heads
        tiles = choose_tiles(heads.head_dim, group, model.dtype)
        self._tokens, self._split_len = tiles.tokens(group), tiles.split_len
        most, device = ROW_BUCKETS[-1], model.device
        width = -(-max_model_len // kv_cache.block_size)
        wide = torch.zeros(5, most, dtype=torch.int64, device=device)
        self._token_ids, self._positions, self._slots, self._logits_idx, self._argmax = wide.unbind()
        self._page_table = torch.zeros(most, width, dtype=torch.int32, device=device)
        self._cu_query_lens = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._ok = torch.zeros(most, dtype=torch.bool, device=device)
        self._logits = torch.empty(most, model.vocab_size, dtype=model.dtype, device=device)
        self._hidden_states: list[Tensor] = []  # [most, H] each: as many as the largest request so far names

    @classmethod
    def why_not(cls, model: LoadedModel, enforce_eager: bool) -> str | None:
        """What keeps a model's passes from being captured."""
        if enforce_eager:
            return "enforce_eager"
        if model.device.type != "cuda":
            return "no GPU"
        if model.implementation != "flat" or model.backend != "triton":
            return "only the flat decoder on Triton's kernels can be captured"
        return None

    @property
    def num_captured(self) -> int:
        """The number of graphs so far."""
        return sum(captured is not None for captured in self._captured.values())

    def run(
        self, batch: RaggedBatch, argmax_of: int | None = None, hidden: HiddenStatesRequest | None = None
    ) -> ForwardOutput | None:
        """One pass of the batch, as LoadedModel.run makes it; None if no graph can run it.

        `hidden` needs a batch with `hidden_idx`.
        """
        if batch.num_tokens > ROW_BUCKETS[-1]:
            return None
        work_list = self._work_list(batch)
        bucket = self.bucket(batch, len(work_list.item_seq), argmax_of, hidden)
        self._fill(batch, bucket)
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(batch, work_list, bucket)
        captured = self._captured[bucket]
        if captured is None:
            return None
        captured.paged_pass.update(work_list)
        captured.replay()
        # Copies: the next replay writes to the same buffers.
        num_logits = len(batch.logits_idx)
        logits, argmax, hidden_states = captured.output.logits, captured.output.argmax, captured.output.hidden_states
        if hidden_states is not None:
            last, layer_inputs = hidden_states.last, hidden_states.layer_inputs
            hidden_states = HiddenStates(
                None if last is None else last.index_select(0, batch.hidden_idx),
                tuple(x.index_select(0, batch.hidden_idx) for x in layer_inputs),
            )
        return ForwardOutput(
            None if logits is None else logits[:num_logits].clone(),
            None if argmax is None else Argmax(*(values[:num_logits].clone() for values in argmax)),
            hidden_states,
        )

    def bucket(
        self,
        batch: RaggedBatch,
        num_items: int,
        argmax_of: int | None = None,
        hidden: HiddenStatesRequest | None = None,
    ) -> Bucket:
        """The smallest bucket that the batch fits."""
        num_logits = None
        if len(batch.logits_idx) != batch.num_tokens:
            num_logits = _bucket_of(len(batch.logits_idx))
        items = 1 << max(0, num_items - 1).bit_length()
        return Bucket(_bucket_of(batch.num_tokens), items, num_logits, argmax_of, hidden)

    def _work_list(self, batch: RaggedBatch) -> WorkList:
        from specpaged.modeling.attention.triton_pass import work_list_of

        return work_list_of(batch, self._tokens, self._split_len)

    def _fill(self, batch: RaggedBatch, bucket: Bucket) -> None:
        rows, num_seqs = bucket.rows, len(batch.query_lens)
        width = batch.page_table.shape[1]
        _copy(batch.token_ids, self._token_ids[:rows])
        _copy(batch.positions, self._positions[:rows])
        _copy(batch.slot_mapping, self._slots[:rows])
        if bucket.num_logits is not None:
            _copy(batch.logits_idx, self._logits_idx[: bucket.num_logits])
        self._page_table[:num_seqs, :width].copy_(batch.page_table)
        _copy(batch.cu_query_lens, self._cu_query_lens[: rows + 1], batch.num_tokens)
        _copy(batch.context_lens, self._context_lens[:rows])

    def _capture(self, batch: RaggedBatch, work_list: WorkList, bucket: Bucket) -> Captured | None:
        from specpaged.modeling.attention.triton_pass import StaticPass

        rows = bucket.rows
        static = replace(
            batch,
            token_ids=self._token_ids[:rows],
            positions=self._positions[:rows],
            slot_mapping=self._slots[:rows],
            page_table=self._page_table[:rows],
            cu_query_lens=self._cu_query_lens[: rows + 1],
            context_lens=self._context_lens[:rows],
            logits_idx=self._logits_idx[: bucket.num_logits],
            # This batch's alone: nothing that is captured may look at them.
            query_lens=(),
            context_lens_host=(),
            num_logits=(),
            hidden_idx=None,
            num_hidden=(),
        )
        num_logits = rows if bucket.num_logits is None else bucket.num_logits
        logits_idx = None if bucket.num_logits is None else static.logits_idx
        # The last layer runs for the rows of the logits alone, unless it is asked for what is behind it.
        output_idx = None if bucket.hidden is not None and bucket.hidden.last else logits_idx
        request = ForwardRequest(logits_idx, output_idx, bucket.argmax_of, bucket.hidden)
        paged_pass = StaticPass(static, rows, self.kv_cache.layers, bucket.items)
        paged_pass.update(work_list)
        output = self._output_buffers(num_logits, bucket)

        def run() -> None:
            computed = self.model.run(static.token_ids, static.positions, paged_pass, request)
            for buffer, values in zip(_tensors(output), _tensors(computed), strict=True):
                buffer.copy_(values)

        agreement = self._agreement
        if agreement is not None:
            agreement.check_same(bucket)
        logger.info("%s: capturing passes of up to %d rows, %d items", self.model.name, *bucket[:2])
        captured, why_not = None, "another rank could not capture them"
        try:
            captured = Captured(paged_pass, self._record(run), output)
        except RuntimeError as error:  # out of memory is one
            why_not = str(error)
        if agreement is not None and not agreement.all_have(captured is not None):
            captured = None
        if captured is None:
            logger.warning("%s: passes of up to %d rows run eagerly: %s", self.model.name, rows, why_not)
        return captured

    def _output_buffers(self, num_logits: int, bucket: Bucket) -> ForwardOutput:
        """Views of the static buffers, which all graphs share."""
        logits = argmax = hidden_states = None
        if bucket.argmax_of is None:
            logits = self._logits[:num_logits]
        else:
            argmax = Argmax(self._argmax[:num_logits], self._ok[:num_logits])
        if bucket.hidden is not None:
            num_states = bucket.hidden.last + len(bucket.hidden.layer_inputs)
            while len(self._hidden_states) < num_states:
                shape = (ROW_BUCKETS[-1], self.model.hidden_size)
                self._hidden_states.append(torch.empty(shape, dtype=self.model.dtype, device=self.model.device))
            buffers = [buffer[: bucket.rows] for buffer in self._hidden_states[:num_states]]
            last = buffers.pop(0) if bucket.hidden.last else None
            hidden_states = HiddenStates(last, tuple(buffers))
        return ForwardOutput(logits, argmax, hidden_states)


def _tensors(output: ForwardOutput) -> list[Tensor]:
    """All tensors of an output, in a fixed order."""
    tensors = [output.logits] if output.argmax is None else [*output.argmax]
    if output.hidden_states is not None:
        tensors += [output.hidden_states.last, *output.hidden_states.layer_inputs]
    return [tensor for tensor in tensors if tensor is not None]


def _bucket_of(rows: int) -> int:
    return ROW_BUCKETS[bisect_left(ROW_BUCKETS, rows)]


def _copy(source: Tensor, target: Tensor, filler: int = 0) -> None:
    """source [n] into the first of target [n or more]; filler into the rest."""
    target[: len(source)].copy_(source)
    if len(source) < len(target):
        target[len(source) :].fill_(filler)

"""Passes captured as CUDA graphs and replayed: one launch runs a whole model.

A graph repeats its kernels with the addresses and sizes that they had at capture. So a pass copies its batch into
static buffers, which are filled up to a bucket of rows, and whatever depends on lengths is data. There is a graph for
each bucket of rows, of contexts and of what is wanted of the logits, captured when the first pass of that kind comes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specpaged.batch import RaggedBatch
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.paging.kv_cache import PagedKVCache

if TYPE_CHECKING:
    from specpaged.modeling.attention_triton import StaticPass

logger = logging.getLogger("specpaged")

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHORTEST_CONTEXT = 512  # of the buckets of contexts; each next one is twice as long

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]
Record = Callable[[Run], Run]  # a pass over static buffers -> what repeats it


class Bucket(NamedTuple):
    """What a graph was captured for: at most that many rows, and sequences of at most that many tokens."""

    rows: int
    length: int
    all_logits: bool  # of every row, or of at most one row for each of `rows` sequences
    vocab_size: int | None  # see LoadedModel.run


class Recorder:
    """Captures on a CUDA device. Graphs share one pool of memory: each one's outputs last until the next replay."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """A Record."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles what is not compiled yet, which a capture cannot
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class CudaGraphs:
    """The graphs of one model on its KV.

    A batch of 3 sequences A, B, C with 2 + 1 + 2 rows in a bucket of 8: the others are sequences without rows, and
    rows without a sequence, which attention skips and nothing stores.

        token_ids      a a b c c . . .        cu_query_lens  0 2 3 5 5 5 5 5 5
        context_lens   A B C . . . . .        cu_items       of each WorkList likewise
    """

    def __init__(self, model: LoadedModel, kv_cache: PagedKVCache, max_model_len: int, record: Record | None = None):
        self.model = model
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self._record = record or Recorder()
        self._captured: dict[Bucket, tuple[StaticPass, Run]] = {}
        most, device = ROW_BUCKETS[-1], model.device
        width = -(-max_model_len // kv_cache.block_size)
        wide = torch.zeros(4, most, dtype=torch.int64, device=device)
        self._token_ids, self._positions, self._slots, self._logits_idx = wide.unbind()
        self._page_table = torch.zeros(most, width, dtype=torch.int32, device=device)
        self._cu_query_lens = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)

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

    def fits(self, batch: RaggedBatch) -> bool:
        """Whether there is a bucket for the batch."""
        return batch.num_tokens <= ROW_BUCKETS[-1]

    def bucket(self, batch: RaggedBatch, vocab_size: int | None) -> Bucket:
        """The smallest one that the batch fits."""
        rows = ROW_BUCKETS[bisect_left(ROW_BUCKETS, batch.num_tokens)]
        longest = max(n + q for n, q in zip(batch.context_lens_host, batch.query_lens, strict=True))
        length = SHORTEST_CONTEXT
        while length < longest:
            length *= 2
        return Bucket(rows, min(length, self.max_model_len), len(batch.logits_idx) == batch.num_tokens, vocab_size)

    def run(self, batch: RaggedBatch, vocab_size: int | None) -> Outputs:
        """See LoadedModel.run; of the batch's M rows."""
        bucket = self.bucket(batch, vocab_size)
        self._fill(batch, bucket)
        if bucket not in self._captured:
            logger.info("%s: capturing passes of up to %d rows, %d tokens", self.model.name, *bucket[:2])
            self._captured[bucket] = self._capture(batch, bucket)
        paged_pass, replay = self._captured[bucket]
        paged_pass.update(batch)
        num_logits = len(batch.logits_idx)
        # A copy, as the next replay of any graph may overwrite the pool that they share.
        return tuple(output[:num_logits].clone() for output in replay())

    def _fill(self, batch: RaggedBatch, bucket: Bucket) -> None:
        rows, num_seqs = bucket.rows, len(batch.query_lens)
        width = batch.page_table.shape[1]
        _copy(batch.token_ids, self._token_ids[:rows])
        _copy(batch.positions, self._positions[:rows])
        _copy(batch.slot_mapping, self._slots[:rows])
        if not bucket.all_logits:
            _copy(batch.logits_idx, self._logits_idx[:rows])
        self._page_table[:num_seqs, :width].copy_(batch.page_table)
        _copy(batch.cu_query_lens, self._cu_query_lens[: rows + 1], batch.num_tokens)
        _copy(batch.context_lens, self._context_lens[:rows])

    def _capture(self, batch: RaggedBatch, bucket: Bucket) -> tuple[StaticPass, Run]:
        from specpaged.modeling.attention_triton import StaticPass  # with the kernels, which take seconds to import

        rows = bucket.rows
        static = replace(
            batch,
            token_ids=self._token_ids[:rows],
            positions=self._positions[:rows],
            slot_mapping=self._slots[:rows],
            page_table=self._page_table[:rows],
            cu_query_lens=self._cu_query_lens[: rows + 1],
            context_lens=self._context_lens[:rows],
            logits_idx=self._logits_idx[:rows],
            # This batch's alone: nothing that is captured may look at them.
            query_lens=(),
            context_lens_host=(),
            num_logits=(),
        )
        paged_pass = StaticPass(static, rows, self.kv_cache.layers, bucket.length)
        paged_pass.update(batch)
        logits_idx = None if bucket.all_logits else static.logits_idx
        operands = (static.token_ids, static.positions, paged_pass, logits_idx, bucket.vocab_size)
        return paged_pass, self._record(lambda: self.model.run(*operands))


def _copy(source: Tensor, target: Tensor, filler: int = 0) -> None:
    """source [n] into the first of target [n or more]; filler into the rest."""
    target[: len(source)].copy_(source)
    if len(source) < len(target):
        target[len(source) :].fill_(filler)

"""Forward passes of one model on its paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged.modeling.backend import new_pass
from specpaged.modeling.cuda_graphs import CudaGraphs
from specpaged.modeling.forward_output import Argmax, DraftedTokens
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.ragged_batch import RaggedBatch
from specpaged.paging.kv_cache import PagedKVCache


class ModelRunner:
    """Runs packed batches. Blocks, lengths and tokens come as values in each batch; who allocated them is unknown here.

    `gathered_bytes` and `filler_rows` count over the runner's life; filler rows are those of passes and of their
    logits, not what a single kernel adds to its own tiles, nor what fills up a captured pass. With `graphs`, passes
    that fit are replayed.
    """

    def __init__(self, model: LoadedModel, kv_cache: PagedKVCache, graphs: CudaGraphs | None = None):
        if kv_cache.kv_spec != model.kv_spec:
            raise ValueError(f"kv_cache must have the model's layers {model.kv_spec}, got {kv_cache.kv_spec}")
        self.model = model
        self.kv_cache = kv_cache
        self.graphs = graphs
        self.gathered_bytes = 0
        self.filler_rows = 0

    @torch.inference_mode()
    def forward(self, batch, *, argmax_of=None, hidden=None):
        from specpaged.modeling.forward_output import ForwardOutput

        if argmax_of is not None:
            return ForwardOutput(None, self.argmax(batch, argmax_of), None)
        return ForwardOutput(self.logits_of(batch), None, None)

    @torch.inference_mode()
    def logits_of(self, batch: RaggedBatch) -> Tensor:
        """Writes the KV of the batch's N tokens and returns the logits that it asks for, [M, V] float32."""
        return self._run(batch, None)[0].float()

    @torch.inference_mode()
    def argmax(self, batch: RaggedBatch, vocab_size: int) -> Argmax:
        """As `forward`, and what its logits' first vocab_size columns come to.

        Where the decoder's output layer has an argmax of its own, the logits themselves are never in memory.
        """
        if self.model.has_argmax and len(batch.logits_idx):
            return Argmax(*self._run(batch, vocab_size))
        return Argmax.of(self.logits_of(batch)[:, :vocab_size])

    @torch.inference_mode()
    def greedy_steps(
        self, batches: Sequence[RaggedBatch], kept: Sequence[Tensor | None], vocab_size: int
    ) -> list[Tensor]:
        """Passes of which each runs the tokens that the one before found most likely; those of each, [M] int64.

        The first one runs its own `token_ids`, which the others need not have. kept[s] [N] int64 are the rows of pass
        s - 1's tokens that pass s runs; None: all of them.
        """
        decoder = self.model.decoder
        in_one_call = getattr(decoder, "runs_greedy_steps", None)
        if in_one_call is not None and self.model.backend == "cpp" and in_one_call(batches[0].num_tokens):
            self._check_threads()
            return [
                DraftedTokens(t, t.float())
                for t in decoder.greedy_steps(batches, kept, self.kv_cache.layers, vocab_size)
            ]
        found: list[Tensor] = []
        for batch, rows in zip(batches, kept, strict=True):
            if found:
                token_ids = found[-1] if rows is None else found[-1].index_select(0, rows)
                batch = replace(batch, token_ids=token_ids)
            found.append(self.argmax(batch, vocab_size).token_ids)
        return [DraftedTokens(t, t.float()) for t in found]

    def _check_threads(self) -> None:
        model = self.model
        if model.exact and torch.get_num_threads() != model.num_threads:
            raise RuntimeError(
                f"the model was loaded for numerics='exact' with {model.num_threads} threads and runs with "
                f"{torch.get_num_threads()}: call torch.set_num_threads before loading it"
            )

    def _run(self, batch: RaggedBatch, vocab_size: int | None) -> tuple[Tensor, ...]:
        """See LoadedModel.run; of the batch's M rows."""
        model = self.model
        self._check_threads()
        replayed = None if self.graphs is None else self.graphs.run(batch, vocab_size)
        if replayed is not None:
            return replayed
        num_tokens, num_logits = batch.num_tokens, batch.logits_idx.shape[0]
        multiple = model.row_multiple
        filler = -num_tokens % multiple
        token_ids, positions = batch.token_ids, batch.positions
        if filler:
            token_ids, positions = F.pad(token_ids, (0, filler)), F.pad(positions, (0, filler))
            self.filler_rows += filler
        logits_idx = None  # every row
        if num_logits != num_tokens:
            logits_filler = -num_logits % multiple
            logits_idx = F.pad(batch.logits_idx, (0, logits_filler))
            self.filler_rows += logits_filler
        paged_pass = new_pass(model, batch, num_tokens + filler, self.kv_cache.layers)
        outputs = model.run(token_ids, positions, paged_pass, logits_idx, vocab_size)
        self.gathered_bytes += paged_pass.gathered_bytes
        return tuple(output[:num_logits] for output in outputs)

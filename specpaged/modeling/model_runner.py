"""Forward passes of one model on its paged KV."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged.batch import RaggedBatch
from specpaged.modeling.backend import new_pass
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.paging.kv_cache import PagedKVCache


class ModelRunner:
    """Runs packed batches. Blocks, lengths and tokens come as values in each batch; who allocated them is unknown here.

    `gathered_bytes` and `filler_rows` count over the runner's life; filler rows are those of passes and of their
    logits, not what a single kernel adds to its own tiles.
    """

    def __init__(self, model: LoadedModel, kv_cache: PagedKVCache):
        if kv_cache.kv_spec != model.kv_spec:
            raise ValueError(f"kv_cache must have the model's layers {model.kv_spec}, got {kv_cache.kv_spec}")
        self.model = model
        self.kv_cache = kv_cache
        self.gathered_bytes = 0
        self.filler_rows = 0

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Tensor:
        """Writes the KV of the batch's N tokens and returns the logits that it asks for, [M, V] float32."""
        model = self.model
        if model.exact and torch.get_num_threads() != model.num_threads:
            raise RuntimeError(
                f"the model was loaded for numerics='exact' with {model.num_threads} threads and runs with "
                f"{torch.get_num_threads()}: call torch.set_num_threads before loading it"
            )
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
        logits = model.decoder(token_ids, positions, paged_pass, logits_idx)
        self.gathered_bytes += paged_pass.gathered_bytes
        return logits[:num_logits].float()

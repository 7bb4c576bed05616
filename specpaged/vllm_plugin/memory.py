"""What a step takes of a device's memory, beside weights and KV."""

from __future__ import annotations

import torch

from specpaged.config import EngineConfig
from specpaged.drafting.base import DraftOutput
from specpaged.modeling.forward_output import Features, ForwardOutput
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.pair import ModelPair
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.sampling import get_sampling_batch
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged.verification import get_verifier

# Makes for the most tensors: noise, and a vocabulary sorted for top-p.
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)


@torch.inference_mode()
def run_largest_step(pair: ModelPair, config: EngineConfig) -> None:
    """Run as many tokens as may be scheduled through both models, of as many sequences as may run, each verified.

    Heads read hidden states of all of them, which are there as long as the logits are.
    Rounds of the device are as large as their buckets, whatever may be scheduled. The sequences share their blocks, so
    that a cache of one sequence's length will do: what comes out means nothing.
    """
    max_draft_tokens = config.speculative_config.max_draft_tokens if config.speculative_config else 0
    num_tokens = config.max_num_batched_tokens
    if config.device_round:
        num_tokens = max(num_tokens, config.max_num_seqs * (max_draft_tokens + 1))
    num_seqs = min(config.max_num_seqs, num_tokens)
    lens = [(num_tokens + i) // num_seqs for i in range(num_seqs)]  # which sum up to all of them
    lens = [min(length, config.max_model_len) for length in lens]
    num_blocks = -(-max(lens) // config.block_size)
    blocks = range(1, num_blocks + 1)
    drafts = [[0] * min(max_draft_tokens, length - 1) for length in lens]
    reads = pair.draft.decoder.config.hidden_states if pair.draft and pair.draft.implementation == "heads" else None

    def run(model: LoadedModel, features: Features | None) -> ForwardOutput:
        cache = PagedKVCache(model.kv_spec, num_blocks, config.block_size, model.kv_dtype, model.device)
        asked = reads if model is pair.target else None
        rows = [
            RaggedRow([0] * length, 0, blocks, len(draft) + 1, length if asked else 0)
            for length, draft in zip(lens, drafts, strict=True)
        ]
        batch = pack(rows, config.block_size, model.device, cache.block_stride)
        return ModelRunner(model, cache).forward(batch, hidden=asked, features=features)

    output = run(pair.target, None)
    if pair.draft is not None:
        run(pair.draft, Features(output.hidden_states.side_by_side()) if reads else None)
    logits = output.logits[:, : pair.vocab_size]
    requests = [SamplingRequest(_SAMPLED, i, [0], []) for i in range(num_seqs)]
    sampling = get_sampling_batch(pair.target.backend)(requests, pair.vocab_size, pair.target.device)
    get_verifier("coupled", pair.target.backend).verify(logits, DraftOutput(drafts, [None] * num_seqs), sampling)

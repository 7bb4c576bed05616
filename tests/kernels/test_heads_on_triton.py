"""Heads on Triton's kernels, in the interpreter, against heads on torch's, which a dense reference is beside."""

from __future__ import annotations

import pytest
import torch

from specpaged import SamplingParams
from specpaged.drafting.base import DraftRow
from specpaged.drafting.heads import HeadsDrafter
from specpaged.modeling.forward_output import HiddenStates
from specpaged.modeling.heads.loading import load_heads
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest

BLOCK_SIZE, HIDDEN_SIZE = 16, 32
LENGTHS, BEHIND = (5, 3), 4  # tokens of two sequences, and tokens that come later
GREEDY = SamplingRequest(SamplingParams(temperature=0), 0, (), ())


def hidden_states(reads, seed, count):
    states = torch.randn(len(reads.layer_inputs) + reads.last, count, HIDDEN_SIZE, generator=seed)
    return HiddenStates(states[-1] if reads.last else None, tuple(states[: len(reads.layer_inputs)]))


def proposals(model, path, method, backend):
    """What is drafted behind prompts, and again when some of it has come; one of the sequences only follows then."""
    loaded = load_heads(path, method, model, attention_backend=backend, numerics="exact", block_size=BLOCK_SIZE)
    cache = PagedKVCache(loaded.kv_spec, 4, BLOCK_SIZE, loaded.kv_dtype, loaded.device)
    drafter = HeadsDrafter(ModelRunner(loaded, cache), model.vocab_size, with_probs=False)
    sampling = SamplingBatch([GREEDY] * 2, model.vocab_size, loaded.device)
    seed, found = torch.Generator().manual_seed(0), []
    starts = [0, 0]
    for counts, lengths in (((2, 3), LENGTHS), ((2, 0), (BEHIND, BEHIND))):
        rows = []
        for i, (k, num_new) in enumerate(zip(counts, lengths, strict=True)):
            token_ids = torch.randint(0, model.vocab_size, (num_new + 1,), generator=seed).tolist()
            states = hidden_states(drafter.hidden_states, seed, num_new)
            rows.append(DraftRow(i, token_ids, starts[i], [2 - i], k, i, states, starts[i]))
            starts[i] += num_new
        found.append([list(draft.token_ids) for draft in drafter.propose(rows, sampling)])
    return found


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_proposals_are_those_on_torch(target, heads, method):
    model = load_model(target[0], attention_backend="torch", max_model_len=64)
    expected = proposals(model, heads[method], method, "torch")
    assert [[len(draft) for draft in drafts] for drafts in expected] == [[2, 3], [2, 0]]
    assert proposals(model, heads[method], method, "triton") == expected

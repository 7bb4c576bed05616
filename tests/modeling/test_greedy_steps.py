"""Passes of which each runs what the one before found: in one call what they are one by one."""

import dataclasses

import pytest
import torch

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache
from tests.modeling.world import random_tokens

BLOCK_SIZE = 4
VOCAB_SIZE = 120  # of the toys' 128


@pytest.fixture(params=[("qwen3", "float32"), ("llama", "float32"), ("llama", "bfloat16")], ids=" ".join)
def model(request, toy_path):
    family, dtype = request.param
    return load_model(toy_path(family), dtype=dtype, max_model_len=64, attention_backend="cpp")


def proposal(model, in_one_call: bool, monkeypatch) -> tuple[list[list[int]], list[torch.Tensor]]:
    """4, 1 and 2 drafts of three rows that have not been seen before: those of each step, and the KV."""
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 16, BLOCK_SIZE, model.dtype, "cpu"))
    for layer in runner.kv_cache.layers:
        layer.zero_()
    rows = [
        DraftRow(random_tokens(9, 1), 0, [3, 9, 4, 7], 4, 0),
        DraftRow(random_tokens(5, 2), 0, [1, 2], 1, 1),
        DraftRow(random_tokens(3, 3), 0, [5, 6], 2, 2),
    ]
    first = pack([RaggedRow(row.token_ids, row.context_len, row.blocks, 1) for row in rows], BLOCK_SIZE)
    steps = DraftSteps(rows, BLOCK_SIZE, "cpu")
    batches = [first, *(steps.batch(step, first.token_ids) for step in range(1, len(steps)))]
    calls = []
    run = model.run
    monkeypatch.setattr(model, "run", lambda *operands: calls.append(1) or run(*operands))
    if not in_one_call:
        monkeypatch.setattr(model.decoder, "runs_greedy_steps", lambda num_rows: False)
    found = runner.greedy_steps(batches, steps.kept, VOCAB_SIZE)
    assert len(calls) == (0 if in_one_call else len(steps))
    monkeypatch.undo()
    return [tokens.tolist() for tokens in found], runner.kv_cache.layers


def test_one_call_finds_what_single_passes_find(model, monkeypatch):
    found, layers = proposal(model, True, monkeypatch)
    expected, expected_layers = proposal(model, False, monkeypatch)
    assert [len(tokens) for tokens in found] == [3, 2, 1, 1]
    assert found == expected
    for ours, theirs in zip(layers, expected_layers, strict=True):
        assert torch.equal(ours, theirs)


def test_logits_that_a_family_changes_are_found_one_by_one(toy_path):
    """Soft-capping may make ties."""
    model = load_model(toy_path("gemma2"), max_model_len=64, attention_backend="cpp")
    assert not model.decoder.runs_greedy_steps(1)


def test_only_the_first_ids_are_found(model, monkeypatch):
    """An output layer may have rows beyond the vocabulary."""
    most = {int(tokens) for step in proposal(model, True, monkeypatch)[0] for tokens in step}
    monkeypatch.setitem(globals(), "VOCAB_SIZE", min(most) + 1)
    found, _ = proposal(model, True, monkeypatch)
    assert max(max(step) for step in found) <= min(most)


def test_rows_that_are_not_there_are_refused(model):
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 16, BLOCK_SIZE, model.dtype, "cpu"))
    first = pack([RaggedRow([5, 6], 0, [1], 1)], BLOCK_SIZE)
    second = dataclasses.replace(pack([RaggedRow([5], 2, [1], 1)], BLOCK_SIZE))
    with pytest.raises(IndexError, match="kept leads outside"):
        runner.greedy_steps([first, second], [None, torch.tensor([1])], VOCAB_SIZE)
    two = pack([RaggedRow([5], 2, [1], 1), RaggedRow([5], 0, [2], 1)], BLOCK_SIZE)
    with pytest.raises(IndexError, match="kept leads outside"):  # two rows for one token
        runner.greedy_steps([first, two], [None, None], VOCAB_SIZE)
    for vocab_size in (0, model.vocab_size + 1):
        with pytest.raises(IndexError, match="vocab_size leads outside"):
            runner.greedy_steps([first], [None], vocab_size)
    far = dataclasses.replace(second, positions=torch.tensor([64]))
    with pytest.raises(IndexError, match="positions leads outside"):
        runner.greedy_steps([first, far], [None, None], VOCAB_SIZE)

"""Passes of which each runs what the one before found: in one call what they are one by one."""

import dataclasses
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.forward_output import DraftedTokens
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.speculation.acceptance import logits_of
from specpaged.speculation.stop_rule import StopRule
from tests import toys
from tests.modeling.world import random_tokens

pytestmark = pytest.mark.usefixtures("without_bfloat16_units")
BLOCK_SIZE = 4
VOCAB_SIZE = 120  # of the toys' 128


@pytest.fixture(params=[("qwen3", "float32"), ("llama", "float32"), ("llama", "bfloat16")], ids=" ".join)
def model(request, toy_path):
    family, dtype = request.param
    return load_model(toy_path(family), dtype=dtype, max_model_len=64, attention_backend="cpp")


def proposal(model, in_one_call: bool, monkeypatch, rule=None) -> tuple[list[DraftedTokens], list[torch.Tensor]]:
    """4, 1 and 2 drafts of three rows that have not been seen before: those of each step, and the KV."""
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 16, BLOCK_SIZE, model.dtype, "cpu"))
    for layer in runner.kv_cache.layers:
        layer.zero_()
    rows = [
        DraftRow(None, random_tokens(9, 1), 0, [3, 9, 4, 7], 4, 0),
        DraftRow(None, random_tokens(5, 2), 0, [1, 2], 1, 1),
        DraftRow(None, random_tokens(3, 3), 0, [5, 6], 2, 2),
    ]
    first = pack([RaggedRow(row.token_ids, row.context_len, row.blocks, 1) for row in rows], BLOCK_SIZE)
    steps = DraftSteps(rows, BLOCK_SIZE, "cpu")
    batches = [first, *(steps.batch(step, first.token_ids) for step in range(1, len(steps)))]
    calls = []
    run = model.run
    monkeypatch.setattr(model, "run", lambda *operands: calls.append(1) or run(*operands))
    if not in_one_call:
        monkeypatch.setattr(model.decoder, "runs_greedy_steps", lambda num_rows: False)
    found = runner.greedy_steps(batches, steps.source_idx, VOCAB_SIZE, rule)
    assert len(calls) == (0 if in_one_call else len(steps))
    monkeypatch.undo()
    return found, runner.kv_cache.layers


def test_one_call_finds_what_single_passes_find(model, monkeypatch):
    found, layers = proposal(model, True, monkeypatch)
    expected, expected_layers = proposal(model, False, monkeypatch)
    assert [len(step.token_ids) for step in found] == [3, 2, 1, 1]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert ours.logprobs.dtype == theirs.logprobs.dtype == torch.float32
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
    for ours, theirs in zip(layers, expected_layers, strict=True):
        assert torch.equal(ours, theirs)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_call_with_a_stop_rule_ends_where_the_rule_says(model, seed):
    """Of 4, 1 and 2 drafts: with what it finds, the rule is asked in Python, where it is written down."""
    rng = random.Random(seed)
    rule = StopRule(
        slope=rng.uniform(0, 2),
        intercepts=[rng.uniform(-1, 3) for _ in range(rng.choice([1, 2, 4]))],
        leads=[rng.uniform(-1, 3) for _ in range(3)],
        expected=[rng.uniform(0.2, 1) for _ in range(3)],
        row_tokens=rng.choice([0.0, 0.05]),
        pass_tokens=rng.uniform(0, 0.6),
    )
    with pytest.MonkeyPatch.context() as patch:
        all_steps, _ = proposal(model, True, patch)
        found, _ = proposal(model, True, patch, rule)
    chances, rows, num_steps = [1.0] * 3, [0, 1, 2], 1
    for step, going_on in enumerate([[0, 2], [0], [0]]):
        for i, logprob in zip(rows, all_steps[step].logprobs.tolist(), strict=True):
            chances[i] = rule.chance(chances[i], step, logits_of([logprob])[0], i)
        rows = going_on
        if not rule.goes_on([chances[i] for i in rows], rows):
            break
        num_steps += 1
    assert len(found) == num_steps
    for ours, theirs in zip(found, all_steps, strict=False):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.logprobs, theirs.logprobs)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_log_probabilities_are_the_log_softmax_of_the_first_ids(model, in_one_call, monkeypatch):
    logits = []
    forward = ModelRunner.forward

    def recording(self, batch):
        output = forward(self, batch)
        logits.append(output.logits)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", recording)
        proposal(model, False, monkeypatch)
    found, _ = proposal(model, in_one_call, monkeypatch)
    for step, rows in zip(found, logits, strict=True):
        logprobs = rows[:, :VOCAB_SIZE].log_softmax(dim=-1).max(dim=-1)
        assert torch.equal(step.token_ids, logprobs.indices)
        torch.testing.assert_close(step.logprobs, logprobs.values, rtol=0, atol=1e-5)
        # Of all ids they would be others.
        assert not torch.allclose(step.logprobs, rows.log_softmax(dim=-1).amax(dim=-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_the_log_probability_of_a_row_with_a_nan_is_nan(toy_path, in_one_call, monkeypatch):
    model = load_model(toy_path("llama"), max_model_len=64, attention_backend="cpp")
    with torch.no_grad():
        model.decoder.decoder.embedding[5] = float("nan")
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 16, BLOCK_SIZE, model.dtype, "cpu"))
    if not in_one_call:
        monkeypatch.setattr(model.decoder, "runs_greedy_steps", lambda num_rows: False)
    rows = [RaggedRow([4, 6], 0, [1], 1), RaggedRow([4, 5], 0, [2], 1)]
    (found,) = runner.greedy_steps([pack(rows, BLOCK_SIZE)], [None], VOCAB_SIZE)
    assert found.logprobs.isnan().tolist() == [False, True]


@pytest.mark.parametrize("num_ids", [1, 7, 8, 75, 150, 157, 299, 300])
def test_of_equally_likely_ids_the_first_is_found(tmp_path, num_ids):
    """Every row of the output layer stands there four times, at different lanes and at the end."""
    twins = toys.model()
    with torch.no_grad():
        weight = twins.get_input_embeddings().weight
        weight.copy_(weight[:75].repeat(4, 1))
    twins.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), max_model_len=64, attention_backend="cpp")
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 16, BLOCK_SIZE, model.dtype, "cpu"))
    rows = [RaggedRow([i], 0, [1 + i], 1) for i in range(15)]
    (found,) = runner.greedy_steps([pack(rows, BLOCK_SIZE)], [None], num_ids)
    logits = runner.forward(pack(rows, BLOCK_SIZE)).logits[:, :num_ids]
    first = [row.index(max(row)) for row in logits.tolist()]
    assert found.token_ids.tolist() == first
    assert max(first) < 75
    assert len(set(first)) > 3 or num_ids < 75


def test_logits_that_a_family_changes_are_found_one_by_one(toy_path):
    """Soft-capping may make ties."""
    model = load_model(toy_path("gemma2"), max_model_len=64, attention_backend="cpp")
    assert not model.decoder.runs_greedy_steps(1)


def test_only_the_first_ids_are_found(model, monkeypatch):
    """An output layer may have rows beyond the vocabulary."""
    most = {int(token_id) for step in proposal(model, True, monkeypatch)[0] for token_id in step.token_ids}
    monkeypatch.setitem(globals(), "VOCAB_SIZE", min(most) + 1)
    found, _ = proposal(model, True, monkeypatch)
    assert max(int(step.token_ids.max()) for step in found) <= min(most)


def test_rows_that_are_not_there_are_refused(model):
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 16, BLOCK_SIZE, model.dtype, "cpu"))
    first = pack([RaggedRow([5, 6], 0, [1], 1)], BLOCK_SIZE)
    second = dataclasses.replace(pack([RaggedRow([5], 2, [1], 1)], BLOCK_SIZE))
    with pytest.raises(IndexError, match="source_idx leads outside"):
        runner.greedy_steps([first, second], [None, torch.tensor([1])], VOCAB_SIZE)
    two = pack([RaggedRow([5], 2, [1], 1), RaggedRow([5], 0, [2], 1)], BLOCK_SIZE)
    with pytest.raises(IndexError, match="source_idx leads outside"):  # two rows for one token
        runner.greedy_steps([first, two], [None, None], VOCAB_SIZE)
    rule = StopRule(1.0, [0.0], [0.0] * 2, [1.0] * 2, 0.0, 0.0)  # of more rows than there are
    with pytest.raises(IndexError, match="source_idx leads outside"):
        runner.greedy_steps([first, second], [None, None], VOCAB_SIZE, rule)
    for vocab_size in (0, model.vocab_size + 1):
        with pytest.raises(IndexError, match="vocab_size leads outside"):
            runner.greedy_steps([first], [None], vocab_size)
    far = dataclasses.replace(second, positions=torch.tensor([64]))
    with pytest.raises(IndexError, match="positions leads outside"):
        runner.greedy_steps([first, far], [None, None], VOCAB_SIZE)

"""The most likely tokens, and what follows them: in one call what single passes find."""

import gc
import random
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft_steps import DraftSteps
from specpaged.modeling.forward_output import Argmax, GreedyTokens
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


ROWS = [
    DraftRow(None, random_tokens(9, 1), 0, [3, 9, 4, 7], 4, 0),
    DraftRow(None, random_tokens(5, 2), 0, [1, 2], 1, 1),
    DraftRow(None, random_tokens(3, 3), 0, [5, 6], 2, 2),
]


def new_runner(model) -> ModelRunner:
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 16, BLOCK_SIZE, model.dtype, "cpu"))
    for layer in runner.kv_cache.layers:
        layer.zero_()
    return runner


def ragged(rows) -> list[RaggedRow]:
    return [RaggedRow(row.token_ids, row.context_len, row.blocks, 1) for row in rows]


def in_one_call(model, rule=None) -> tuple[list[GreedyTokens], list[torch.Tensor]]:
    """4, 1 and 2 drafts of three rows that have not been seen before: those of each step, and the KV."""
    runner = new_runner(model)
    further = [row.num_draft_tokens - 1 for row in ROWS]
    found = runner.greedy(ragged(ROWS), VOCAB_SIZE, further, wants_logprobs=True, stop_rule=rule)
    return found, runner.kv_cache.layers


def one_by_one(model) -> tuple[list[GreedyTokens], list[torch.Tensor]]:
    runner = new_runner(model)
    first, steps = pack(ragged(ROWS), BLOCK_SIZE), DraftSteps(ROWS, BLOCK_SIZE, "cpu")
    batches = [first, *(steps.batch(step, first.token_ids) for step in range(1, len(steps)))]
    found = runner.greedy_steps(batches, steps.source_idx, VOCAB_SIZE)
    return [GreedyTokens(step.token_ids.tolist(), step.logprobs.tolist()) for step in found], runner.kv_cache.layers


def test_what_a_larger_pass_has_left_in_the_buffers_is_in_no_smaller_one(model):
    """They are the thread's, for every pass of every model: here NaN, of more rows than come behind."""
    expected, layers = in_one_call(model)
    embedding = model.decoder.decoder.embedding
    honest = embedding.clone()
    embedding.fill_(float("nan"))
    runner = new_runner(model)
    rows = [RaggedRow([1] * 16, 0, [4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4], 16) for i in range(3)]
    assert runner.forward(pack(rows, BLOCK_SIZE)).logits.isnan().all()
    embedding.copy_(honest)
    found, layers_again = in_one_call(model)
    assert found == expected
    assert all(map(torch.equal, layers_again, layers))


def test_a_fast_pass_of_hundreds_of_rows_is_as_near_as_one_of_few(toy_path):
    """One kernel has them all: every row of a pass of 300 is bit for bit what it is in a pass of 30."""
    model = load_model(toy_path("llama"), dtype="float32", max_model_len=64, attention_backend="cpp", numerics="fast")
    rows = [RaggedRow(random_tokens(30, seed), 0, [8 * seed + i + 1 for i in range(8)], 30) for seed in range(10)]
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, 80, BLOCK_SIZE, model.dtype, "cpu"))
    together = runner.forward(pack(rows, BLOCK_SIZE)).logits
    for i, row in enumerate(rows):
        assert torch.equal(runner.forward(pack([row], BLOCK_SIZE)).logits, together[30 * i : 30 * i + 30])


def test_one_call_finds_what_single_passes_find(model):
    found, layers = in_one_call(model)
    expected, expected_layers = one_by_one(model)
    assert [len(step.token_ids) for step in found] == [3, 2, 1, 1]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    for ours, theirs in zip(layers, expected_layers, strict=True):
        assert torch.equal(ours, theirs)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_rows_of_all_kinds_find_what_each_finds_alone(model, seed):
    """Beside each other: prompts and single tokens, with logits of none, some or all tokens, that go on or do not."""
    rng = random.Random(seed)
    blocks, rows, further = rng.sample(range(1, 17), 16), [], []
    for i in range(rng.randint(1, 4)):
        own = [blocks.pop() for _ in range(rng.randint(1, 4))]
        room = len(own) * BLOCK_SIZE
        num_tokens = rng.randint(1, room)
        context_len = rng.randint(0, room - num_tokens)
        num_logits = rng.randint(0, num_tokens)
        rows.append(RaggedRow(random_tokens(num_tokens, seed + i), context_len, own, num_logits))
        further.append(rng.randint(0, room - num_tokens - context_len) if num_logits else 0)
    runner, alone = new_runner(model), new_runner(model)
    found = runner.greedy(rows, VOCAB_SIZE, further, wants_logprobs=True)
    expected = [
        alone.greedy([row], VOCAB_SIZE, [count], wants_logprobs=True) for row, count in zip(rows, further, strict=True)
    ]
    for step, of_step in enumerate(found):
        of_rows = [of_row[step] for of_row in expected if len(of_row) > step]
        assert of_step.token_ids == [token_id for of_row in of_rows for token_id in of_row.token_ids]
        assert of_step.logprobs == [logprob for of_row in of_rows for logprob in of_row.logprobs]
    for ours, theirs in zip(runner.kv_cache.layers, alone.kv_cache.layers, strict=True):
        assert torch.equal(ours, theirs)
    batch = pack(rows, BLOCK_SIZE)
    logits = new_runner(model).forward(batch).logits[:, :VOCAB_SIZE]
    assert found[0].token_ids == logits.argmax(dim=-1).tolist()
    assert found[0].on_host() == Argmax.of(logits).on_host()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    all_steps, _ = in_one_call(model)
    found, _ = in_one_call(model, rule)
    chances, rows, num_steps = [1.0] * 3, [0, 1, 2], 1
    for step, going_on in enumerate([[0, 2], [0], [0]]):
        for i, logprob in zip(rows, all_steps[step].logprobs, strict=True):
            chances[i] = rule.chance(chances[i], step, logits_of([logprob])[0], i)
        rows = going_on
        if not rule.goes_on([chances[i] for i in rows], rows):
            break
        num_steps += 1
    assert found == all_steps[:num_steps]


def test_log_probabilities_are_the_log_softmax_of_the_first_ids(model):
    logits = new_runner(model).forward(pack(ragged(ROWS), BLOCK_SIZE)).logits
    logprobs = logits[:, :VOCAB_SIZE].log_softmax(dim=-1).max(dim=-1)
    for found, _ in (in_one_call(model), one_by_one(model)):
        assert found[0].token_ids == logprobs.indices.tolist()
        assert found[0].logprobs == pytest.approx(logprobs.values.tolist(), abs=1e-5)
        # Of all ids they would be others.
        assert found[0].logprobs != pytest.approx(logits.log_softmax(dim=-1).amax(dim=-1).tolist(), abs=1e-5)
    assert new_runner(model).greedy(ragged(ROWS), VOCAB_SIZE)[0].logprobs == [0.0] * 3  # nobody wants them


def test_the_log_probability_of_a_row_with_a_nan_is_nan(toy_path):
    model = load_model(toy_path("llama"), max_model_len=64, attention_backend="cpp")
    with torch.no_grad():
        model.decoder.decoder.embedding[5] = float("nan")
    rows = [RaggedRow([4, 6], 0, [1], 1), RaggedRow([4, 5], 0, [2], 1)]
    for wants_logprobs in (True, False):
        (found,) = new_runner(model).greedy(rows, VOCAB_SIZE, wants_logprobs=wants_logprobs)
        assert found.on_host()[1] == [True, False]
    (drafted,) = new_runner(model).greedy_steps([pack(rows, BLOCK_SIZE)], [None], VOCAB_SIZE)
    assert drafted.logprobs.isnan().tolist() == [False, True]


@pytest.mark.parametrize("num_ids", [1, 7, 8, 75, 150, 157, 299, 300])
def test_of_equally_likely_ids_the_first_is_found(tmp_path, num_ids):
    """Every row of the output layer stands there four times, at different lanes and at the end."""
    twins = toys.model()
    with torch.no_grad():
        weight = twins.get_input_embeddings().weight
        weight.copy_(weight[:75].repeat(4, 1))
    twins.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), max_model_len=64, attention_backend="cpp")
    rows = [RaggedRow([i], 0, [1 + i], 1) for i in range(15)]
    (found,) = new_runner(model).greedy(rows, num_ids)
    logits = new_runner(model).forward(pack(rows, BLOCK_SIZE)).logits[:, :num_ids]
    first = [row.index(max(row)) for row in logits.tolist()]
    assert found.token_ids == first
    assert max(first) < 75
    assert len(set(first)) > 3 or num_ids < 75


def test_logits_that_a_family_changes_are_found_one_by_one(toy_path):
    """Soft-capping may make ties."""
    model = load_model(toy_path("gemma2"), max_model_len=64, attention_backend="cpp")
    assert not new_runner(model).runs_greedy


def test_a_cache_that_is_given_up_is_free_though_the_model_lives(model):
    runner = new_runner(model)
    runner.greedy(ragged(ROWS), VOCAB_SIZE)
    pool = weakref.ref(runner.kv_cache.layers[0])
    del runner
    gc.collect()
    assert pool() is None


def test_a_rule_has_as_much_of_everything(model):
    rule = StopRule(1.0, [0.0], [0.0] * 3, [1.0] * 2, 0.0, 0.0)
    with pytest.raises(ValueError, match="expected has 2 entries; allowed: 3"):
        new_runner(model).greedy(ragged(ROWS), VOCAB_SIZE, [1, 0, 1], stop_rule=rule)


def test_only_the_first_ids_are_found(model, monkeypatch):
    """An output layer may have rows beyond the vocabulary."""
    most = {token_id for step in in_one_call(model)[0] for token_id in step.token_ids}
    monkeypatch.setitem(globals(), "VOCAB_SIZE", min(most) + 1)
    assert max(max(step.token_ids) for step in in_one_call(model)[0]) <= min(most)

"""The model of what speculation holds, beside what engines really hold."""

from __future__ import annotations

import pytest

from specpaged import LLM, SamplingParams
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.drafting.draft_model import MOST_ROWS
from specpaged.planning.checkpoint_tensors import CheckpointTensors
from specpaged.planning.memory_model import DRAFT_ROWS, MemoryModel
from specpaged.planning.model_memory import ModelMemory
from tests import toys

MAX_MODEL_LEN = 160
K = 3


def model_of(target: str, draft: str, max_model_len: int = MAX_MODEL_LEN, **layout) -> MemoryModel:
    models = [ModelMemory.of(CheckpointTensors.read(path), max_model_len=max_model_len) for path in (target, draft)]
    return MemoryModel(*models, **layout)


def test_a_draft_runs_as_many_rows_in_a_pass_as_a_plan_has_it():
    assert DRAFT_ROWS == MOST_ROWS


def make_llm(pair: toys.Pair, speculative: dict | None = None, **arguments) -> LLM:
    config = {"model": pair.draft, "num_speculative_tokens": K} | (speculative or {})
    defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "num_scheduler_steps": 1}
    return LLM(pair.target, speculative_config=config, **(defaults | arguments))


@pytest.mark.parametrize("which", ["toys", "embedded"])
def test_weights_and_kv_are_those_of_loaded_models(toy_pair, which):
    pair = toy_pair if which == "toys" else toys.Pair(EMBEDDED_TARGET, EMBEDDED_DRAFT)
    engine = make_llm(pair).engine
    model = model_of(pair.target, pair.draft)
    for predicted, runner in ((model.target, engine.target), (model.draft, engine.draft)):
        assert predicted.weight_bytes == pytest.approx(runner.model.weight_bytes, rel=0.03)
        assert predicted.kv_bytes_per_token == runner.kv_cache.bytes_per_token
        assert predicted.num_parameters == runner.model.num_parameters
        assert predicted.architecture == runner.model.architecture
    assert model.null_blocks == 16 * (model.target.kv_bytes_per_token + model.draft.kv_bytes_per_token)


@pytest.mark.parametrize(
    ("speculative", "layout"),
    [
        ({}, {}),
        ({"kv_window": 64}, {"window": 64}),
        ({"kv_cache_memory_bytes": 60 * 16 * 512}, {"drafting_share": 0.99}),  # all of them, in a pool of their own
    ],
    ids=["shared", "window", "own pool"],
)
@pytest.mark.parametrize("block_size", [4, 16])
def test_an_engine_holds_what_the_model_says_in_every_step(toy_pair, speculative, layout, block_size):
    llm = make_llm(toy_pair, speculative, block_size=block_size)
    engine = llm.engine
    model = model_of(toy_pair.target, toy_pair.draft, block_size=block_size, **layout)
    for i, prompt in enumerate(toys.prompts(5, shortest=20, longest=70)):
        engine.add_request(str(i), prompt["prompt_token_ids"], SamplingParams(temperature=0, max_tokens=60))
    num_steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        sequences = engine.scheduler.running
        if not sequences or any(len(sequence.draft.token_ids) < K for sequence in sequences):
            continue  # near its end one has fewer drafts than it had slots for
        num_steps += 1
        of_target = engine.allocator.num_held * block_size * engine.target.kv_cache.bytes_per_token
        num_draft_blocks = engine.kv_layout.num_draft_held if layout else engine.allocator.num_held
        of_draft = num_draft_blocks * block_size * engine.draft.kv_cache.bytes_per_token
        said = [model.of_target(sequence.num_tokens, K).total for sequence in sequences]
        of_draft_said = [model.of_draft(sequence.num_tokens, K).total for sequence in sequences]
        assert sum(said) == of_target
        # A window is said as it is when it is full: it slides to half of that.
        assert of_draft <= sum(of_draft_said)
        assert layout.get("window") or sum(of_draft_said) == of_draft
        weights = engine.target.model.weight_bytes + engine.draft.model.weight_bytes
        held = weights + of_target + of_draft + model.null_blocks
        if not layout.get("window"):
            said_of_all = model.weight_bytes + model.null_blocks + sum(said) + sum(of_draft_said)
            assert said_of_all == pytest.approx(held, rel=0.03)
    assert num_steps > 5


@pytest.mark.parametrize("layout", [{}, {"window": 64}], ids=["shared", "window"])
def test_the_largest_batch_is_the_engines_to_within_one_sequence(toy_pair, layout):
    model = model_of(toy_pair.target, toy_pair.draft, max_num_batched_tokens=64, **layout)
    budget = model.num_bytes(5, MAX_MODEL_LEN - K, K) + 1000
    batch = model.largest_batch(budget, MAX_MODEL_LEN - K, K)
    assert batch == 5
    memory, own = model.kv_bytes(batch, MAX_MODEL_LEN - K, K)

    def preemptions(num_seqs: int) -> int:
        speculative = {"kv_window": layout["window"], "kv_cache_memory_bytes": own} if layout else {}
        llm = make_llm(
            toy_pair, speculative, kv_cache_memory_bytes=memory, max_num_seqs=num_seqs, max_num_batched_tokens=64
        )
        assert llm.report.num_full_sequences == batch
        pools = [runner.kv_cache.num_bytes for runner in (llm.engine.target, llm.engine.draft)]
        assert sum(pools) == memory + model.null_blocks
        prompts = toys.prompts(num_seqs, shortest=100, longest=100)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=MAX_MODEL_LEN - 100)
        llm.generate(prompts, params, use_tqdm=False)
        return llm.metrics.preemptions

    assert preemptions(batch) == 0
    assert preemptions(batch + 1) > 0


def test_sequences_that_do_not_draft_have_no_draft_kv_where_the_draft_has_its_own_pool(toy_pair):
    half, all_of_them = (model_of(toy_pair.target, toy_pair.draft, drafting_share=share) for share in (0.5, 0.9999))
    shared = model_of(toy_pair.target, toy_pair.draft)
    of_draft = half.of_draft(100, K).total
    assert all_of_them.num_bytes(8, 100, K) - half.num_bytes(8, 100, K) == 4 * of_draft
    assert shared.num_bytes(8, 100, K) == all_of_them.num_bytes(8, 100, K)
    assert half.kv_bytes(8, 100, K)[1] == 4 * of_draft
    assert shared.kv_bytes(8, 100, K)[1] == 0


def test_the_parts_of_a_pool_are_all_of_it(toy_pair):
    for layout in ({}, {"window": 64}, {"block_size": 4}):
        model = model_of(toy_pair.target, toy_pair.draft, **layout)
        for num_tokens in range(1, 200, 7):
            for k in range(9):
                target, draft = model.of_target(num_tokens, k), model.of_draft(num_tokens, k)
                assert min(target.slack, draft.slack, draft.committed) >= 0
                assert target.slack < model.block_size * model.target.kv_bytes_per_token
                assert target.unverified == k * model.target.kv_bytes_per_token
                assert draft.unverified == max(0, k - 1) * model.draft.kv_bytes_per_token


def test_what_a_config_lacks_is_named(tmp_path, toy_pair):
    checkpoint = CheckpointTensors.read(toy_pair.target)
    broken = CheckpointTensors(checkpoint.directory, {**checkpoint.config, "hidden_size": None}, checkpoint.tensors)
    with pytest.raises(ValueError, match=r"--model: config.json has hidden_size=None; allowed: an int >= 1"):
        ModelMemory.of(broken)
    with pytest.raises(ValueError, match=r"--draft-model='nobody/nothing' is no directory, nor in the hub's cache"):
        CheckpointTensors.read("nobody/nothing", "--draft-model")

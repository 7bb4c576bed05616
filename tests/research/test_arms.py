"""Arms in the engine: what comes out is the same with all of them."""

from __future__ import annotations

import pytest

from specpaged import SamplingParams
from specpaged.verification.base import VerifyOutput
from tests.poison import spoil_logits
from tests.research.engines import (
    DENSE,
    PAIRS,
    PROMPTS,
    check_attention_reads_the_tensor_that_is_realigned,
    make_llm,
    run,
)
from tests.research.world import World


@pytest.fixture(scope="module")
def expected(toy_pair):
    """By backend: of plain decoding, one sequence at a time."""
    return {
        backend: run(make_llm(toy_pair, "continuous", "truncate", k=0, max_num_seqs=1, attention_backend=backend))
        for backend in ("cpp", "torch")
    }


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize(("schedule", "rollback"), PAIRS)
def test_outputs_are_those_of_plain_decoding(toy_pair, expected, schedule, rollback, backend):
    llm = make_llm(toy_pair, schedule, rollback, attention_backend=backend)
    assert run(llm) == expected[backend]
    metrics = llm.metrics
    if rollback != "batch_min":  # which accepts what everybody accepts: see below
        assert metrics.accepted_tokens > 0
    if rollback in ("repad", "gather", "compact", "batch_min"):
        assert (metrics.rollback_bytes > 0) == (rollback != "batch_min")
        assert metrics.gathered_bytes == 0  # the tensor that is realigned is the one that attention reads
    elif rollback == "group":
        assert metrics.rollback_bytes == 0
        assert metrics.gathered_bytes > 0
        assert metrics.other_copied_bytes > 0
    else:
        assert metrics.rollback_bytes == metrics.other_copied_bytes == 0


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("rollback", ["repad", "gather", "compact", "batch_min", "group"])
def test_attention_reads_the_tensor_that_was_realigned(toy_pair, rollback, backend):
    check_attention_reads_the_tensor_that_is_realigned(
        make_llm(toy_pair, "eqspec", rollback, attention_backend=backend)
    )


def test_nan_of_one_request_stays_its_own(toy_pair, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompts = PROMPTS[:3]
    plain = make_llm(toy_pair, "continuous", "truncate", k=0)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
    for schedule, rollback in DENSE:
        llm = make_llm(toy_pair, schedule, rollback)
        engine = llm.engine

        def spoil(batch, logits, engine=engine):
            for sequence in engine.scheduler.running:
                if sequence.request_id == "1" and len(sequence.output_token_ids) >= 2 and sequence.page_table.blocks:
                    first = sequence.page_table.entries[0]
                    for rows, table in zip(logits.split(batch.num_logits), batch.page_table.tolist(), strict=True):
                        if table[0] == first:
                            rows.fill_(float("nan"))

        spoil_logits(engine.target, spoil, monkeypatch)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert "NaN" in outputs[1].error
        assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [expected[0], expected[2]]
        engine.check_integrity()


@pytest.mark.parametrize(("schedule", "rollback"), PAIRS)
def test_requests_can_be_aborted_at_any_moment(toy_pair, schedule, rollback):
    """Waiting, in the middle of a prefill, decoding; the others end as they would have."""
    llm = make_llm(toy_pair, schedule, rollback, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    for num_steps in range(8):
        for i, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(i), prompt["prompt_token_ids"], params)
        outputs = {}
        for step in range(200):
            if step == num_steps:
                for request_id in ("0", "2", "5"):
                    if llm.engine.abort_request(request_id) is not None:
                        outputs[int(request_id)] = None
                    llm.engine.check_integrity()
            outputs |= {int(output.request_id): output.outputs[0].token_ids for output in llm.engine.step()}
            llm.engine.check_integrity()
        assert {i: token_ids for i, token_ids in outputs.items() if token_ids} == {
            i: expected[i] for i, token_ids in outputs.items() if token_ids
        }
        assert len(outputs) == len(PROMPTS)
        assert llm.engine.allocator.num_held == 0


def test_batch_min_keeps_what_the_shortest_run_has():
    arm = World("batch_min", 1).kv_layout
    verified = VerifyOutput(
        token_ids=[[1, 2, 3], [4, 5], [6, 7, 8, 9], [5]],
        num_accepted=[2, 1, 3, 1],
        failed=[False, False, False, True],
        logprobs=[["a", "b", "c"], None, None, None],
    )
    assert arm.limit(verified) == VerifyOutput(
        token_ids=[[1, 2], [4, 5], [6, 7], [5]],
        num_accepted=[1, 1, 1, 1],
        failed=[False, False, False, True],
        logprobs=[["a", "b"], None, None, None],
    )
    shorter = VerifyOutput([[1], [4, 5]], [0, 2], [False, True], [None, None])
    assert arm.limit(shorter) == VerifyOutput([[1], [4]], [0, 0], [False, False], [None, None])
    alone = VerifyOutput([[]], [0], [True], [None])
    assert arm.limit(alone) == alone


@pytest.mark.parametrize("schedule", ["continuous", "eqspec"])
def test_batch_min_accepts_what_all_rows_accept(toy_pair, schedule):
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    alone, together = (make_llm(toy_pair, schedule, "batch_min", max_num_batched_tokens=256) for _ in range(2))
    alone.generate(PROMPTS[:1], params, use_tqdm=False)
    together.generate(PROMPTS[:1] * 3, params, use_tqdm=False)
    assert alone.metrics.accepted_tokens > 0
    assert together.metrics.accepted_tokens == 3 * alone.metrics.accepted_tokens
    assert together.metrics.rounds == alone.metrics.rounds


def test_without_drafts_moves_are_of_those_who_join_alone(toy_pair):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = make_llm(toy_pair, "eqspec", "repad", k=0, max_num_batched_tokens=256)
    alone.generate(PROMPTS[:3], params, use_tqdm=False)
    assert alone.metrics.rollback_bytes == alone.metrics.other_copied_bytes == 0
    joined = make_llm(toy_pair, "continuous", "repad", k=0)
    joined.generate(PROMPTS, params, use_tqdm=False)
    assert joined.metrics.rollback_bytes == 0
    assert joined.metrics.other_copied_bytes > 0


@pytest.mark.parametrize(("schedule", "rollback"), PAIRS)
def test_metrics_that_begin_anew_count_the_same_work_again(toy_pair, schedule, rollback):
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    llm = make_llm(toy_pair, schedule, rollback, attention_backend="torch")
    counted = []
    for _ in range(2):
        llm.engine.reset_metrics()
        llm.generate(PROMPTS, params, use_tqdm=False)
        counted.append({name: value for name, value in llm.metrics.as_dict().items() if "seconds" not in name})
    assert counted[0] == counted[1]


@pytest.mark.parametrize(("schedule", "rollback"), DENSE)
def test_a_prompt_of_one_token_whose_drafts_spoil_it_is_run_again(toy_pair, schedule, rollback, monkeypatch):
    """One token of it has KV then: the shortest context that there is."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompts = [{"prompt_token_ids": [7]}, *PROMPTS[:2]]
    plain = make_llm(toy_pair, "continuous", "truncate", k=0)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
    llm = make_llm(toy_pair, schedule, rollback, max_num_batched_tokens=256)
    lengths = []

    def spoil(batch, logits):
        for rows, context_len, length in zip(
            logits.split(batch.num_logits), batch.context_lens_host, batch.query_lens, strict=True
        ):
            if context_len == 1 and length == len(rows) > 1:  # behind the one-token prompt, with drafts
                rows.fill_(float("nan"))
                lengths.append(length)

    spoil_logits(llm.engine.target, spoil, monkeypatch)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert lengths == [4]  # and drafts no more
    llm.engine.check_integrity()

"""Logits that hold NaN: vLLM cannot fail a single request, and its batch mates are not to notice."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm.sampling_params import StructuredOutputsParams  # noqa: E402

from specpaged.drafting.base import DraftOutput  # noqa: E402
from specpaged.engine.step import ScoredStep, SpeculativeStep  # noqa: E402
from specpaged.engine.target_pass import TargetPass  # noqa: E402
from specpaged.verification.base import VerifyOutput  # noqa: E402
from specpaged.vllm_plugin.model_runner import SpecPagedModelRunner  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, model_runner, token_ids  # noqa: E402
from tests.vllm_plugin.test_sequences import make_sequences, new, step  # noqa: E402

SPOILT = 3  # of PROMPTS
GREEDY = {"temperature": 0, "max_tokens": 24}


def spoil(monkeypatch, with_drafts_only, forbidden=()):
    """NaN in the rows of request SPOILT, from its sixth output token on."""

    run_target = SpeculativeStep._run_target

    def spoilt(step, entries, argmax):
        logits, *others = run_target(step, entries, argmax=False)
        start = 0
        for entry in (entry for entry in entries if entry.samples):
            sequence, draft, end = entry.sequence, entry.draft, start + entry.num_draft_tokens + 1
            spoils = sequence.prompt_token_ids == spoilt.prompt and len(sequence.output_token_ids) >= 5
            if spoils and (draft or not with_drafts_only):
                logits[start:end] = float("nan")
                spoilt.count += 1
            elif spoils:
                logits[start:end, list(forbidden)] += 1e3  # what a grammar rules out, and would be chosen without it
            start = end
        return TargetPass(logits, *others)

    spoilt.prompt, spoilt.count = None, 0
    monkeypatch.setattr(SpeculativeStep, "_run_target", spoilt)
    return spoilt


@pytest.mark.parametrize(("params", "made_up"), [({"stop_token_ids": [6]}, 6), ({}, 0)])
@pytest.mark.parametrize("accepted", [[], [8, 9]], ids=str)
def test_a_made_up_token_comes_behind_what_stands_and_ends_the_request_if_any_token_does(params, made_up, accepted):
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(20), [1, 2], **params)], counts={"A": 20})
    scored = ScoredStep([entry], DraftOutput.of([entry.draft]), None, None, {}, {})
    verified = VerifyOutput([accepted], [len(accepted)], [True], [None])
    runner = SpecPagedModelRunner(None, sequences)
    completed, num_nans = runner._without_failures(scored, verified)
    assert completed.token_ids == [[*accepted, made_up]]
    assert completed.num_accepted == [len(accepted)]
    assert num_nans == {"A": 1}


def generate(llm, params):
    return llm.generate(PROMPTS, vllm.SamplingParams(**params), use_tqdm=False)


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True},
        {"ignore_eos": True, "temperature": 0.8, "seed": 5, "logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]{18}")},
    ],
    ids=["greedy", "sampled", "under a grammar"],
)
def test_what_only_drafts_spoil_comes_out_as_without_them(make_vllm, monkeypatch, params):
    params = GREEDY | params
    expected = generate(make_vllm(0), params)
    llm = make_vllm(4)
    forbidden = llm.get_tokenizer().encode("z", add_special_tokens=False) if "structured_outputs" in params else ()
    monkeypatch.setattr(model_runner(llm).speculative_step, "reserve_rounds", None)  # by the verifier
    spoilt = spoil(monkeypatch, with_drafts_only=True, forbidden=forbidden)
    spoilt.prompt = list(expected[SPOILT].prompt_token_ids)
    outputs = generate(llm, params)
    assert token_ids(outputs) == token_ids(expected)
    for ours, plain in zip(outputs, expected, strict=True):
        assert ours.outputs[0].logprobs == plain.outputs[0].logprobs
    assert spoilt.count == 1  # it drafts no more
    check_nothing_is_held(llm)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_request_that_has_no_token_ends_and_its_mates_do_not_notice(make_vllm, monkeypatch, k, logprobs):
    params = GREEDY | {"logprobs": logprobs}
    expected = generate(make_vllm(0), params)
    llm, spoilt = make_vllm(k), spoil(monkeypatch, with_drafts_only=False)
    monkeypatch.setattr(model_runner(llm).speculative_step, "reserve_rounds", None)  # by the verifier
    spoilt.prompt = list(expected[SPOILT].prompt_token_ids)
    outputs = generate(llm, params)
    spoilt_output, spoilt_plain = outputs.pop(SPOILT).outputs[0], expected.pop(SPOILT).outputs[0]
    assert token_ids(outputs) == token_ids(expected)
    assert spoilt_output.finish_reason == "stop"
    *before, last = spoilt_output.token_ids
    assert before == list(spoilt_plain.token_ids)[: len(before)]
    assert 5 <= len(before) <= 5 + k
    assert last == llm.get_tokenizer().eos_token_id
    generate(llm, GREEDY | {"max_tokens": 1})
    check_nothing_is_held(llm)


def test_prompt_log_probabilities_that_fail_are_missing_and_nothing_else_is(make_vllm, monkeypatch):
    """vLLM has the verified token already: the sequence has to have it, too."""
    llm = make_vllm(3)
    params = [vllm.SamplingParams(**GREEDY, prompt_logprobs=1), vllm.SamplingParams(**GREEDY)]
    expected = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    monkeypatch.setattr("specpaged.engine.step.record_prompt_logprobs", lambda *_: [].pop())
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert token_ids(outputs) == token_ids(expected)
    assert expected[0].prompt_logprobs is not None
    assert outputs[0].prompt_logprobs == [None]
    check_nothing_is_held(llm)

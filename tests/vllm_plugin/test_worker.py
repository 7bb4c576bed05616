"""vLLM with our worker: a request cannot tell, from its tokens, how it was run."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from transformers import AutoConfig  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

import specpaged  # noqa: E402
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET  # noqa: E402
from specpaged.testing.heads import write_clover, write_eagle3  # noqa: E402
from tests.vllm_plugin.serving import PROMPTS, check_nothing_is_held, core, model_runner, token_ids  # noqa: E402

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
GREEDY = {"temperature": 0, "max_tokens": 40}


def generate(llm, **params):
    return llm.generate(PROMPTS, vllm.SamplingParams(**(GREEDY | params)), use_tqdm=False)


@pytest.fixture(scope="module")
def standalone():
    """What the project's own engine puts out, and what it decodes without drafts."""
    engines = [
        specpaged.LLM(max_model_len=512, max_num_seqs=8),
        specpaged.LLM(max_model_len=512, max_num_seqs=8, speculative_config={"num_speculative_tokens": 0}),
    ]
    params = specpaged.SamplingParams(**GREEDY)
    speculative, plain = (
        [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)] for llm in engines
    )
    assert speculative == plain
    return plain


@pytest.mark.parametrize(
    ("k", "arguments"),
    [
        (0, {}),
        (1, {}),
        (4, {}),
        (7, {}),
        (4, {"block_size": 64}),
        (4, {"max_num_batched_tokens": 64}),
        (4, {"max_num_seqs": 1}),
        (0, {"speculative_config": NGRAM}),
        (4, {"scheduling_policy": "priority"}),
    ],
    ids=str,
)
def test_outputs_are_those_of_the_projects_own_engine(make_vllm, standalone, k, arguments):
    llm = make_vllm(k, **arguments)
    assert token_ids(generate(llm)) == standalone
    generate(llm, max_tokens=1)  # a step later what has ended is forgotten
    check_nothing_is_held(llm)
    assert len(model_runner(llm).sequences) <= 8


def test_suffix_decoding_is_ours_and_changes_no_output(make_vllm, standalone, monkeypatch):
    """vLLM itself asks whether a package is there, which its own drafter needs."""
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
    suffix = {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_spec_factor": 2.0}
    fixed = {"specpaged": {"adaptive": False}}
    llm = make_vllm(0, speculative_config=suffix, max_num_seqs=2, additional_config=fixed)
    drafter = model_runner(llm).speculative_step.drafter
    for _ in range(2):
        assert token_ids(generate(llm)) == standalone
    assert model_runner(llm).speculative_step.metrics.accepted_tokens > 20  # those of the outputs before, at least
    generate(llm, max_tokens=1)
    check_nothing_is_held(llm)
    assert drafter.in_rounds.num_sequences <= 2
    assert drafter.in_rounds.max_factor == 2.0


@pytest.mark.parametrize("adaptive", [False, True])
def test_lookups_draft_beside_the_draft_model_and_change_no_output(make_vllm, standalone, adaptive):
    options = {"specpaged": {"adaptive": adaptive, "lookups": "suffix,ngram"}}
    llm = make_vllm(5, additional_config=options, max_num_batched_tokens=64, enable_prefix_caching=True)
    step, numbers = model_runner(llm).speculative_step, set()
    propose = step.drafter.propose

    def watch(*arguments):
        drafts = propose(*arguments)
        numbers.update(draft.drafter for draft in drafts if draft)
        return drafts

    step.drafter.propose = watch
    for _ in range(2):
        assert token_ids(generate(llm)) == standalone
        assert step.metrics.failed_proposals == 0
    assert adaptive or (0 in numbers and len(numbers) > 1)
    generate(llm, max_tokens=1)
    check_nothing_is_held(llm)
    assert all(lookup.in_rounds.num_sequences <= 8 for lookup in step.drafter.lookups)


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_heads_are_ours_and_change_no_output(make_vllm, standalone, tmp_path, method):
    """Through chunks of prompts and hits in the prefix cache. Of Clover vLLM knows nothing."""
    config = AutoConfig.from_pretrained(EMBEDDED_TARGET)
    if method == "eagle3":
        speculative = {"method": method, "model": str(write_eagle3(tmp_path, config, draft_vocab_size=100))}
    else:
        speculative = {"method": "custom_class", "model": f"clover:{write_clover(tmp_path, config)}"}
    speculative["num_speculative_tokens"] = 3
    fixed = {"specpaged": {"adaptive": False, "draft_numerics": "exact"}}
    llm = make_vllm(
        speculative_config=speculative, additional_config=fixed, max_num_batched_tokens=64, enable_prefix_caching=True
    )
    step = model_runner(llm).speculative_step
    for _ in range(2):
        assert token_ids(generate(llm)) == standalone
        assert step.metrics.failed_proposals == 0
        assert step.metrics.draft_tokens > 100
    generate(llm, max_tokens=1)
    check_nothing_is_held(llm)


@pytest.fixture
def preempted(monkeypatch):
    """Ids of the requests that vLLM has preempted, one for each time."""
    request_ids, preempt = [], Scheduler._preempt_request

    def counting(self, request, *arguments, **options):
        request_ids.append(request.request_id)
        return preempt(self, request, *arguments, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    return request_ids


@pytest.mark.parametrize("k", [0, 4])
def test_a_preempted_request_comes_out_the_same(make_vllm, standalone, preempted, k):
    llm = make_vllm(k, num_gpu_blocks_override=36)
    assert token_ids(generate(llm)) == standalone
    assert preempted
    check_nothing_is_held(llm)


def test_the_drafter_forgets_each_request_that_ends_or_is_preempted(make_vllm, preempted, monkeypatch):
    llm = make_vllm(4, num_gpu_blocks_override=36)
    drafter = model_runner(llm).speculative_step.drafter
    propose, seen, known, num_forgotten = drafter.propose, set(), set(), Counter()

    def noting(rows, sampling, stop_rule=None):
        for row in rows:
            seen.add(row.sequence.request_id)
            known.add(row.sequence.request_id)
        return propose(rows, sampling)

    def forget(sequence):
        num_forgotten[sequence.request_id] += sequence.request_id in known
        known.discard(sequence.request_id)

    monkeypatch.setattr(drafter, "propose", noting)
    monkeypatch.setattr(drafter, "forget", forget)
    generate(llm)
    ids = set(seen)
    generate(llm, max_tokens=1)  # a step later what has ended is forgotten
    assert preempted
    assert not ids & known
    assert {i: num_forgotten[i] for i in ids} == {i: 1 + preempted.count(i) for i in ids}


@pytest.mark.parametrize("k", [0, 4])
def test_cached_prefixes_change_nothing(make_vllm, standalone, k):
    llm = make_vllm(k, enable_prefix_caching=True)
    first, second = generate(llm), generate(llm)
    assert token_ids(first) == token_ids(second) == standalone
    assert sum(output.num_cached_tokens for output in second) > sum(output.num_cached_tokens for output in first)


def test_the_scheduler_is_given_each_requests_own_drafts(make_vllm, monkeypatch):
    """Else it would have other ones verified, which is no error: only of no use."""
    llm = make_vllm(4)
    runner = model_runner(llm)
    take_drafts, num_drafts = runner.take_drafts, 0

    def noting():
        nonlocal num_drafts
        taken = take_drafts()
        given = dict(zip(taken.req_ids, taken.draft_token_ids, strict=True))
        own = {sequence.request_id: list(sequence.draft.token_ids) for sequence in runner.sequences}
        assert {request_id: given.get(request_id, []) for request_id in own} == own
        num_drafts += sum(map(bool, given.values()))
        return taken

    monkeypatch.setattr(runner, "take_drafts", noting)
    generate(llm)
    assert num_drafts > 20


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.0, "seed": 3, "n": 2, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 0.9, "seed": 7, "bad_words": ["the", "of"], "min_tokens": 12},
        {"temperature": 0.9, "seed": 7, "allowed_token_ids": list(range(5, 200))},
        {"stop": ["e "], "min_tokens": 3},
        {"stop_token_ids": [101, 110], "min_tokens": 4},
        {"max_tokens": 1},
        {"max_tokens": 600, "ignore_eos": True},  # up to max_model_len
    ],
    ids=str,
)
def test_speculation_does_not_show_in_what_is_sampled(make_vllm, params):
    plain, speculative = generate(make_vllm(0), **params), generate(make_vllm(4), **params)
    assert token_ids(speculative) == token_ids(plain)
    for ours, theirs in zip(speculative, plain, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)


def test_a_request_chooses_how_many_tokens_are_drafted(make_vllm, standalone):
    llm = make_vllm(4)
    params = [
        vllm.SamplingParams(**GREEDY, extra_args=None if i % 3 == 0 else {"num_speculative_tokens": i % 3 * 2 - 2})
        for i in range(len(PROMPTS))
    ]
    assert token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == standalone


@pytest.mark.parametrize(
    ("k", "arguments"),
    [
        (0, {}),
        (4, {}),
        (4, {"max_num_batched_tokens": 16, "max_num_seqs": 4}),  # chunks end anywhere in a prompt
        (4, {"num_gpu_blocks_override": 36}),
        (4, {"enable_prefix_caching": True}),
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_the_projects_own_engine(make_vllm, k, arguments):
    params = {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 12}
    plain = specpaged.LLM(max_model_len=512, max_num_seqs=8, speculative_config={"num_speculative_tokens": 0})
    expected = plain.generate(PROMPTS, specpaged.SamplingParams(**params), use_tqdm=False)
    for output, other in zip(generate(make_vllm(k, **arguments), **params), expected, strict=True):
        assert entries(output.outputs[0].logprobs) == entries(other.outputs[0].logprobs)
        assert entries(output.prompt_logprobs) == entries(other.prompt_logprobs)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for token_id, of_token in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            assert of_token[token_id].rank == 1
            assert len(of_token) == 2


def entries(logprobs):
    """As plain values; None stands where a prompt begins."""
    return [row and {token_id: (value.logprob, value.rank) for token_id, value in row.items()} for row in logprobs]


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("length", [2, 17])
def test_a_prompt_whose_last_chunk_is_one_token_has_its_log_probabilities(make_vllm, k, length):
    """The chunk before it knows them all, and puts out nothing that they could come with."""
    prompt = {"prompt_token_ids": list(range(5, 5 + length))}
    params = vllm.SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
    budget = length - 1 if k == 0 else length  # of which vLLM keeps a token for drafts
    llm = make_vllm(k, max_num_batched_tokens=budget, max_num_seqs=1, max_model_len=64)
    chunked, whole = (e.generate([prompt], params, use_tqdm=False)[0] for e in (llm, make_vllm(k)))
    assert entries(chunked.prompt_logprobs) == entries(whole.prompt_logprobs)
    assert len(chunked.prompt_logprobs) == length
    assert token_ids([chunked]) == token_ids([whole])


def test_how_many_tokens_are_drafted_may_hang_on_the_batch_size(make_vllm, standalone):
    draft = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
    ranges = [[1, 2, 4], [3, 5, 1], [6, 8, 0]]
    llm = make_vllm(0, speculative_config=draft | {"num_speculative_tokens_per_batch_size": ranges})
    lengths, take_drafts = set(), model_runner(llm).take_drafts

    def noting():
        drafts = take_drafts()
        lengths.update((len(drafts.req_ids), len(token_ids)) for token_ids in drafts.draft_token_ids if token_ids)
        return drafts

    model_runner(llm).take_drafts = noting
    params = [vllm.SamplingParams(temperature=0, max_tokens=4 * i) for i in range(1, len(PROMPTS) + 1)]
    params = [*params[:-3], *[vllm.SamplingParams(**GREEDY)] * 3]
    outputs = token_ids(llm.generate(PROMPTS, params, use_tqdm=False))
    assert outputs == [ids[: p.max_tokens] for ids, p in zip(standalone, params, strict=True)]
    assert any(k == 4 for count, k in lengths if count <= 2)
    assert any(k == 1 for count, k in lengths if count > 2)
    assert max(count for count, _ in lengths) <= 5
    check_nothing_is_held(llm)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_structured_output_is_valid_and_the_same_with_and_without_drafts(make_vllm, k, temperature):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
        "additionalProperties": False,
    }
    compact = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    params = {"structured_outputs": StructuredOutputsParams(json=schema), "temperature": temperature, "seed": 9}
    outputs = generate(make_vllm(k, **compact), logprobs=1, max_tokens=60, **params)
    plain = generate(make_vllm(0, **compact), max_tokens=60, **params)
    assert token_ids(outputs) == token_ids(plain)
    for output in outputs:
        found = json.loads(output.outputs[0].text)
        assert set(found) == {"name", "on"}
        assert re.fullmatch("[a-z]{1,8}", found["name"])
        assert all(value.logprob > float("-inf") for row in output.outputs[0].logprobs for value in row.values())


def test_running_requests_that_lose_the_prefix_cache_come_out_the_same(make_vllm, standalone):
    llm = make_vllm(4, enable_prefix_caching=True)
    engine = llm.llm_engine
    params = vllm.SamplingParams(**GREEDY)
    ids = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps in (3, 9):
            core(llm).reset_prefix_cache(reset_running_requests=True)
    assert len(ids) == len(finished)
    assert token_ids(finished[str(i)] for i in range(len(PROMPTS))) == standalone
    check_nothing_is_held(llm)

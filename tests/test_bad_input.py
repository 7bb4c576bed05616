"""Promise P5: bad input gets an error that names the argument, its value and what is allowed, before any work is done;
the other requests of a batch go on, and no block stays behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import specpaged.engine.kv_memory
import specpaged.modeling.pair
from specpaged import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from specpaged.engine.engine import Engine
from tests import toys

MAX_MODEL_LEN = 64
VOCAB = f"[0, {toys.VOCAB_SIZE})"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
GOOD = SamplingParams(**GREEDY)


def make_llm(pair, speculative=None, **arguments):
    config = {"model": pair.draft, "num_speculative_tokens": 5} | (speculative or {})
    return LLM(
        pair.target, speculative_config=config, **({"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4} | arguments)
    )


@pytest.fixture(scope="module")
def llm(toy_pair):
    return make_llm(toy_pair, num_scheduler_steps=1)


@pytest.fixture(scope="module")
def text_llm(tokenizer_pair):
    return make_llm(tokenizer_pair)


def ids(*token_ids):
    return {"prompt_token_ids": list(token_ids)}


def assert_idle(llm):
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished_requests
    assert not llm.engine.requests
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks


def params(**overrides):
    return SamplingParams(**(GREEDY | overrides))


# (bad prompt, bad params, what the error says); text prompts run on the pair with a tokenizer, or without ("no text").
BAD_REQUESTS = {
    "empty text": ("", GOOD, "prompt is empty; allowed: at least one token"),
    "empty ids": (ids(), GOOD, "prompt is empty; allowed: at least one token"),
    "as long as the model": (ids(*[5] * 64), GOOD, "prompt has 64 tokens; allowed: fewer than max_model_len=64"),
    "longer than the model": (ids(*[5] * 200), GOOD, "prompt has 200 tokens; allowed: fewer than max_model_len=64"),
    "long text": ("the fox " * 99, GOOD, "tokens; allowed: fewer than max_model_len=64"),
    "negative id": (ids(5, -1), GOOD, f"prompt_token_ids[1]=-1 is out of range; allowed: ints in {VOCAB}"),
    "id of no token": (ids(300), GOOD, f"prompt_token_ids[0]=300 is out of range; allowed: ints in {VOCAB}"),
    "huge id": (ids(5, 5, 2**70), GOOD, f"prompt_token_ids[2]={2**70} is out of range; allowed: ints in {VOCAB}"),
    "bool id": (ids(True), GOOD, f"prompt_token_ids[0]=True is out of range; allowed: ints in {VOCAB}"),
    "float id": (ids(5, 3.0), GOOD, f"prompt_token_ids[1]=3.0 is out of range; allowed: ints in {VOCAB}"),
    "string id": (ids("5"), GOOD, f"prompt_token_ids[0]='5' is out of range; allowed: ints in {VOCAB}"),
    "no id": (ids(None), GOOD, f"prompt_token_ids[0]=None is out of range; allowed: ints in {VOCAB}"),
    "ids that are no list": ({"prompt_token_ids": 5}, GOOD, "prompt_token_ids='5' must be a list of ints"),
    "ids that are text": ({"prompt_token_ids": "abc"}, GOOD, "prompt_token_ids='abc' must be a list of ints"),
    "ids that are none": ({"prompt_token_ids": None}, GOOD, "prompt_token_ids='None' must be a list of ints"),
    "ids that are a tensor": ({"prompt_token_ids": torch.tensor([5])}, GOOD, "must be a list of ints"),
    "int prompt": (5, GOOD, "prompt=5 must be a string or {'prompt_token_ids': [...]}"),
    "none prompt": (None, GOOD, "prompt=None must be a string or {'prompt_token_ids': [...]}"),
    "other dict": ({"prompt": "x"}, GOOD, "prompt={'prompt': 'x'} must be a string or {'prompt_token_ids': [...]}"),
    "unknown key": (
        {"prompt_token_ids": [1, 2], "multi_modal_data": 5},
        GOOD,
        "prompt has a key 'multi_modal_data'; allowed: 'prompt_token_ids'",
    ),
    "broken text": ("a\ud800", GOOD, "prompt='a\\ud800' has a lone surrogate at 1; allowed: text that UTF-8 can write"),
    "no text": ("the fox", GOOD, "prompt='the fox' is text, but model="),
    "no params": (ids(5), None, "params=None must be a SamplingParams"),
    "params as a dict": (ids(5), {"temperature": 0}, "params={'temperature': 0} must be a SamplingParams"),
    "K above the engine's": (
        ids(5),
        params(extra_args={"num_speculative_tokens": 6}),
        "extra_args['num_speculative_tokens']=6 is more than the engine drafts; allowed: 0 to 5",
    ),
    "bias of no token": (ids(5), params(logit_bias={300: 1.0}), "logit_bias has token ids [300] out of range"),
    "allowed is no token": (ids(5), params(allowed_token_ids=[5, 999]), "allowed_token_ids has token ids [999]"),
    "stop is no token": (ids(5), params(stop_token_ids=[300]), "stop_token_ids has token ids [300] out of range"),
    "no text: stop": (
        ids(5),
        params(stop=["x"]),
        "stop=('x',) is not allowed: stop must be empty: there is no tokenizer",
    ),
    "no text: bad word": (ids(5), params(bad_words=["x"]), "bad_words=('x',) is not allowed: bad_words must be empty"),
    "blank bad word": (ids(5), params(bad_words=[" "]), "bad_words=' ' is not allowed: bad_words must be"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_its_batch_mates_complete(llm, text_llm, name):
    prompt, bad_params, message = BAD_REQUESTS[name]
    engine = llm if name.startswith("no text") else text_llm
    steps, prompt_tokens = engine.metrics.steps, engine.metrics.prompt_tokens
    with pytest.raises(ValueError) as refused:
        engine.generate([prompt], [bad_params], use_tqdm=False)
    assert message in str(refused.value)
    assert (engine.metrics.steps, engine.metrics.prompt_tokens) == (steps, prompt_tokens)
    assert_idle(engine)

    prompts = toys.prompts(4)
    expected = [engine.generate(p, GOOD, use_tqdm=False)[0].outputs for p in prompts]
    prompts.insert(2, prompt)
    outputs = engine.generate(prompts, [GOOD, GOOD, bad_params, GOOD, GOOD], use_tqdm=False)
    bad = outputs.pop(2)
    assert (bad.error, bad.outputs, bad.finished) == (str(refused.value), [], True)
    assert [output.error for output in outputs] == [None] * 4
    assert [o.outputs[0].token_ids for o in outputs] == [e[0].token_ids for e in expected]
    assert_idle(engine)


def test_the_longest_prompt_is_one_token_short_of_the_model(llm):
    [output] = llm.generate(ids(*[5] * (MAX_MODEL_LEN - 1)), GOOD, use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
    assert_idle(llm)


def test_a_batch_of_bad_requests_alone_comes_back(llm):
    outputs = llm.generate([ids(), ids(-1)], GOOD, use_tqdm=False)
    assert ["empty" in outputs[0].error, "-1" in outputs[1].error] == [True, True]
    assert llm.generate([], GOOD, use_tqdm=False) == []
    assert_idle(llm)


def test_an_engine_without_a_draft_refuses_to_draft(toy_pair):
    plain = LLM(toy_pair.target, max_model_len=MAX_MODEL_LEN, max_num_seqs=2)
    one, none = (params(extra_args={"num_speculative_tokens": k}) for k in (1, 0))
    with pytest.raises(
        ValueError, match=r"extra_args\['num_speculative_tokens'\]=1 .*allowed: 0, as this engine has no"
    ):
        plain.generate(ids(5), one, use_tqdm=False)
    assert plain.generate(ids(5), none, use_tqdm=False)[0].error is None


def test_greedy_verification_refuses_temperature(toy_pair):
    llm = make_llm(toy_pair, {"verification": "greedy"})
    with pytest.raises(
        ValueError, match=r"temperature=0.5 needs .*'coupled' or 'rejection'; 'greedy' allows temperature 0"
    ):
        llm.generate(ids(5), params(temperature=0.5), use_tqdm=False)
    assert llm.generate(ids(5), GOOD, use_tqdm=False)[0].error is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens=0 is not allowed: max_tokens must be None or an int >= 1"),
        ({"max_tokens": -5}, r"max_tokens=-5 is not allowed: max_tokens must be None or an int >= 1"),
        ({"max_tokens": 2.0}, r"max_tokens=2.0 is not allowed"),
        ({"extra_args": {"num_speculative_tokens": -1}}, r"extra_args\['num_speculative_tokens'\]=-1 .* an int >= 0"),
        (
            {"extra_args": {"num_speculative_tokens": True}},
            r"extra_args\['num_speculative_tokens'\]=True .* an int >= 0",
        ),
        ({"extra_args": {"k": 3}}, r"extra_args has the key 'k' \(value 3\); supported: num_speculative_tokens"),
        ({"n": 10**6}, r"n=1000000 is not allowed: n must be an int from 1 to 16384"),
        ({"stop": 5.0}, r"stop=5.0 is not allowed: stop must be a list or None"),
        ({"stop": [["a"]]}, r"stop=\[\['a'\]\] is not allowed"),
        ({"stop_token_ids": 2.5}, r"stop_token_ids=2.5 is not allowed"),
        ({"stop_token_ids": [[1]]}, r"stop_token_ids=\[\[1\]\] is not allowed"),
        ({"allowed_token_ids": 1.5}, r"allowed_token_ids=1.5 is not allowed"),
        ({"bad_words": [{}]}, r"bad_words=\[\{\}\] is not allowed"),
        ({"best_of": 2}, r"best_of=2: SamplingParams does not support 'best_of'; supported: n, "),
    ],
)
def test_bad_sampling_parameters_cannot_be_made(overrides, message):
    with pytest.raises(ValueError, match=message):
        params(**overrides)


@pytest.mark.parametrize(
    ("prompts", "sampling_params", "message"),
    [
        (
            [ids(5)] * 3,
            [GOOD] * 2,
            r"sampling_params has 2 entries for 3 prompts; allowed: one SamplingParams, or a list",
        ),
        (ids(5), [], r"sampling_params has 0 entries for 1 prompts"),
        (ids(5), [GOOD] * 2, r"sampling_params has 2 entries for 1 prompts"),
        (ids(5), 7, r"sampling_params=7 must be a SamplingParams or a list of them"),
        (ids(5), {"temperature": 0}, r"sampling_params=\{'temperature': 0\} must be a SamplingParams or a list"),
        (5, GOOD, r"prompts=5 must be a string, \{'prompt_token_ids': \[...\]\}, or a list of these"),
        (b"abc", GOOD, r"prompts=b'abc' must be a string"),
        ((p for p in ["a"]), GOOD, r"prompts=<generator .* must be a string"),
    ],
)
def test_bad_lists_are_refused_before_any_request_is_queued(llm, prompts, sampling_params, message):
    seen = llm.metrics.prompt_tokens
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, sampling_params, use_tqdm=False)
    assert llm.metrics.prompt_tokens == seen
    assert_idle(llm)


def test_a_duplicate_request_id_is_refused_and_the_first_one_goes_on(llm):
    engine, prompt = llm.engine, toys.prompts(1)[0]["prompt_token_ids"]
    [expected] = llm.generate(ids(*prompt), GOOD, use_tqdm=False)
    engine.add_request("twin", prompt, GOOD)
    for _ in range(3):
        with pytest.raises(ValueError, match="request_id='twin' is in use; allowed: an id that no running request has"):
            engine.add_request("twin", [5, 6], GOOD)
        engine.step()
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert [output.outputs[0].token_ids for output in outputs] == [expected.outputs[0].token_ids]
    engine.add_request("twin", [5, 6], GOOD)  # it is free again
    assert engine.abort_request("twin").request_id == "twin"
    assert_idle(llm)


def test_what_breaks_while_requests_are_queued_leaves_none_behind(llm):
    class Trap(dict):
        def get(self, *_):
            raise RuntimeError("a fault of the caller's")

    with pytest.raises(RuntimeError, match="a fault of the caller's"):
        llm.generate([ids(5), ids(6), Trap(ids(7))], GOOD, use_tqdm=False)
    assert_idle(llm)


def test_what_breaks_while_requests_run_leaves_none_behind(llm, monkeypatch):
    step = Engine.step

    def interrupted(self):
        if self.metrics.steps > start + 2:
            raise KeyboardInterrupt
        return step(self)

    start = llm.metrics.steps
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(toys.prompts(6), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert_idle(llm)


# Engines that cannot be had. `no_models` holds for what can be refused before a checkpoint is opened.


@pytest.fixture
def no_models(monkeypatch):
    def load_model(*_args, **_kwargs):
        raise AssertionError("a checkpoint is opened before the arguments are checked")

    monkeypatch.setattr(specpaged.modeling.pair, "load_model", load_model)


TABLE = "speculative_config['num_speculative_tokens_per_batch_size']"
K = "speculative_config['num_speculative_tokens']"


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"num_speculative_tokens": -1}, f"{K}=-1 must be an int >= 0"),
        ({"num_speculative_tokens": 2.0}, f"{K}=2.0 must be an int >= 0"),
        ({"num_speculative_tokens": True}, f"{K}=True must be an int >= 0"),
        ({"num_speculative_tokens": "5"}, f"{K}='5' must be an int >= 0"),
        (
            {"max_num_speculative_tokens": 4},
            "speculative_config['max_num_speculative_tokens']=4 is for num_speculative_tokens='auto' alone; ",
        ),
        (
            {"num_speculative_tokens": "auto", "max_num_speculative_tokens": -1},
            "speculative_config['max_num_speculative_tokens']=-1 must be an int >= 0",
        ),
        (
            {"num_speculative_tokens": "auto", "num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            f"{TABLE} fixes K; allowed beside it: num_speculative_tokens as an int, or none, not 'auto'",
        ),
        ({"selection": "best"}, "speculative_config['selection']='best' is not known; allowed: 'adaptive', 'tetris'"),
        (
            {"selection": "tetris", "num_speculative_tokens": "auto"},
            "speculative_config['selection']='tetris' needs num_speculative_tokens as an int; it is 'auto'",
        ),
        (
            {"tetris_extra_proposals": 1},
            "speculative_config['tetris_extra_proposals']=1 is for selection 'tetris' alone; selection='adaptive'",
        ),
        (
            {"selection": "tetris", "verification": "rejection"},
            "speculative_config['selection']='tetris' changes what rejection sampling draws; allowed beside it: ",
        ),
        ({"method": "eagle"}, "speculative_config['method']='eagle' is not known; allowed: 'draft_model'"),
        ({"method": None}, "speculative_config['method']=None is not known; allowed: 'draft_model'"),
        (
            {"method": ["suffix", "eagle"]},
            "speculative_config['method'][1]='eagle' is not known; allowed: 'draft_model'",
        ),
        ({"method": [["suffix"]]}, "speculative_config['method'][0]=['suffix'] is not known; allowed: 'draft_model'"),
        (
            {"method": []},
            "speculative_config['method']=[] must name at least one method, each once, and at most one of",
        ),
        (
            {"method": ["ngram"] * 2, "model": None},
            "speculative_config['method']=['ngram', 'ngram'] must name at least",
        ),
        ({"method": ["draft_model", "ngram", "eagle3"]}, "'eagle3'] must name at least one method, each once, and at "),
        (
            {"method": ["ngram", "suffix"]},
            "is for methods 'draft_model', 'eagle3', 'clover'; method ('ngram', 'suffix')",
        ),
        (
            {"method": ["suffix", "draft_model"], "prompt_lookup_max": 3},
            "['prompt_lookup_max']=3 is for method 'ngram'",
        ),
        (
            {"method": ["suffix", "draft_model"], "selection": "tetris", "num_speculative_tokens": 2},
            "speculative_config['selection']='tetris' is for one method; allowed beside it: a method, not ['suffix', ",
        ),
        ({"numerics": "sloppy"}, "speculative_config['numerics']='sloppy' is not known; allowed: 'exact', 'fast'"),
        (
            {"kv_cache_dtype": "fp8"},
            "speculative_config['kv_cache_dtype']='fp8' is not known; allowed: 'auto', 'float32', 'bfloat16', ",
        ),
        (
            {"verification": "typical"},
            "['verification']='typical' is not known; allowed: 'greedy', 'coupled', 'rejection'",
        ),
        ({"k": 3}, "speculative_config has no key 'k'; allowed: model, method, num_speculative_tokens, "),
        ({"model": None}, "speculative_config['model']=None: a draft model is needed beside model="),
        ({TABLE[20:-2]: [[1, 2]]}, f"{TABLE} entry [1, 2] must be three ints [first, last, K]"),
        ({TABLE[20:-2]: [[1, 4, 5.0]]}, f"{TABLE} entry [1, 4, 5.0] must be three ints [first, last, K]"),
        ({TABLE[20:-2]: [[1, 4, True]]}, f"{TABLE} entry [1, 4, True] must be three ints [first, last, K]"),
        ({TABLE[20:-2]: [[0, 4, 5]]}, f"{TABLE} entry [0, 4, 5] must satisfy 0 < first <= last and K >= 0"),
        ({TABLE[20:-2]: [[4, 1, 5]]}, f"{TABLE} entry [4, 1, 5] must satisfy 0 < first <= last and K >= 0"),
        ({TABLE[20:-2]: [[1, 4, -1]]}, f"{TABLE} entry [1, 4, -1] must satisfy 0 < first <= last and K >= 0"),
        ({TABLE[20:-2]: [[1, 4, 5], [4, 8, 2]]}, f"{TABLE} entry [4, 8, 2] must satisfy 4 < first <= last and K >= 0"),
    ],
)
def test_a_bad_speculative_config_is_refused_before_a_checkpoint_is_opened(toy_pair, no_models, speculative, message):
    with pytest.raises(ValueError) as refused:
        make_llm(toy_pair, speculative)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("speculative", "arguments", "message"),
    [
        ({TABLE[20:-2]: 5}, {}, f"{TABLE}=5 must be"),
        ({TABLE[20:-2]: [5]}, {}, f"{TABLE} entry 5 must be three ints [first, last, K]"),
        ({}, {"trust_remote_code": "no"}, "trust_remote_code='no' must be True or False"),
        ({}, {"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
    ],
)
def test_values_of_another_type_are_refused(toy_pair, no_models, speculative, arguments, message):
    with pytest.raises(ValueError) as refused:
        make_llm(toy_pair, speculative, **arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize("value", ["draft", 5, ["draft", 5]])
def test_a_speculative_config_of_another_type_is_refused(toy_pair, no_models, value):
    with pytest.raises(
        ValueError, match=r"speculative_config=.* must be None, a SpeculativeConfig or a mapping such as"
    ):
        LLM(toy_pair.target, speculative_config=value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp8"}, "dtype='fp8' is not known; allowed: 'auto', 'float32', 'bfloat16', 'float16'"),
        ({"numerics": "sloppy"}, "numerics='sloppy' is not known; allowed: 'exact', 'fast'"),
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype='fp8' is not known; allowed: 'auto', 'float32', 'bfloat16', 'float16'",
        ),
        ({"block_size": 0}, "block_size=0 must be an int >= 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be an int >= 1"),
        ({"max_num_seqs": 2.0}, "max_num_seqs=2.0 must be an int >= 1"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3 must be at least max_num_seqs=4"),
        ({"max_model_len": 1}, "max_model_len=1 must be an int >= 2"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0 must be an int >= 1"),
        ({"seed": -1}, "seed=-1 must be an int >= 0"),
        ({"gpu_memory_utilization": 0.9}, "LLM() has no argument 'gpu_memory_utilization'; allowed: model, "),
    ],
)
def test_a_bad_engine_argument_is_refused_before_a_checkpoint_is_opened(toy_pair, no_models, arguments, message):
    with pytest.raises(ValueError) as refused:
        make_llm(toy_pair, **arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is not supported on a CPU"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda[:index]', got 'tpu'"),
        ({"max_model_len": 513}, "max_model_len must be at most the 512 positions of "),
    ],
)
def test_what_the_model_or_the_machine_cannot_do_is_refused(toy_pair, arguments, message):
    with pytest.raises(ValueError) as refused:
        make_llm(toy_pair, **arguments)
    assert message in str(refused.value)


def test_an_unknown_device_is_refused_where_k_is_the_devices_own():
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda"):
        LLM(device="gpu")


def test_a_draft_model_is_asked_for_exactly_where_something_is_drafted(toy_pair):
    ranges = "num_speculative_tokens_per_batch_size"
    for nothing in ({ranges: [[1, 8, 0]]}, {ranges: []}, {"num_speculative_tokens": 0}):
        assert LLM(toy_pair.target, speculative_config=nothing, max_model_len=64).engine.max_draft_tokens == 0
    for something in ({}, {ranges: [[1, 8, 3]], "num_speculative_tokens": 0}, {"num_speculative_tokens": 2}):
        with pytest.raises(ValueError, match="a draft model is needed beside"):
            LLM(toy_pair.target, speculative_config=something, max_model_len=64)


BYTES_PER_TOKEN = 1024  # of both toy models: 2 layers, 2 heads of 16, keys and values, fp32


@pytest.mark.parametrize(
    ("k", "kv_tokens", "message"),
    [
        (5, 0, f"{K}=5 needs KV for 7 tokens of a sequence; kv_cache_memory_bytes=1 holds 0 (1024 bytes per token"),
        (20, 16, f"{K}=20 needs KV for 22 tokens of a sequence; kv_cache_memory_bytes=16384 holds 16 (1024 bytes"),
        (63, 64, f"{K}=63 needs KV for 65 tokens of a sequence; kv_cache_memory_bytes=65536 holds 64 (1024 bytes"),
        (63, 256, f"{K}=63 must be at most max_model_len - 2 = 62"),
        (
            5,
            48,
            "kv_cache_memory_bytes=49152 holds 3 blocks = 48 tokens; allowed: at least one sequence of max_model_len=",
        ),
    ],
)
def test_a_pool_that_cannot_hold_one_sequence_is_refused_before_it_is_made(
    toy_pair, monkeypatch, k, kv_tokens, message
):
    monkeypatch.setattr(specpaged.engine.kv_memory, "PagedKVCache", None)
    with pytest.raises(ValueError) as refused:
        make_llm(toy_pair, {"num_speculative_tokens": k}, kv_cache_memory_bytes=max(1, kv_tokens * BYTES_PER_TOKEN))
    assert message in str(refused.value)


def test_a_pool_of_exactly_one_sequence_serves_any_number_of_requests(toy_pair):
    llm = make_llm(toy_pair, {"num_speculative_tokens": 62}, kv_cache_memory_bytes=MAX_MODEL_LEN * BYTES_PER_TOKEN)
    outputs = llm.generate(toys.prompts(2), params(max_tokens=None), use_tqdm=False)
    assert all(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) == MAX_MODEL_LEN for o in outputs)
    assert_idle(llm)


# Checkpoints that cannot be served.


@pytest.fixture
def broken(toy_pair, tmp_path):
    """A copy of the target, to break."""
    return Path(shutil.copytree(toy_pair.target, tmp_path / "broken"))


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_weights(directory):
    (directory / "model.safetensors").unlink()
    return "has no weights: model.safetensors is missing"


def truncated(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "model.safetensors is truncated"


def truncated_header(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    return "model.safetensors is truncated or no safetensors file"


def empty_file(directory):
    (directory / "model.safetensors").write_bytes(b"")
    return "model.safetensors is truncated or no safetensors file: its header does not fit in 0 bytes"


def not_safetensors(directory):
    (directory / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"this is no json." + bytes(99))
    return "model.safetensors is no safetensors file"


def one_tensor_less(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    return "1 missing (model.layers.1.mlp.up_proj.weight)"


def a_missing_shard(directory):
    weight_map = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return "has no weights: model-00001-of-00002.safetensors is missing"


def pickle_instead(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    return "holds its weights as a pickle (pytorch_model.bin), which can run code when it is opened and is never loaded"


def another_architecture(directory):
    edit_config(directory, model_type="llama", architectures=["LlamaForCausalLM"])
    return "the weights are not those of LlamaForCausalLM, named by config.json: "


def architectures_that_contradict(directory):
    edit_config(directory, architectures=["LlamaForCausalLM"])
    return "config.json names the architecture LlamaForCausalLM, its model_type 'qwen3' is Qwen3ForCausalLM"


def an_unknown_architecture(directory):
    edit_config(directory, model_type="qwen99", architectures=["Qwen99ForCausalLM"])
    return "config.json cannot be used: "


def other_shapes(directory):
    edit_config(directory, intermediate_size=32)
    return "of another shape (model.layers.0.mlp."


def without_config(directory):
    (directory / "config.json").unlink()
    return "has no config.json"


def broken_config(directory):
    (directory / "config.json").write_text("{")
    return "config.json is not valid JSON"


def no_directory(directory):
    shutil.rmtree(directory)
    return "does not exist; it must be a local directory or a hub id"


BREAKAGES = [
    without_weights,
    truncated,
    truncated_header,
    empty_file,
    not_safetensors,
    one_tensor_less,
    a_missing_shard,
    pickle_instead,
    another_architecture,
    architectures_that_contradict,
    an_unknown_architecture,
    other_shapes,
    without_config,
    broken_config,
    no_directory,
]


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda f: f.__name__)
def test_a_checkpoint_that_cannot_be_served_is_refused_by_name(toy_pair, broken, breakage, role):
    message = breakage(broken)
    pair = toys.Pair(str(broken), toy_pair.draft) if role == "target" else toys.Pair(toy_pair.target, str(broken))
    with pytest.raises(ValueError) as refused:
        make_llm(pair)
    assert message in str(refused.value)
    assert str(broken) in str(refused.value)


def test_a_pickle_is_not_opened(toy_pair, broken, monkeypatch):
    """Nor is one beside good safetensors."""

    def opened(*_args, **_kwargs):
        raise AssertionError("a pickle is opened")

    monkeypatch.setattr(torch, "load", opened)
    (broken / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    [output] = make_llm(toys.Pair(str(broken), toy_pair.draft)).generate(ids(5), GOOD, use_tqdm=False)
    assert output.error is None
    pickle_instead(broken)
    with pytest.raises(ValueError, match="never loaded"):
        make_llm(toys.Pair(str(broken), toy_pair.draft))


def test_a_draft_with_another_tokenizer_is_refused(tokenizer_pair, tmp_path):
    draft = Path(shutil.copytree(tokenizer_pair.draft, tmp_path / "draft"))
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]  # the same size, two tokens swapped
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError) as refused:
        make_llm(toys.Pair(tokenizer_pair.target, str(draft)))
    message = str(refused.value)
    assert f"speculative_config['model']={str(draft)!r} has another vocabulary than model=" in message
    assert "(300 and 300 tokens); allowed: a draft with the target's own tokenizer" in message


@pytest.mark.parametrize("rows", [299, 301, 320])
def test_without_tokenizers_a_draft_of_another_size_is_refused(toy_pair, tmp_path, rows):
    toys.model(vocab_size=rows).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as refused:
        make_llm(toys.Pair(toy_pair.target, str(tmp_path)))
    assert f"({rows} and 300 embedding rows); allowed: a draft with the target's own tokenizer" in str(refused.value)


def test_with_tokenizers_a_padded_embedding_is_cut(tokenizer_pair, tmp_path):
    draft = tmp_path / "padded"
    toys.model(vocab_size=320).save_pretrained(draft)
    toys.byte_tokenizer().save_pretrained(draft)
    llm = make_llm(toys.Pair(tokenizer_pair.target, str(draft)))
    outputs = llm.generate(["the fox", "a dog"], GOOD, use_tqdm=False)
    plain = LLM(tokenizer_pair.target, max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
    expected = plain.generate(["the fox", "a dog"], GOOD, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [e.outputs[0].token_ids for e in expected]
    padded = make_llm(toys.Pair(str(draft), tokenizer_pair.draft))
    with pytest.raises(ValueError, match=r"prompt_token_ids\[0\]=310 is out of range; allowed: ints in \[0, 300\)"):
        padded.generate(ids(310), GOOD, use_tqdm=False)
    biased = params(logit_bias={299: 100.0}, max_tokens=2)
    assert padded.generate(ids(5), biased, use_tqdm=False)[0].outputs[0].token_ids == [299, 299]


def test_an_eos_id_outside_the_vocabulary_does_no_harm(tmp_path):
    model = toys.model()
    model.generation_config.eos_token_id = model.config.eos_token_id = [toys.EOS, 310]
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), max_model_len=MAX_MODEL_LEN, max_num_seqs=2)
    outputs = llm.generate([ids(5), ids(6)], [GOOD, params(min_tokens=4, ignore_eos=False)], use_tqdm=False)
    assert [output.error for output in outputs] == [None, None]
    assert llm.engine.vocabulary.eos_token_ids == (toys.EOS,)


def test_a_bad_word_outside_the_vocabulary_is_refused(tmp_path):
    toys.model(vocab_size=290).save_pretrained(tmp_path)
    toys.byte_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), max_model_len=MAX_MODEL_LEN, max_num_seqs=2)
    outputs = llm.generate([ids(5), ids(6)], [GOOD, params(bad_words=["ju", " ju"])], use_tqdm=False)
    assert outputs[0].error is None
    assert "made of words whose token ids are below 290" in outputs[1].error


def test_configurations_can_be_checked_without_models(no_models):
    assert SpeculativeConfig.from_mapping({"num_speculative_tokens": 0}).max_draft_tokens == 0
    with pytest.raises(ValueError, match="max_num_seqs=0 must be an int >= 1"):
        EngineConfig(max_num_seqs=0)

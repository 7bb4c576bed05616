"""vLLM's configuration as ours: what is taken from it, and what is refused by name before anything is loaded."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.vllm_plugin import WORKER_CLS, admission, register
from specpaged.vllm_plugin.config import engine_config, options
from specpaged.vllm_plugin.params import translated

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}


def vllm_config(**arguments):
    return EngineArgs(
        **({"model": EMBEDDED_TARGET, "dtype": "float32", "max_model_len": 256} | arguments)
    ).create_engine_config()


def test_what_vllm_was_told_reaches_our_parts():
    config = vllm_config(
        speculative_config=DRAFT, block_size=32, max_num_seqs=7, max_num_batched_tokens=512, seed=5,
        enable_prefix_caching=True, enforce_eager=True,
        additional_config={"specpaged": {"numerics": "fast", "draft_numerics": "exact", "attention_backend": "torch",
                                         "kv_cache_dtype": "bfloat16", "draft_kv_cache_dtype": "float16"}},
    )  # fmt: skip
    ours = engine_config(config, "cpu")
    assert dataclasses.asdict(ours) | {
        "model": EMBEDDED_TARGET, "dtype": "float32", "device": "cpu", "block_size": 32, "max_model_len": 256,
        "max_num_seqs": 7, "max_num_batched_tokens": 512, "seed": 5, "enable_prefix_caching": True,
        "enforce_eager": True, "numerics": "fast", "attention_backend": "torch", "trust_remote_code": False,
        "kv_cache_dtype": "bfloat16",
    } == dataclasses.asdict(ours)  # fmt: skip
    assert ours.speculative_config.model == EMBEDDED_DRAFT
    assert ours.speculative_config.is_adaptive
    assert ours.speculative_config.max_draft_tokens == 3
    assert ours.speculative_config.numerics == "exact"
    assert ours.speculative_config.kv_cache_dtype == "float16"
    fixed = vllm_config(speculative_config=DRAFT, additional_config={"specpaged": {"adaptive": False}})
    assert engine_config(fixed, "cpu").speculative_config.num_speculative_tokens == 3
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 1]]}
    by_size = engine_config(vllm_config(speculative_config=DRAFT | ranges), "cpu")
    assert by_size.speculative_config.num_speculative_tokens == 3
    assert engine_config(vllm_config(), "cpu").speculative_config is None


@pytest.mark.parametrize(
    ("num_ranks", "options", "eager", "expected"),
    [
        (1, {}, False, False),
        (1, {}, True, True),
        (2, {}, False, True),
        (2, {"tensor_parallel_graphs": False}, False, True),
        (2, {"tensor_parallel_graphs": True}, False, False),
        (2, {"tensor_parallel_graphs": True}, True, True),
    ],
)
def test_ranks_run_kernel_by_kernel_unless_they_are_to_capture_their_gathers(num_ranks, options, eager, expected):
    config = vllm_config(enforce_eager=eager, additional_config={"specpaged": options})
    config.parallel_config.tensor_parallel_size = num_ranks
    assert engine_config(config, "cpu").enforce_eager == expected


@pytest.mark.parametrize("spelling", ["tests.drafting.test_custom:Repeats", "tests.drafting.test_custom.Repeats"])
def test_a_custom_class_is_a_drafter_of_somebody_elses(spelling):
    asked = {"method": "custom_class", "model": spelling, "num_speculative_tokens": 3}
    made_with = {"specpaged": {"drafter_options": {"depth": 2}}}
    ours = engine_config(vllm_config(speculative_config=asked, additional_config=made_with), "cpu").speculative_config
    assert (ours.method, ours.drafter, ours.model) == ("custom", "tests.drafting.test_custom:Repeats", None)
    assert (ours.drafter_options, ours.max_draft_tokens) == ({"depth": 2}, 3)
    config = vllm_config(speculative_config=asked | {"model": "no_such.module.Name"})
    with pytest.raises(ValueError, match=r"speculative_config\['drafter'\]='no_such.module:Name' cannot be imported"):
        engine_config(config, "cpu")
    with pytest.raises(ValueError, match=r"specpaged\['drafter_options'\]=.* needs a .* method custom_class"):
        engine_config(vllm_config(speculative_config=DRAFT, additional_config=made_with), "cpu")


@pytest.mark.parametrize("lookups", ["suffix", "suffix,ngram"])
def test_lookups_draft_beside_the_method_that_vllm_names(lookups):
    config = vllm_config(speculative_config=DRAFT, additional_config={"specpaged": {"lookups": lookups}})
    ours = engine_config(config, "cpu").speculative_config
    assert ours.methods == (*lookups.split(","), "draft_model")
    assert ours.model == EMBEDDED_DRAFT
    assert ours.max_draft_tokens == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "--pipeline-parallel-size=2 is not"),
        ({"logprobs_mode": "processed_logprobs"}, "--logprobs-mode='processed_logprobs' is not supported"),
        ({"hf_overrides": {"rope_theta": 1.0}}, "--hf-overrides={'rope_theta': 1.0} is not supported"),
        ({"kv_cache_dtype": "fp8"}, r"--kv-cache-dtype='fp8' is not supported .* \(allowed: 'auto'\)"),
        ({"attention_backend": "FLASH_ATTN"}, "--attention-backend=.*FLASH_ATTN.* is not supported"),
        ({"compilation_config": 3}, "--compilation-config=.* is not supported"),
        ({"cpu_offload_gb": 2.0}, "--cpu-offload-gb=2.0 is not supported"),
        ({"tokenizer": EMBEDDED_DRAFT}, "--tokenizer=.* is not supported"),
        ({"logits_processors": ["a.b:C"]}, r"--logits-processors=\['a.b:C'\] is not supported"),
        ({"enable_lora": True}, "--enable-lora=True is not supported"),
        (
            {"speculative_config": DRAFT | {"draft_tensor_parallel_size": 1}},
            "--speculative-config draft_tensor_parallel_size=1 is not supported .* method, model, num_spec",
        ),
    ],
    ids=str,
)
def test_arguments_that_the_worker_would_not_heed_are_refused_by_name(arguments, message):
    register()
    with pytest.raises(ValueError, match=message):
        vllm_config(worker_cls=WORKER_CLS, **arguments)


def test_arguments_at_their_defaults_pass():
    register()
    command = ["--model", EMBEDDED_TARGET, "--worker-cls", WORKER_CLS, "--dtype", "float32", "--max-model-len", "256"]
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(command)
    AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    vllm_config(worker_cls=WORKER_CLS, tokenizer=None, compilation_config={}, kv_cache_dtype="auto", hf_overrides={})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_format": "dummy"}, r"--load-format='dummy' is not supported \(allowed: auto, hf, safetensors\)"),
        ({"additional_config": {"specpaged": {"numeric": 1}}}, "specpaged has no key 'numeric'; allowed: adaptive, "),
        (
            {"additional_config": {"specpaged": {"drafter_options": 3}}},
            r"specpaged\['drafter_options'\]=3 must be a mapping whose keys are strings",
        ),
        (
            {"additional_config": {"specpaged": {"adaptive": "no"}}, "speculative_config": DRAFT},
            r"specpaged\['adaptive'\]='no' is not known; allowed: True, False",
        ),
        (
            {"additional_config": {"specpaged": {"numerics": "exakt"}}},
            r"specpaged\['numerics'\]='exakt' is not known; allowed: 'exact', 'fast'",
        ),
        (
            {"additional_config": {"specpaged": {"lookups": "suffix"}}},
            r"specpaged\['lookups'\]='suffix' needs a speculative_config",
        ),
        (
            {"additional_config": {"specpaged": {"lookups": "prefix"}}, "speculative_config": DRAFT},
            r"specpaged\['lookups'\]='prefix' is not known; allowed: 'ngram', 'suffix', 'ngram,suffix', 'suffix,ngram'",
        ),
        (
            {"additional_config": {"specpaged": {"draft_numerics": "fast"}}},
            r"specpaged\['draft_numerics'\]='fast' needs a speculative_config",
        ),
        (
            {"additional_config": {"specpaged": {"draft_kv_cache_dtype": "float16"}}},
            r"specpaged\['draft_kv_cache_dtype'\]='float16' needs a speculative_config",
        ),
    ],
    ids=str,
)
def test_what_the_worker_cannot_do_is_refused_by_name(arguments, message):
    config = vllm_config(**arguments)
    with pytest.raises(ValueError, match=message):
        engine_config(config, "cpu")


def test_logits_processors_of_other_packages_are_refused(monkeypatch):
    class Plugin:
        value = "a.b:C"

    config = vllm_config()
    monkeypatch.setattr("specpaged.vllm_plugin.config.entry_points", lambda group: [Plugin])
    with pytest.raises(ValueError, match=r"the logits processor 'a\.b:C' of an installed package is not supported"):
        engine_config(config, "cpu")


def test_options_of_others_are_none_of_ours():
    assert options({"another plugin": 1}) == options(None) == {}


def test_our_check_stands_in_configurations_that_name_our_worker_and_in_no_others():
    for _ in range(2):  # vLLM may call it more than once
        register()
    name = f"{admission.__name__}:AdmissionUpTo0"
    assert vllm_config(worker_cls=WORKER_CLS).model_config.logits_processors == [name]
    admission.check_is_in(vllm_config(worker_cls=WORKER_CLS))
    assert not vllm_config().model_config.logits_processors
    with pytest.raises(RuntimeError, match="specpaged's vLLM plugin was not loaded"):
        admission.check_is_in(vllm_config())


def test_a_request_for_longer_drafts_than_the_server_makes_is_refused():
    register()
    config = vllm_config(worker_cls=WORKER_CLS, speculative_config=DRAFT).model_config
    three, four = (SamplingParams(extra_args={"num_speculative_tokens": k}) for k in (3, 4))
    validate_logits_processors_parameters(config.logits_processors, three)
    with pytest.raises(VLLMValidationError, match="=4 is more than the engine drafts; allowed: 0 to 3"):
        validate_logits_processors_parameters(config.logits_processors, four)
    with pytest.raises(ValueError, match="allowed: 0, as this engine has no draft"):
        admission.AdmissionUpTo0.validate_params(three)
    with pytest.raises(AttributeError, match="AdmissionUpToMany"):
        admission.AdmissionUpToMany  # noqa: B018


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_what_vllm_refuses_beside_its_own_speculation_is_let_through_beside_ours(params):
    register()
    ours = vllm_config(worker_cls=WORKER_CLS, speculative_config=DRAFT)
    vllms = vllm_config(speculative_config=DRAFT)
    for config in (ours, vllm_config(worker_cls=WORKER_CLS), vllm_config()):
        SamplingParams(**params)._validate_spec_decode(config.speculative_config)
    SamplingParams(**params)._validate_spec_decode(copy.deepcopy(ours).speculative_config)
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        SamplingParams(**params)._validate_spec_decode(vllms.speculative_config)


def test_the_check_is_of_the_kind_that_the_model_runner_takes(second_model_runner):
    register()
    config = vllm_config(worker_cls=WORKER_CLS, speculative_config=DRAFT)
    assert config.model_config.logits_processors == [f"{admission.__name__}:AdmissionV2UpTo3"]
    four = SamplingParams(extra_args={"num_speculative_tokens": 4})
    with pytest.raises(VLLMValidationError, match="allowed: 0 to 3"):
        build_custom_logits_processors_params_validator(config.model_config.logits_processors)(four)


def test_every_parameter_of_vllm_is_translated_left_to_vllm_or_refused():
    for name, value in {
        "thinking_token_budget": 3,
        "logprob_token_ids": [1],
        "prompt_logprob_start": 2,
        "trace_decode_token_ids": [4],
        "routed_experts_prompt_start": 1,
    }.items():
        with pytest.raises(ValueError, match=f"{name}=.* is not supported by specpaged's worker; allowed: "):
            translated(SamplingParams(**{name: value}))
    with pytest.raises(ValueError, match=r"prompt_logprob_token_ids=.* is not supported by specpaged's worker"):
        translated(SamplingParams(prompt_logprob_token_ids=np.array([1, 2])))
    with pytest.raises(ValueError, match="skip_reading_prefix_cache=False is not supported"):
        translated(SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False))
    with pytest.raises(ValueError, match=r"extra_args\['num_speculative_tokens'\]=-1"):
        translated(SamplingParams(extra_args={"best_of": 2, "num_speculative_tokens": -1}))
    assert translated(SamplingParams(extra_args={"best_of": 2})).num_speculative_tokens is None  # another's, as in vLLM
    ours = translated(SamplingParams(temperature=0.5, top_k=-1, seed=3, stop=["x"], bad_words=["y"], logit_bias={3: 1}))
    assert (ours.temperature, ours.top_k, ours.seed, ours.logit_bias) == (0.5, 0, 3, {3: 1.0})

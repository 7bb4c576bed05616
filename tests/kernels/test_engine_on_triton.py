"""The engine on Triton's kernels, in the interpreter, against the engine on torch."""

import re

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from specpaged import LLM, SamplingParams
from specpaged.modeling.backend import ENVIRONMENT, choose_backend
from specpaged.modeling.loading import load_model
from specpaged.modeling.norm import KernelRMSNorm, use_kernel_norms
from specpaged.modeling.self_check import check_rows
from tests import toys
from tests.modeling.world import World, random_tokens
from tests.poison import Poison

PROMPTS = toys.prompts(3, seed=5, longest=24)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, top_k=20, repetition_penalty=1.2, max_tokens=4, ignore_eos=True),
]


def make(pair: toys.Pair, backend: str, numerics: str = "exact", k: int = 3) -> LLM:
    return LLM(
        pair.target,
        speculative_config={"model": pair.draft, "num_speculative_tokens": k} if k else None,
        attention_backend=backend,
        numerics=numerics,
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=32,  # prefill in chunks
    )


def token_ids(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_outputs_on_triton_are_those_on_torch(toy_pair, numerics):
    expected = token_ids(make(toy_pair, "torch", k=0))
    llm = make(toy_pair, "triton", numerics)
    assert token_ids(llm) == expected
    assert llm.metrics.accepted_tokens > 0
    assert llm.metrics.rollbacks > 0
    assert llm.metrics.gathered_bytes == 0
    assert "attention triton" in llm.engine.target.model.numerics_scheme
    assert ("linears triton" in llm.engine.target.model.numerics_scheme) == (numerics == "exact")


def test_logits_on_triton_have_the_same_bits_in_decode_verify_and_prefill(toy_pair):
    """With NaN in every slot whose KV is not valid."""
    model = load_model(toy_pair.target, max_model_len=64, attention_backend="triton")
    check_rows(model, 16)  # as every load does but for those of these tests
    tokens, mate = random_tokens(21, 0), random_tokens(9, 1)
    plain = World(model, num_slots=256, seed=1)
    plain.run(("a", tokens[:15], 0))
    decoded = [plain.run(("a", tokens[i : i + 1], 1))["a"] for i in range(15, 21)]
    batch = World(model, num_slots=256, seed=2)
    batch.run(("b", mate[:4], 0), ("a", tokens[:7], 0))
    batch.run(("a", tokens[7:15], 0), ("b", mate[4:], 1))
    verified = batch.run(("b", mate[:1], 1), ("a", tokens[15:], 6))["a"]
    prefilled = World(model, num_slots=256, seed=3).run(("a", tokens, 6))["a"]
    assert torch.equal(torch.cat(decoded), verified)
    assert torch.equal(prefilled, verified)
    assert verified.isfinite().all()


def test_nan_ends_its_request_only_and_its_blocks_can_be_reused(toy_pair, monkeypatch):
    prompts, params = toys.prompts(4, longest=20), SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    reference = LLM(toy_pair.target, max_model_len=48, attention_backend="torch")
    expected = [output.outputs[0].token_ids for output in reference.generate(prompts, params, use_tqdm=False)]
    llm = LLM(
        toy_pair.target,
        speculative_config={"model": toy_pair.draft, "num_speculative_tokens": 3},
        attention_backend="triton",
        numerics="fast",
        max_model_len=48,
        max_num_seqs=2,
        kv_cache_memory_bytes=5 * 16 * 1024,
    )
    assert llm.engine.allocator.num_blocks < 10
    poison = Poison(llm, prompts[1]["prompt_token_ids"], 2, monkeypatch)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    assert "NaN" in outputs[1].error
    assert [outputs[i].outputs[0].token_ids for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
    assert poison.reused_blocks


def test_a_draft_that_allows_no_token_is_no_worse_than_on_torch(toy_pair):
    """min_tokens forbids the only token that allowed_token_ids allows: one request's error, not the batch's."""
    llm = LLM(
        toy_pair.target,
        speculative_config={"model": toy_pair.draft, "num_speculative_tokens": 2},
        attention_backend="triton",
        numerics="fast",
        max_model_len=48,
    )
    bad = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2)
    good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(toys.prompts(2, longest=10), [bad, good], use_tqdm=False)
    assert "allow no token" in outputs[0].error
    assert outputs[1].error is None
    assert len(outputs[1].outputs[0].token_ids) == 4


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 4), (torch.float16, 0.6)])
def test_a_norm_whose_weights_are_stored_less_one_keeps_them_whole(dtype, roundings):
    norm = Gemma2RMSNorm(64)
    torch.nn.init.normal_(norm.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(norm.to(dtype)).requires_grad_(False)
    use_kernel_norms(model, dtype)
    assert isinstance(model[0], KernelRMSNorm)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (1 + norm.weight.double())
    tolerance = roundings * torch.finfo(dtype).eps * (expected.abs() + 1e-3)
    assert ((model(x).double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize(
    ("argument", "environment", "interpreted", "block_size", "vocab_size", "expected"),
    [
        ("auto", None, True, 16, 300, "cpp"),  # a CPU
        ("triton", None, True, 16, 300, "triton"),
        ("auto", "triton", True, 16, 300, "triton"),
        ("auto", "torch", True, 16, 300, "torch"),
        ("torch", "triton", True, 16, 300, "torch"),  # who says it explicitly means it
        ("triton", "torch", True, 16, 300, "triton"),
        ("triton", None, False, 16, 300, "attention_backend='triton' cannot be used: device 'cpu'"),
        ("auto", "triton", False, 16, 300, f"{ENVIRONMENT}='triton' cannot be used: device 'cpu'"),
        ("triton", None, True, 24, 300, "block_size=24"),
        ("triton", None, True, 8, 300, "block_size=8"),
        ("triton", None, True, 16, 10**6, "a vocabulary of 1000000"),
        ("xformers", None, True, 64, 300, "numerics is 'exact'"),
        ("auto", "cudnn", True, 16, 300, f"{ENVIRONMENT}='cudnn' is not known"),
    ],
)
def test_the_backend_is_the_arguments_or_else_the_environments_where_it_can_run(
    monkeypatch, argument, environment, interpreted, block_size, vocab_size, expected
):
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    if environment is not None:
        monkeypatch.setenv(ENVIRONMENT, environment)

    def choose() -> str:
        cpu = torch.device("cpu")
        return choose_backend(argument, cpu, torch.float32, [(4, 2, 16)], block_size, vocab_size, "exact")[0]

    if expected in ("torch", "cpp", "triton"):
        assert choose() == expected
    else:
        with pytest.raises(ValueError, match=re.escape(expected)):
            choose()

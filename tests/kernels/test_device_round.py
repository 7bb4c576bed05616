"""Rounds in the kernels themselves, in Triton's interpreter; and that nothing of one waits for the device."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from specpaged import LLM, SamplingParams
from specpaged.modeling.device_round import RoundBucket, _Geometry
from tests import toys
from tests.kernels import references
from tests.kernels.test_cuda_graphs import WAITS, launch_nothing

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, seed=3, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory):
    """Of one layer each: the interpreter takes seconds for every round."""
    path = tmp_path_factory.mktemp("small")
    for role, seed in (("target", 0), ("draft", 0)):
        model = toys.model(seed, num_hidden_layers=1, vocab_size=64)
        if role == "draft":
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.03 * torch.randn_like(parameter))
        model.save_pretrained(path / role)
    return toys.Pair(str(path / "target"), str(path / "draft"))


def make(pair, **arguments) -> LLM:
    return LLM(
        pair.target,
        speculative_config={"model": pair.draft, "num_speculative_tokens": 2},
        max_model_len=32,
        max_num_seqs=2,
        **arguments,
    )


def token_ids(llm: LLM, params) -> list[list[int]]:
    prompts = [{"prompt_token_ids": [5, 9, 2]}, {"prompt_token_ids": [7, 1]}]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_held == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def llm_to_launch(small_pair):
    """Loaded with the kernels' references for what a decoder's layers call, which is quicker; nothing of it is run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        references.put_in_place(monkeypatch)
        return make(small_pair, attention_backend="triton", device_round=True)


def test_rounds_in_the_kernels_decode_what_torch_does(small_pair):
    """By the fused argmax where all are greedy, and with noise on logits where one is not."""
    torch_llm = make(small_pair, attention_backend="torch")
    llm = make(small_pair, attention_backend="triton", device_round=True)
    for params in ([GREEDY, GREEDY], [SAMPLED, GREEDY]):
        assert token_ids(llm, params) == token_ids(torch_llm, params)
    assert llm.metrics.steps > sum(llm.engine.host_steps.values())
    assert llm.metrics.draft_tokens > 0


@pytest.mark.parametrize("draws", [False, True])
def test_nothing_in_a_round_waits_for_the_device(llm_to_launch, draws, monkeypatch):
    """Launched on fake tensors, which hold nothing that could be waited for; a planted wait is seen."""
    llm = llm_to_launch
    launch_nothing(monkeypatch)
    bucket = RoundBucket(2, 2, 2, 2, draws, has_temperatures=draws)

    def run_on_fakes() -> None:
        with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
            llm.engine.round._run(bucket)

    run_on_fakes()
    gate = llm.engine.target.model.decoder.layers[0].gate
    forward = gate.forward
    for name, (wait, said) in WAITS.items():

        def planted(x, wait=wait):
            if isinstance(x, FakeTensor):
                wait(x)
            return forward(x)

        monkeypatch.setattr(gate, "forward", planted)
        with pytest.raises(Exception, match=said) as raised:
            run_on_fakes()
        assert re.search(said, str(raised.value)), name


def test_a_bucket_holds_the_work_of_any_round_that_fits_it(llm_to_launch):
    """Splits of 512 and more tokens, query blocks of few: powers of two above what sequences may come to."""
    geometry = _Geometry(4, 512)
    assert geometry.most_items(3, [40, 512]) == 2
    assert geometry.most_items(3, [40, 513]) == 4
    assert geometry.most_items(9, [513]) == 8
    round_ = llm_to_launch.engine.round
    assert round_.bucket(1, 2, [10], False, False) == RoundBucket(1, 2, 1, 1, False, False)
    assert round_.bucket(2, 0, [10, 20], True, False) == RoundBucket(2, 0, 0, 2, True, False)

"""That nothing of a round waits for the device, and what a round is launched for."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from specpaged import LLM
from specpaged.modeling.device_round import RoundBucket, _Geometry
from tests.kernels import references
from tests.kernels.test_cuda_graphs import WAITS, launch_nothing


def make(pair, **arguments) -> LLM:
    return LLM(
        pair.target,
        speculative_config={"model": pair.draft, "num_speculative_tokens": 2},
        max_model_len=32,
        max_num_seqs=2,
        **arguments,
    )


@pytest.fixture
def llm_to_launch(small_pair):
    """Loaded with the kernels' references for what a decoder's layers call, which is quicker; nothing of it is run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        references.put_in_place(monkeypatch)
        return make(small_pair, attention_backend="triton", device_round=True)


@pytest.mark.parametrize(("draws", "num_selected"), [(False, None), (True, None), (True, 1)])
def test_nothing_in_a_round_waits_for_the_device(llm_to_launch, draws, num_selected, monkeypatch):
    """Launched on fake tensors, which hold nothing that could be waited for; a planted wait is seen."""
    llm = llm_to_launch
    llm.engine.round.num_selected = num_selected
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

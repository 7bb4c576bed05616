"""What the worker refuses, one rank says: vLLM's executor would take what the others say for its next reply."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from specpaged.vllm_plugin.worker import SpecPagedWorker
from tests.vllm_plugin.serving import REFUSED


def worker_of(rank, backend="mp"):
    """A worker that has started, as far as its refusals know."""
    worker = SpecPagedWorker.__new__(SpecPagedWorker)
    worker.rank, worker.parallel_config = rank, SimpleNamespace(world_size=2, distributed_executor_backend=backend)
    worker.model_runner = SimpleNamespace(has_step=False)
    worker.shard = SimpleNamespace()
    return worker


CALLS = {
    **dict.fromkeys(sorted(REFUSED - {"initialize_from_config", "update_max_model_len"}), ()),
    "initialize_from_config": (None,),
    "update_max_model_len": (64,),
    "sample_tokens": (None,),
    "reload_weights": (None, None, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_last_rank_of_an_executor_refuses_and_the_others_say_nothing(name):
    for rank, backend in ((0, "external_launcher"), (1, "external_launcher"), (1, "mp")):
        with pytest.raises(NotImplementedError, match=f"^specpaged's worker refuses {name}: "):
            getattr(worker_of(rank, backend), name)(*CALLS[name])
    assert getattr(worker_of(0), name)(*CALLS[name]) is None

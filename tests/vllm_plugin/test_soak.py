"""A short form of `python -m benchmarks.vllm_soak`."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from benchmarks.vllm_soak import soak


def test_requests_of_all_kinds_with_aborts_and_preemptions_come_out_as_they_would_alone():
    found = soak(80, k=4, seed=1)
    assert found["lost"] == found["mismatches"] == found["held_blocks"] == found["remembered"] == 0
    assert found["preemptions"] > 0
    assert found["aborted"] > 0

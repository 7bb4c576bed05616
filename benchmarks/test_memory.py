"""Peak resident memory of plain and speculative decoding, beside weights and pools."""

import json
import subprocess
import sys

import pytest


@pytest.mark.benchmark(group="memory")
@pytest.mark.parametrize("k", [0, 5], ids=["plain", "speculative"])
def test_memory(benchmark, results, request, k):
    command = [sys.executable, "-m", "benchmarks.memory", str(k)]
    output = benchmark.pedantic(subprocess.check_output, args=(command,), kwargs={"text": True}, rounds=1)
    results.setdefault("memory", {})[request.node.callspec.id] = json.loads(output.splitlines()[-1])

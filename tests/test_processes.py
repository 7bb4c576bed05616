"""Two processes agree: the numerics scheme and the logits know nothing of K, of batch limits or of hash seeds."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys

import torch

from specpaged import LLM, SamplingParams
from tests import toys

PROGRAM = """
import json, sys
from tests.test_processes import report
shown = report(*sys.argv[1:])
print(json.dumps([shown, [name for name in sys.modules if name.startswith("specpaged_kernels.")]]))
"""


def report(target, draft, k, max_num_seqs):
    """What an engine shows of itself and of its logits, by dtype."""
    torch.set_num_threads(1)
    shown = {}
    for dtype in ("float32", "bfloat16"):
        speculative = {"model": draft, "num_speculative_tokens": int(k)} if int(k) else None
        limits = {"max_model_len": 128, "max_num_seqs": int(max_num_seqs)}
        llm = LLM(target, dtype=dtype, speculative_config=speculative, **limits)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
        prompts = toys.prompts(32)[: 32 if speculative else 4]
        digests = []
        for output in llm.generate(prompts, params, use_tqdm=False)[:4]:
            rows = output.prompt_logprobs[1:] + output.outputs[0].logprobs
            logprobs = [row[v].logprob for row in rows for v in range(toys.VOCAB_SIZE)]
            digests.append(hashlib.sha256(struct.pack(f"<{len(logprobs)}d", *logprobs)).hexdigest())
        shown[dtype] = {
            "scheme": llm.engine.target.model.numerics_scheme,
            "printed": str(llm.report).splitlines()[:3],
            "logprobs": digests,
            "accepted": llm.metrics.accepted_tokens,
            "peak": llm.metrics.peak_unverified_kv_tokens,
        }
    return shown


def report_of_another_process(*arguments):
    """With another hash seed than this one's; and the kernels' modules that it has loaded."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_k_and_batch_limits_change_neither_the_scheme_nor_a_bit_of_the_logits(toy_pair):
    plain = report(toy_pair.target, toy_pair.draft, 0, 1)
    speculative, kernels = report_of_another_process(toy_pair.target, toy_pair.draft, 7, 32)
    assert "specpaged_kernels.cpu.decoder" in kernels
    assert "specpaged_kernels.store_kv" not in kernels, "of Triton, which may not be there, and takes seconds to load"
    for dtype in ("float32", "bfloat16"):
        one, many = plain[dtype], speculative[dtype]
        assert one["scheme"].startswith("exact")
        assert one["scheme"] == many["scheme"]
        assert one["printed"] == many["printed"]
        assert one["scheme"] in one["printed"][2]
        assert one["logprobs"] == many["logprobs"]
        assert len(set(one["logprobs"])) == 4
        assert one["accepted"] == 0 < many["accepted"]
        assert many["peak"] > 31 * 7 / 2  # it was a batch, and drafted
    assert plain["float32"]["logprobs"] != plain["bfloat16"]["logprobs"]

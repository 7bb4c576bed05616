"""Two processes agree: the numerics scheme and the logits know nothing of K, of batch limits or of hash seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import hashlib, json, struct, sys

import torch

from specpaged import LLM, SamplingParams
from tests import toys

target, draft, k, max_num_seqs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
report = {}
for dtype in ("float32", "bfloat16"):
    speculative = {"model": draft, "num_speculative_tokens": k} if k else None
    llm = LLM(target, dtype=dtype, speculative_config=speculative, max_model_len=128, max_num_seqs=max_num_seqs)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    prompts = toys.prompts(32)[: 32 if k else 4]
    digests = []
    for output in llm.generate(prompts, params, use_tqdm=False)[:4]:
        rows = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        logprobs = [row[v].logprob for row in rows for v in range(toys.VOCAB_SIZE)]
        digests.append(hashlib.sha256(struct.pack(f"<{len(logprobs)}d", *logprobs)).hexdigest())
    report[dtype] = {
        "scheme": llm.engine.target.model.numerics_scheme,
        "printed": str(llm.report).splitlines()[:3],
        "logprobs": digests,
        "accepted": llm.metrics.accepted_tokens,
        "peak": llm.metrics.peak_unverified_kv_tokens,
    }
print(json.dumps(report))
"""


def start(pair, k, max_num_seqs, hash_seed):
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, pair.target, pair.draft, str(k), str(max_num_seqs)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_k_and_batch_limits_change_neither_the_scheme_nor_a_bit_of_the_logits(toy_pair):
    plain, speculative = (
        finish(start(toy_pair, k, max_num_seqs, hash_seed))
        for k, max_num_seqs, hash_seed in ((0, 1, "1"), (7, 32, "2"))
    )
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

"""A history of rounds in the kernels themselves, captured and replayed, in Triton's interpreter.

The kernels' references stand in for them in tests/kernels/test_device_histories.py: here is little, and all of it real.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specpaged import LLM, SamplingParams
from tests.kernels.test_cuda_graphs import Kept
from tests.kernels.test_device_histories import poison

MARGIN = 24  # elements on either side of a buffer
CANARY = 77


class GuardedMemory:
    """What torch.empty and torch.zeros give from now on lies between margins, which nobody is to write."""

    def __init__(self, monkeypatch):
        self.margins: list[torch.Tensor] = []
        self.num_guarded = 0
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, self._guarded(getattr(torch, name)))

    def _guarded(self, allocate):
        def guarded(*size, **options):
            if len(size) == 1 and not isinstance(size[0], int):
                size = tuple(size[0])
            numel = torch.Size(size).numel()
            dtype = options.get("dtype") or torch.get_default_dtype()
            if not numel or dtype == torch.bool or options.get("pin_memory") or options.get("device") == "meta":
                return allocate(size, **options)
            memory = allocate(numel + 2 * MARGIN, **options)
            for margin in (memory[:MARGIN], memory[-MARGIN:]):
                margin.fill_(CANARY)
                self.margins.append(margin)
            self.num_guarded += 1
            return memory[MARGIN:-MARGIN].view(size)

        return guarded

    def check(self) -> None:
        """Nobody has written beside a buffer."""
        assert all((margin == CANARY).all() for margin in self.margins)


def test_a_history_in_the_kernels_is_plain_decodings(small_pair, monkeypatch):
    """A sequence, then another beside it with a K of its own that draws; the first is aborted with a round in flight.
    Of the drafts of both the likeliest are verified, as many as there are sequences.
    Whoever comes makes rounds of another bucket, over the same buffers. NaN in all slots that nobody owns."""
    arguments = {"max_model_len": 32, "max_num_seqs": 2}
    prompts = [[5, 9, 2], [7, 1, 3, 8]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True),
    ]
    plain = LLM(small_pair.target, attention_backend="torch", **arguments)
    alone = plain.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    memory = GuardedMemory(monkeypatch)
    llm = LLM(
        small_pair.target,
        speculative_config={
            "model": small_pair.draft,
            "num_speculative_tokens": 1,
            "selection": "tetris",
            "tetris_extra_proposals": 1,
        },
        attention_backend="triton",
        device_round=True,
        **arguments,
    )
    engine, outputs = llm.engine, {}
    kept = engine.round._record = Kept()
    buckets, launch = [], engine.round.launch
    engine.round.launch = lambda bucket: (buckets.append(bucket), launch(bucket))[1]

    def step() -> None:
        poison(engine)
        outputs.update({output.request_id: output for output in engine.step()})
        engine.check_integrity()

    own_k = replace(params[1], extra_args={"num_speculative_tokens": 1})
    for request_id, prompt, of_request in (("0", prompts[0], params[0]), ("1", prompts[1], own_k)):
        engine.add_request(request_id, prompt, of_request)
        step()  # a prefill, on the host
        step()
    step()  # the same round once more
    assert engine._flight is not None
    aborted = engine.abort_request("0").outputs[0]
    while engine.has_unfinished_requests:
        step()
    memory.check()
    assert engine.allocator.num_held == 0
    expected = [output.outputs[0].token_ids for output in alone]
    assert outputs["1"].outputs[0].token_ids == expected[1]
    assert aborted.token_ids == expected[0][: len(aborted.token_ids)]
    assert len(aborted.token_ids) > 1
    assert engine.host_steps.keys() == {"nobody runs", "admission"}
    assert [bucket.num_seqs for bucket in buckets[:2]] == [1, 2]  # the second overflows the bucket of the first
    assert kept.num_captured == engine.round.num_captured == len(set(buckets)) < len(buckets)
    assert memory.num_guarded > 100
    assert engine.metrics.proposed_tokens > engine.metrics.draft_tokens > 0

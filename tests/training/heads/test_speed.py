"""What is decoded where the engine's speed with heads is measured: the same prompts with every number of drafts."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from specpaged.testing.heads import write_clover
from specpaged.training.heads import speed
from specpaged.training.heads.speed import measure_speed
from tests import toys
from tests.heads_world import heads_llm


@pytest.mark.parametrize(("seconds", "turns"), [(1e9, 3), (0.0, 1)])
def test_each_turn_decodes_a_batch_with_every_number_of_drafts(target, tmp_path, monkeypatch, seconds, turns):
    path = write_clover(tmp_path, AutoConfig.from_pretrained(target[0]))
    llm = heads_llm(target, "clover", str(path), k=5, max_num_seqs=8)
    seen, measured = [], speed._speed

    def counting(llm, prompts, k, max_tokens):
        before = llm.metrics.proposed_tokens
        per_second = measured(llm, prompts, k, max_tokens)
        assert (llm.metrics.proposed_tokens > before) == (k > 0)
        seen.append(([prompt[0] for prompt in prompts], k))
        return per_second

    monkeypatch.setattr(speed, "_speed", counting)
    monkeypatch.setattr(speed, "MAX_TOKENS", 6)
    prompts = [prompt["prompt_token_ids"] for prompt in toys.prompts(3)]
    figures = measure_speed(llm, prompts, seconds)
    assert {size: of_size["turns"] for size, of_size in figures.items()} == {"1": turns, "8": turns}
    names = [prompt[0] for prompt in prompts]
    expected = [(names[:1], k) for k in range(6)]  # warms up
    for i in range(turns):
        for size in (1, 8):
            expected += [([names[(i + j) % 3] for j in range(size)], (i + k) % 6) for k in range(6)]
    assert seen == expected


def test_speeds_are_over_plain_decoding_of_the_same_turn(monkeypatch):
    speeds = iter([1.0] * 6 + [value * scale for scale in (1, 10, 3, 5) for value in (2.0, 3.0, 4.0, 1.0, 2.0, 2.0)])
    of_k = {}

    def told(llm, prompts, k, max_tokens):  # the i-th turn begins with another K
        if not of_k:
            of_k.update({k: next(speeds) for k in range(6)})
        return of_k.pop(k)

    monkeypatch.setattr(speed, "_speed", told)
    figures = measure_speed(None, [[1], [2]], 1e9)
    assert figures["1"]["over_plain"] == figures["8"]["over_plain"] == [1.5, 2.0, 0.5, 1.0, 1.0]
    assert figures["1"]["plain_tokens_per_second"] == 4.0

"""Passes over static buffers, repeated for other batches, in the interpreter; and what a capture could not take.

A capture needs a GPU. Here a pass is "captured" by keeping it, and replayed by running it again: what it computes then
comes from the static buffers alone, for its batch has lost its host copies.
"""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime.interpreter import InterpretedFunction

from specpaged import LLM, SamplingParams
from specpaged.engine.report import ModelReport
from specpaged.modeling.cuda_graphs import Bucket, CudaGraphs
from specpaged.modeling.forward_output import HiddenStatesRequest
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache
from tests import toys
from tests.kernels import references
from tests.modeling.families import save_toy
from tests.modeling.world import random_tokens

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 24, 64


class Kept:
    """Keeps a pass instead of capturing it."""

    def __init__(self):
        self.num_captured = self.num_replayed = 0

    def __call__(self, run):
        run()  # as a capture's warm-up does
        self.num_captured += 1

        def replay():
            self.num_replayed += 1
            return run()

        return replay


def with_graphs(runner: ModelRunner, max_model_len: int = MAX_MODEL_LEN) -> Kept:
    kept = Kept()
    runner.graphs = CudaGraphs(runner.model, runner.kv_cache, max_model_len, record=kept)
    return kept


@pytest.fixture
def model(toy_pair):
    return load_model(toy_pair.target, max_model_len=MAX_MODEL_LEN, attention_backend="triton")


def test_a_batch_has_the_smallest_bucket_that_it_fits(model):
    graphs = CudaGraphs(model, PagedKVCache(model.kv_spec, NUM_BLOCKS, 16, model.dtype, "cpu"), 64, record=Kept())

    def bucket(num_items: int, *rows: tuple[int, int]) -> Bucket:
        """(tokens, num_logits) of each sequence"""
        return graphs.bucket(pack([RaggedRow([1] * n, 3, [1, 2, 3, 4], m) for n, m in rows], 16), num_items, 7)

    assert bucket(1, (1, 1)) == Bucket(1, 1, None, 7)
    assert bucket(3, (1, 1), (2, 1), (2, 2)) == Bucket(8, 4, 4, 7)
    assert bucket(4, (9, 9)) == Bucket(16, 4, None, 7)
    assert bucket(5, (3, 0)) == Bucket(4, 8, 0, 7)


def test_what_no_graph_can_run_runs_eagerly(model, caplog):
    """More rows than the largest bucket has, and passes whose capture fails."""
    cache = PagedKVCache(model.kv_spec, NUM_BLOCKS, BLOCK_SIZE, model.dtype, "cpu")
    for layer in cache.layers:
        layer.zero_()
    eager, graphed = ModelRunner(model, cache), ModelRunner(model, cache)

    def fail(run):
        raise torch.OutOfMemoryError("no room for a graph")

    graphed.graphs = CudaGraphs(model, cache, MAX_MODEL_LEN, record=fail)
    batch = pack([RaggedRow([5, 6, 7], 0, [1], 1)], BLOCK_SIZE)
    for _ in range(2):
        assert torch.equal(graphed.forward(batch).logits, eager.forward(batch).logits)
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        " passes of up to 4 rows run eagerly: no room for a graph"
    ]
    many = pack([RaggedRow([1] * 513, 0, list(range(33)), 1)], BLOCK_SIZE)
    assert graphed.graphs.run(many) is None
    assert graphed.graphs.num_captured == 0


@pytest.mark.parametrize("vocab_size", [None, 290])
def test_a_replayed_pass_computes_what_an_eager_one_does(model, vocab_size):
    """Ragged batches of any kind, one after the other on the same buffers; KV and results bit for bit."""
    eager, graphed = (
        ModelRunner(model, PagedKVCache(model.kv_spec, NUM_BLOCKS, BLOCK_SIZE, model.dtype, "cpu")) for _ in range(2)
    )
    kept = with_graphs(graphed)
    for runner in (eager, graphed):
        for layer in runner.kv_cache.layers:
            layer.zero_()
    rng = random.Random(3)
    for step in range(7):
        blocks = random.Random(step).sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
        rows = []
        for _ in range(rng.randint(1, 3)):
            num_tokens, context_len = rng.choice([1, 1, 2, 3]), rng.randint(0, 29)
            own = [blocks.pop() for _ in range(-(-(context_len + num_tokens) // BLOCK_SIZE))]
            num_logits = num_tokens if step % 2 else rng.randint(0, 1)
            rows.append(RaggedRow(random_tokens(num_tokens, step), context_len, own, num_logits))
        batch = pack(rows, BLOCK_SIZE)
        expected, got = (runner.forward(batch, argmax_of=vocab_size) for runner in (eager, graphed))
        if vocab_size is None:
            assert torch.equal(got.logits, expected.logits)
        else:
            assert torch.equal(got.argmax.token_ids, expected.argmax.token_ids)
            assert torch.equal(got.argmax.ok, expected.argmax.ok)
            if step % 2:
                logits = eager.forward(batch).logits[:, :vocab_size]
                assert torch.equal(got.argmax.token_ids, logits.argmax(dim=-1))
        for ours, theirs in zip(graphed.kv_cache.layers, eager.kv_cache.layers, strict=True):
            assert torch.equal(ours, theirs)
    assert 1 < kept.num_captured < kept.num_replayed


def test_an_engine_on_replayed_passes_decodes_what_an_eager_one_does(toy_pair, monkeypatch):
    """On the kernels' references: above, passes are replayed in the kernels."""
    references.put_in_place(monkeypatch)
    prompts = toys.prompts(2, seed=5, longest=8)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=2)

    def outputs(backend: str, graphs: bool, wanted: list[SamplingParams]) -> list[list[int]]:
        llm = LLM(
            toy_pair.target,
            speculative_config={"model": toy_pair.draft, "num_speculative_tokens": 2},
            attention_backend=backend,
            max_model_len=64,
            max_num_batched_tokens=32,
        )
        kept = [with_graphs(runner) for runner in (llm.engine.target, llm.engine.draft)] if graphs else []
        results = llm.generate(prompts, wanted, use_tqdm=False)
        assert all(k.num_captured for k in kept)
        assert not kept or sum(k.num_captured for k in kept) < sum(k.num_replayed for k in kept)
        return [result.outputs[0].token_ids for result in results]

    for wanted in ([greedy, greedy], [greedy, sampled]):  # of the former, the argmax alone
        assert outputs("triton", True, wanted) == outputs("torch", False, wanted)


def launch_nothing(monkeypatch) -> None:
    """A fake tensor has no memory for a kernel."""
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)


def make_runner(family: str, directory: Path) -> ModelRunner:
    path = save_toy(family, directory)
    model = load_model(str(path), max_model_len=MAX_MODEL_LEN, attention_backend="triton", model_impl="flat")
    return ModelRunner(model, PagedKVCache(model.kv_spec, NUM_BLOCKS, BLOCK_SIZE, model.dtype, "cpu"))


def run_on_fakes(runner: ModelRunner) -> int:
    """All kinds of passes as they would be captured, on fake tensors; how many came to their end."""
    ended = []

    def record(run):
        run()
        with FakeTensorMode(allow_non_fake_inputs=True):
            run()
        ended.append(run)
        return run

    graphs = CudaGraphs(runner.model, runner.kv_cache, MAX_MODEL_LEN, record=record)
    rows = [RaggedRow([5, 6, 7], 4, [1], 1), RaggedRow([8], 17, [2, 3], 1)]
    with torch.inference_mode():
        graphs.run(pack(rows, BLOCK_SIZE))
        if runner.model.has_argmax:
            graphs.run(pack(rows, BLOCK_SIZE), 100)
        rows = [replace(row, num_hidden=1) for row in rows]
        graphs.run(pack(rows, BLOCK_SIZE), hidden=HiddenStatesRequest(last=True, layer_inputs=(0, 1)))
    return len(ended)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite", "glm4"])
def test_nothing_in_a_pass_waits_for_the_device(family, tmp_path, monkeypatch):
    runner = make_runner(family, tmp_path)
    launch_nothing(monkeypatch)
    assert run_on_fakes(runner) == 2 + runner.model.has_argmax


WAITS = {  # and what a fake tensor says to it
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "_local_scalar_dense"),
    "numpy": (lambda x: x.numpy(), r"\.numpy\(\)"),
    "bool": (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
}


def test_what_waits_for_the_device_is_seen(tmp_path, monkeypatch, caplog):
    runner = make_runner("qwen3", tmp_path)
    launch_nothing(monkeypatch)
    gate = runner.model.decoder.layers[0].gate
    forward = gate.forward
    for name, (wait, said) in WAITS.items():

        def planted(x, wait=wait):
            if isinstance(x, FakeTensor):
                wait(x)
            return forward(x)

        monkeypatch.setattr(gate, "forward", planted)
        assert run_on_fakes(runner) == 0, name
        assert re.search(said, caplog.records[-1].message), (name, caplog.records[-1].message)


def test_the_report_says_why_passes_are_not_captured(model, monkeypatch):
    assert CudaGraphs.why_not(model, enforce_eager=False) == "no GPU"
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, NUM_BLOCKS, BLOCK_SIZE, model.dtype, "cpu"))
    assert ModelReport.of("target", runner, enforce_eager=False).decoder.endswith(", CUDA graphs")
    assert ModelReport.of("target", runner, enforce_eager=True).decoder.endswith(", eager (enforce_eager)")
    monkeypatch.setattr(model, "backend", "torch")
    assert "only the flat decoder" in ModelReport.of("target", runner, enforce_eager=False).decoder

"""Hidden states from passes in Triton's kernels, eager and over static buffers: transformers' own."""

import pytest
import torch

from specpaged.modeling.forward_output import HiddenStatesRequest
from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache
from tests.kernels.test_cuda_graphs import with_graphs
from tests.modeling.families import save_toy
from tests.modeling.test_hidden_states import reference
from tests.modeling.world import random_tokens

BLOCK_SIZE, NUM_BLOCKS = 16, 8
REQUEST = HiddenStatesRequest(last=True, layer_inputs=(1, 0))


def make_runner(model) -> ModelRunner:
    runner = ModelRunner(model, PagedKVCache(model.kv_spec, NUM_BLOCKS, BLOCK_SIZE, model.dtype, "cpu"))
    for layer in runner.kv_cache.layers:
        layer.zero_()
    return runner


# A norm behind attention and MLP; a factor on what they add.
@pytest.mark.parametrize("family", ["glm4", "granite"])
def test_eager_and_replayed_passes_find_transformers_own(family, tmp_path):
    path = save_toy(family, tmp_path)
    model = load_model(path, max_model_len=64, attention_backend="triton", model_impl="flat")
    eager, graphed, quiet = (make_runner(model) for _ in range(3))
    kept = with_graphs(graphed)
    a, b = random_tokens(21, 1), random_tokens(6, 2)
    expected = {"a": reference(path, a), "b": reference(path, b)}
    for rows in (
        [("a", 0, 17, 1, 3), ("b", 0, 2, 0, 0)],
        [("b", 2, 3, 1, 1), ("a", 17, 19, 1, 2)],
        [("b", 3, 4, 1, 1), ("a", 19, 21, 2, 2)],  # logits of every row
        [("b", 4, 6, 0, 2)],
    ):
        ragged = [
            RaggedRow({"a": a, "b": b}[seq][start:stop], start, {"a": [5, 2], "b": [7]}[seq], num_logits, num_hidden)
            for seq, start, stop, num_logits, num_hidden in rows
        ]
        batch = pack(ragged, BLOCK_SIZE)
        counts = [num_hidden for *_, num_hidden in rows]
        outputs = [runner.forward(batch, hidden=REQUEST) for runner in (eager, graphed)]
        logits = quiet.forward(batch).logits
        for output in outputs:
            assert torch.equal(output.logits, logits)
            states = output.hidden_states
            for i, (seq, _, stop, _, num_hidden) in enumerate(rows):
                last, hidden_states = expected[seq]
                for ours, theirs in zip(
                    (states.last, *states.layer_inputs), (last, hidden_states[1], hidden_states[0]), strict=True
                ):
                    rows_of_seq = ours.split(counts)[i]
                    torch.testing.assert_close(rows_of_seq, theirs[stop - num_hidden : stop], rtol=1e-4, atol=1e-4)
    assert kept.num_captured


def test_replayed_passes_find_what_eager_ones_do_bit_for_bit(toy_pair):
    """Requests of several kinds in turn, on the same buffers; what an earlier pass gave stays what it was."""
    model = load_model(toy_pair.target, max_model_len=64, attention_backend="triton")
    eager, graphed = make_runner(model), make_runner(model)
    kept = with_graphs(graphed)
    kinds = [  # (tokens, logits, hidden states) of each sequence, and the request
        ([(2, 1, 2), (1, 1, 0)], HiddenStatesRequest(last=True), None),
        ([(2, 0, 1)], REQUEST, 200),
        ([(1, 1, 1), (2, 2, 1)], HiddenStatesRequest(layer_inputs=(0,)), None),
    ]
    given = []
    for step, (shapes, wanted, argmax_of) in enumerate(kinds * 2):
        rows = [
            RaggedRow(random_tokens(num_tokens, step), 9 + 5 * step, blocks, num_logits, num_hidden)
            for (num_tokens, num_logits, num_hidden), blocks in zip(shapes, ([1, 2, 3], [4, 5, 6]), strict=False)
        ]
        batch = pack(rows, BLOCK_SIZE)
        expected, got = (runner.forward(batch, argmax_of=argmax_of, hidden=wanted) for runner in (eager, graphed))
        assert (got.argmax is None) == (argmax_of is None)
        given.append((got.hidden_states, expected.hidden_states))
    for ours, theirs in given:
        assert (ours.last is None) == (theirs.last is None)
        if ours.last is not None:
            assert torch.equal(ours.last, theirs.last)
        for one, other in zip(ours.layer_inputs, theirs.layer_inputs, strict=True):
            assert torch.equal(one, other)
    assert (kept.num_captured, kept.num_replayed) == (3, 6)

"""What Python hands over to C++ is looked at first: an exception names the argument, and nothing is written."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from specpaged.modeling.loading import load_model
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.speculation.stop_rule import StopRule
from specpaged_kernels.cpu.linear import linear
from specpaged_kernels.cpu.linear import pack as pack_weight
from specpaged_kernels.cpu.rowwise import gate, norm_and_rotate, rms_norm
from tests.kernels.cpu.world import World

BLOCK_SIZE = 4
FAR = 2**31 - 1


def changed(tensor: torch.Tensor, index, value) -> torch.Tensor:
    other = tensor.clone()
    other[index] = value
    return other


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, every other one of twice as many."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


# By name: the argument that an exception names, and what the attribute of a World or a RaggedBatch becomes.
BAD_INDICES = {
    "a slot behind the pool": ("slot_mapping", lambda x: changed(x, 1, 10_000)),
    "a slot before the pool": ("slot_mapping", lambda x: changed(x, 0, -1)),
    "a block behind the pool": ("page_table", lambda x: changed(x, (0, 0), 10_000)),
    "a block before the pool": ("page_table", lambda x: changed(x, (1, 0), -1)),
    "a context longer than its table": ("context_lens", lambda x: changed(x, 0, 1000)),
    "a context without end": ("context_lens", lambda x: changed(x, 1, FAR)),
    "a negative context": ("context_lens", lambda x: changed(x, 0, -3)),
    "bounds that fall": ("cu_query_lens", lambda x: changed(x, 1, 9)),
    "bounds that begin late": ("cu_query_lens", lambda x: changed(x, 0, 1)),
    "bounds of more tokens": ("cu_query_lens", lambda x: changed(x, 2, FAR)),
}
BAD_TENSORS = {
    "slots in int32": ("slot_mapping", torch.Tensor.int),
    "slots apart": ("slot_mapping", apart),
    "a table in int64": ("page_table", torch.Tensor.long),
    "a table with columns apart": ("page_table", apart),
    "a table of fewer sequences": ("page_table", lambda x: x[:1]),
    "bounds in int64": ("cu_query_lens", torch.Tensor.long),
    "bounds apart": ("cu_query_lens", apart),
    "too few bounds": ("cu_query_lens", lambda x: x[:-1]),
    "contexts in int64": ("context_lens", torch.Tensor.long),
    "contexts apart": ("context_lens", apart),
}
ALL_BAD = BAD_INDICES | BAD_TENSORS


def refused(bad: str):
    name = ALL_BAD[bad][0]
    if bad in BAD_INDICES:
        return pytest.raises(IndexError, match=f"^{name} leads outside of its table$")
    return pytest.raises(ValueError, match=f"^{name} is .*; allowed: ")


@pytest.mark.parametrize("bad", ALL_BAD)
def test_attention_reads_and_writes_its_own_slots_alone(bad):
    name, change = ALL_BAD[bad]
    world = World([(6, 2), (3, 1)], 4, 2, 16, block_size=BLOCK_SIZE)
    pool, output = world.pool.clone(), torch.full_like(world.query, 7.0).contiguous()
    setattr(world, name, change(getattr(world, name)))
    with refused(bad):
        world.attend(output=output)
    assert torch.equal(world.pool.nan_to_num(9.0), pool.nan_to_num(9.0))
    assert (output == 7).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key", lambda x: x[:, :1]), ("value", lambda x: x[:-1]), ("pool", lambda x: x.double()), ("pool", apart),
        ("pool", lambda x: x[:, :1]), ("query", lambda x: x[..., :8]),
    ],
)  # fmt: skip
def test_attention_refuses_tensors_that_do_not_go_together(name, change):
    world = World([(6, 2), (3, 1)], 4, 2, 16, block_size=BLOCK_SIZE)
    setattr(world, name, change(getattr(world, name)))
    with pytest.raises(ValueError, match="; allowed: "):
        world.attend()


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.zeros(3)}, {"sinks": torch.zeros(4, dtype=torch.bfloat16)}, {"sinks": torch.zeros(8)[::2]},
        {"output": torch.zeros(3, 4, 16)}, {"output": torch.zeros(6, 4, 16, dtype=torch.float64)},
    ],
)  # fmt: skip
def test_attention_refuses_what_it_could_not_read_or_write_whole(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} is .*; allowed: "):
        World([(6, 2), (3, 1)], 4, 2, 16, block_size=BLOCK_SIZE).attend(**options)


@pytest.fixture(scope="module")
def runner(toy_pair):
    model = load_model(toy_pair.target, max_model_len=64, attention_backend="cpp", model_impl="flat")
    return ModelRunner(model, PagedKVCache(model.kv_spec, 8, BLOCK_SIZE, model.dtype, "cpu"))


def two_sequences():
    rows = [RaggedRow([5, 6], 6, [1, 2], 1), RaggedRow([7], 3, [3, 4], 1)]
    return pack(rows, BLOCK_SIZE)


def unwritten(runner) -> list[torch.Tensor]:
    for layer in runner.kv_cache.layers:
        layer.fill_(3.0)
    return [layer.clone() for layer in runner.kv_cache.layers]


@pytest.mark.parametrize("bad", ALL_BAD)
def test_a_decoders_tables_are_looked_at_before_it_runs(bad, runner):
    name, change = ALL_BAD[bad]
    batch = two_sequences()
    batch = dataclasses.replace(batch, **{name: change(getattr(batch, name))})
    before = unwritten(runner)
    with refused(bad):
        runner.forward(batch)
    assert all(map(torch.equal, before, runner.kv_cache.layers))


@pytest.mark.parametrize(
    ("row", "further", "name"),
    [
        (RaggedRow([5, -1], 0, [1, 2], 1), 0, "token_ids"), (RaggedRow([5, 10_000], 0, [1, 2], 1), 0, "token_ids"),
        (RaggedRow([], 0, [1, 2], 0), 0, "token_ids"), (RaggedRow([5, 6], 0, [1, 2], 3), 0, "logits_idx"),
        (RaggedRow([5, 6], 0, [1, 2], -1), 0, "logits_idx"), (RaggedRow([5, 6], 0, [1, 2], 0), 1, "logits_idx"),
        (RaggedRow([5, 6], 0, [1, 2], 1), -1, "logits_idx"), (RaggedRow([5, 6], -1, [1, 2], 1), 0, "context_lens"),
        (RaggedRow([5, 6], 7, [1, 2], 1), 0, "context_lens"), (RaggedRow([5, 6], 5, [1, 2], 1), 2, "context_lens"),
        (RaggedRow([5, 6], 2**40, [1, 2], 1), 0, "context_lens"), (RaggedRow([5, 6], 0, [1, 2], 1), 63, "positions"),
        (RaggedRow([5, 6], 63, [1] * 17, 1), 0, "positions"), (RaggedRow([5, 6], 6, [1, 9], 1), 0, "page_table"),
        (RaggedRow([5, 6], 6, [-1, 2], 1), 0, "page_table"), (RaggedRow([5, 6], 5, [1, 2, 2**62], 1), 2, "page_table"),
    ],
)  # fmt: skip
def test_what_sequences_run_is_looked_at_before_anything_runs(row, further, name, runner):
    before = unwritten(runner)
    good = RaggedRow([7], 3, [3, 4], 1)
    for rows, counts in (([row, good], [further, 0]), ([good, row], [0, further])):
        with pytest.raises(IndexError, match=f"^{name} leads outside of its table$"):
            runner.model.decoder.greedy(rows, runner.kv_cache, runner.model.vocab_size, counts, False, None)
    assert all(map(torch.equal, before, runner.kv_cache.layers))


@pytest.mark.parametrize(
    ("change", "name"),
    [({"num_ids": 0}, "vocab_size"), ({"num_ids": 10_000}, "vocab_size"), ({"leads": 3}, "stop_rule"),
     ({"leads": 1}, "stop_rule"), ({"num_logits": 0}, "stop_rule")],
)  # fmt: skip
def test_a_rule_is_for_the_first_sequences_and_for_all_that_go_on(change, name, runner):
    """Of two sequences, which both go on."""
    options = {"num_ids": 5, "leads": 2, "num_logits": 1} | change
    num_seqs, num_logits = options["leads"], options["num_logits"]
    rule = StopRule(1.0, [0.0], [0.0] * num_seqs, [1.0] * num_seqs, 0.0, 0.0)
    rows = [RaggedRow([7], 2, [3, 4], 1), RaggedRow([7], 2, [1, 2], num_logits)]
    before = unwritten(runner)
    with pytest.raises(IndexError, match=f"^{name} leads outside of its table$"):
        runner.greedy(rows, options["num_ids"], [1, num_logits], stop_rule=rule)
    assert all(map(torch.equal, before, runner.kv_cache.layers))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("token_ids", torch.tensor([5, -1, 7]), IndexError), ("token_ids", torch.tensor([5, 10_000, 7]), IndexError),
        ("token_ids", torch.tensor([5, 6, 7], dtype=torch.int32), ValueError),
        ("positions", torch.tensor([6, 64, 3]), IndexError), ("positions", torch.tensor([-6, 7, 3]), IndexError),
        ("positions", torch.tensor([6, 7, 3], dtype=torch.int32), ValueError),
        ("logits_idx", torch.tensor([1, 3]), IndexError), ("logits_idx", torch.tensor([-1, 2]), IndexError),
        ("logits_idx", torch.tensor([1, 2], dtype=torch.int32), ValueError),
        ("token_ids", apart(torch.tensor([5, 6, 7])), ValueError),
        ("positions", apart(torch.tensor([6, 7, 3])), ValueError),
    ],
)  # fmt: skip
def test_a_decoders_rows_are_looked_at(name, value, error, runner):
    batch = dataclasses.replace(two_sequences(), **{name: value})
    before = unwritten(runner)
    with pytest.raises(error, match=name):
        runner.forward(batch)
    assert all(map(torch.equal, before, runner.kv_cache.layers))


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda x: x[:, :1], lambda x: apart(x)])
def test_a_decoder_takes_pools_of_its_own_shape_alone(change, runner):
    """And knows the size of those that it has taken, whatever was refused since."""
    layers = runner.kv_cache.layers
    runner.forward(two_sequences())
    first, kept = layers
    layers[1] = change(kept)
    try:
        with pytest.raises(ValueError, match=r"^kv_layers is .*; allowed: "):
            runner.forward(two_sequences())
        with pytest.raises(ValueError, match=r"^kv_layers is .*; allowed: "):
            runner.greedy([RaggedRow([7], 3, [3, 4], 1)], 5)
        layers[:] = [torch.cat([pool, pool]).double() for pool in (layers[0], kept)]
        with pytest.raises(ValueError, match=r"^kv_layers is .*; allowed: "):
            runner.greedy([RaggedRow([7], 3, [3, 4], 1)], 5)
    finally:
        layers[:] = [first, kept]
    runner.forward(two_sequences())
    with pytest.raises(IndexError, match="page_table"):
        runner.greedy([RaggedRow([7], 3, [9], 1)], 5)


def test_linear_refuses_what_it_could_not_read():
    x, weight = torch.randn(3, 8), pack_weight(torch.randn(20, 8))
    for bias in (torch.zeros(19), torch.zeros(20).double(), torch.zeros(40)[::2]):
        with pytest.raises(ValueError, match=r"^bias is .*; allowed: \[20\]"):
            linear(x, weight, bias, 20)
    with pytest.raises(ValueError, match=r"^packed is"):
        linear(x, apart(weight), None, 20)
    with pytest.raises(ValueError, match=r"^dtype must be one of"):
        linear(x.half(), weight.half(), None, 20)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("query", torch.empty(6, 0, 16), "num_heads=0"),
        ("query", torch.empty(6, 4, 16, device="meta"), "query is on meta"),
        ("block_size", 0, "block_size=0"),
        ("block_size", 2**40, "block_size="),
    ],
    ids=str,
)
def test_attention_refuses_a_geometry_that_it_could_not_walk(name, value, named):
    world = World([(6, 2), (3, 1)], 4, 2, 16, block_size=BLOCK_SIZE)
    setattr(world, name, value)
    with pytest.raises(ValueError, match=f"^{named}"):
        world.attend()


@pytest.mark.parametrize("block_stride", [0, -(2**40), 2**62 + 2**30])
def test_attention_refuses_strides_that_lead_nowhere(block_stride):
    world = World([(6, 2), (3, 1)], 4, 2, 16, block_size=BLOCK_SIZE)
    with pytest.raises(ValueError, match=f"^block_stride={block_stride}; allowed: 1 to "):
        world.attend(block_stride=block_stride)


def test_row_wise_kernels_refuse_what_they_could_not_read():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"^weight is"):
        rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"^added is"):
        rms_norm(x, torch.ones(8), 1e-6, added=torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"^dtype must be one of"):
        rms_norm(x.half(), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"^x is on meta"):
        rms_norm(torch.empty(3, 8, device="meta"), torch.ones(8), 1e-6)
    qkv = torch.randn(3, 4, 8)
    with pytest.raises(ValueError, match=r"^qkv is on meta"):
        norm_and_rotate(torch.empty(3, 4, 8, device="meta"), 3, None, 1e-6, None, None)
    with pytest.raises(ValueError, match=r"^num_heads=-1; allowed: 0 to 4"):
        norm_and_rotate(qkv, -1, None, 1e-6, None, None)
    for half in ((torch.ones(3, 4), None), (None, torch.ones(3, 4))):
        with pytest.raises(ValueError, match=r"^cosine and sine must both be given"):
            norm_and_rotate(qkv, 3, None, 1e-6, *half)
    with pytest.raises(ValueError, match=r"^num_heads=5; allowed: 0 to 4"):
        norm_and_rotate(qkv, 5, None, 1e-6, None, None)
    with pytest.raises(ValueError, match=r"^cosine is"):
        norm_and_rotate(qkv, 3, None, 1e-6, torch.ones(3, 5), torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"^sine is"):
        norm_and_rotate(qkv, 3, None, 1e-6, torch.ones(3, 4), torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"^gate_up is"):
        gate(torch.randn(3, 7), "silu")


WITHOUT_MEMORY = f"""
import resource
import torch
torch.set_num_threads(1)
from tests.kernels.cpu.world import World
from specpaged_kernels.cpu.linear import linear, pack
small = World([(6, 2)], 4, 2, 16, block_size={BLOCK_SIZE})
expected = small.attend().clone()
x, weight = torch.zeros(200_000, 256, dtype=torch.bfloat16), pack(torch.zeros(16, 256, dtype=torch.bfloat16))
linear(x[:20], weight, None, 16)
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
try:
    linear(x, weight, None, 16)  # 200 MB of what bfloat16 is converted to
except MemoryError as error:
    print("MemoryError:", error)
assert torch.equal(small.attend()[:2], expected[:2])
print("goes on")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited as Linux does it")
def test_a_kernel_without_memory_raises_and_the_process_goes_on():
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, check=False)
    assert done.stdout == "MemoryError: a C++ kernel found no memory for what it computes on the way\ngoes on\n", (
        done.stderr
    )

"""What paging itself costs: ints only, no tensor. Truncating must not depend on the context length."""

import pytest

from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT, TARGET, PageTable

BLOCK_SIZE = 16
NUM_DRAFTS = 5
CONTEXTS = pytest.mark.parametrize("context_len", [128, 2048, 8192], ids="ctx{}".format)
BATCHES = pytest.mark.parametrize("batch_size", [1, 8, 32, 128], ids="B{}".format)


class Batch:
    """Sequences about to cross a block edge, so that every rejected draft gives a block back.

    T known tokens, one short of full blocks: a step writes T + K slots, one block more, and keeps T + 1.
    """

    def __init__(self, batch_size: int, context_len: int):
        self.num_known = context_len - 1
        blocks_each = context_len // BLOCK_SIZE + 1
        self.allocator = BlockAllocator(batch_size * blocks_each)
        self.tables = [PageTable(self.allocator, BLOCK_SIZE, num_pools=2) for _ in range(batch_size)]
        for table in self.tables:
            table.reserve(self.num_known)
            table.advance(TARGET, self.num_known - 1)
            table.advance(DRAFT, self.num_known - 1)
        self.free_before = self.allocator.num_free

    def write_drafts(self) -> None:
        """T - 1 tokens have KV; run the T-th and the drafts."""
        for table in self.tables:
            table.reserve(self.num_known + NUM_DRAFTS)
            table.advance(TARGET, NUM_DRAFTS + 1)
            table.advance(DRAFT, NUM_DRAFTS)

    def reject_drafts(self, kept: int = 1) -> None:
        for table in self.tables:
            table.truncate(TARGET, self.num_known + kept)
            table.truncate(DRAFT, self.num_known + kept)

    def rewind(self) -> None:
        """Back to the start of the step."""
        for table in self.tables:
            table.truncate(TARGET, self.num_known - 1)
            table.truncate(DRAFT, self.num_known - 1)

    def prepare(self) -> None:
        self.rewind()
        self.write_drafts()

    def step(self) -> None:
        """All that a step asks of paging, and back by one token so that it can be repeated."""
        self.write_drafts()
        self.reject_drafts(kept=-1)

    def check(self) -> None:
        self.rewind()
        assert self.allocator.num_free == self.free_before
        self.allocator.check_integrity([table.blocks for table in self.tables])


@pytest.fixture
def record(benchmark, results, request):
    """Puts the benchmark's figures beside the others, in microseconds."""
    yield
    if benchmark.stats is not None:
        stats = benchmark.stats.stats
        figures = {name: round(getattr(stats, name) * 1e6, 3) for name in ("median", "min", "max")}
        results.setdefault("paging", {})[request.node.name.removeprefix("test_")] = {"unit": "us", **figures}


@pytest.mark.benchmark(group="truncate both pools after a rejected draft")
@BATCHES
@CONTEXTS
def test_truncate(benchmark, record, context_len, batch_size):
    batch = Batch(batch_size, context_len)
    benchmark.pedantic(batch.reject_drafts, setup=batch.prepare, rounds=300, warmup_rounds=20)
    batch.check()


@pytest.mark.benchmark(group="reserve, advance and truncate of a whole step", max_time=0.2)
@BATCHES
@CONTEXTS
def test_step(benchmark, record, context_len, batch_size):
    batch = Batch(batch_size, context_len)
    benchmark(batch.step)
    batch.check()


@pytest.mark.benchmark(group="allocate and free 64 blocks", max_time=0.2)
@pytest.mark.parametrize("num_blocks", [1_000, 100_000], ids="pool{}".format)
def test_allocate_free(benchmark, record, num_blocks):
    allocator = BlockAllocator(num_blocks)

    def allocate_and_free():
        for block in [allocator.allocate() for _ in range(64)]:
            allocator.free(block)

    benchmark(allocate_and_free)
    assert allocator.num_free == num_blocks

from __future__ import annotations

import subprocess
import sys

import pytest

from specpaged.paging.block_allocator import BlockAllocator, IntegrityError, OutOfBlocksError


def test_every_block_but_the_null_block_is_handed_out_once():
    allocator = BlockAllocator(5)
    assert sorted(allocator.allocate() for _ in range(5)) == [1, 2, 3, 4, 5]
    assert (allocator.num_free, allocator.num_held) == (0, 5)
    allocator.check_integrity([[1, 2], [3, 4, 5]])


def test_allocate_from_an_empty_pool_raises_and_changes_nothing():
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    with pytest.raises(OutOfBlocksError, match="no block is free: all 1"):
        allocator.allocate()
    allocator.check_integrity([[block]])
    allocator.free(block)
    assert allocator.allocate() == block


def test_a_shared_block_is_free_only_after_its_last_owner_has_left():
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.share(block)
    assert allocator.ref_count(block) == 2
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free) == (1, 1)
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free) == (0, 2)


def test_a_double_free_is_an_error_and_changes_nothing():
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.free(block)
    with pytest.raises(ValueError, match=f"block {block} has no owner .double free"):
        allocator.free(block)
    assert (allocator.num_free, allocator.num_held) == (2, 0)
    allocator.check_integrity([])


@pytest.mark.parametrize("operation", ["share", "mark_cached"])
def test_only_an_allocated_block_can_be_shared_or_cached(operation):
    allocator = BlockAllocator(2)
    with pytest.raises(ValueError, match="block 2 has no owner"):
        getattr(allocator, operation)(2)


@pytest.mark.parametrize("operation", ["claim_cached", "uncache"])
def test_only_a_cached_block_can_be_claimed_or_uncached(operation):
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    with pytest.raises(ValueError, match=f"block {block} is not cached"):
        getattr(allocator, operation)(block)


@pytest.mark.parametrize("operation", ["share", "free", "ref_count", "is_cached", "mark_cached", "uncache"])
@pytest.mark.parametrize("block", [-1, 0, 3])
def test_a_block_outside_the_pool_is_an_error(operation, block):
    allocator = BlockAllocator(2)
    allocator.allocate()
    allocator.allocate()
    with pytest.raises(ValueError, match=rf"block must be in 1..2, got {block}"):
        getattr(allocator, operation)(block)


@pytest.mark.parametrize("num_blocks", [0, -3, 2.0, True, None])
def test_a_pool_has_at_least_one_block(num_blocks):
    with pytest.raises(ValueError, match="num_blocks must be an int >= 1, got"):
        BlockAllocator(num_blocks)


def test_an_unowned_cached_block_counts_as_free_and_comes_last_oldest_first():
    allocator = BlockAllocator(4)
    first, second, third, fourth = (allocator.allocate() for _ in range(4))
    uncached = []
    allocator.on_uncache = uncached.append
    for block in (first, second, third):
        allocator.mark_cached(block)
    for block in (second, fourth, first):  # third stays owned
        allocator.free(block)
    assert (allocator.num_free, allocator.num_held) == (3, 1)
    assert [allocator.allocate() for _ in range(3)] == [fourth, second, first]
    assert uncached == [second, first]
    with pytest.raises(OutOfBlocksError):  # an owned block is not evicted, cached or not
        allocator.allocate()
    assert allocator.is_cached(third)
    allocator.check_integrity([[first, second, third, fourth]])


def test_claiming_a_cached_block_takes_it_out_of_the_free_ones():
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    allocator.mark_cached(block)
    allocator.free(block)
    allocator.claim_cached(block)
    assert (allocator.ref_count(block), allocator.num_free) == (1, 0)
    allocator.claim_cached(block)
    assert allocator.ref_count(block) == 2
    with pytest.raises(OutOfBlocksError):
        allocator.allocate()
    allocator.check_integrity([[block], [block]])


def test_uncaching_keeps_the_owner_and_frees_nothing():
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.mark_cached(block)
    allocator.uncache(block)
    assert (allocator.ref_count(block), allocator.is_cached(block), allocator.num_free) == (1, False, 1)
    allocator.free(block)
    allocator.check_integrity([])


def test_check_integrity_compares_ref_counts_with_the_owners():
    allocator = BlockAllocator(3)
    block = allocator.allocate()
    allocator.check_integrity([[block]])
    for owners in ([], [[block], [block]], [[block, 2]], [[block], [0]], [[block], [9]]):
        with pytest.raises(IntegrityError, match="ref count"):
            allocator.check_integrity(owners)


def _lose_a_block(allocator):
    allocator._free.pop()


def _free_a_block_twice(allocator):
    allocator._free.append(allocator._free[-1])


def _free_an_owned_block(allocator):
    allocator._free.append(1)


def _free_the_null_block(allocator):
    allocator._free.append(0)


def _go_negative(allocator):
    allocator._ref_counts[1] = -1


def _cache_a_free_block(allocator):
    allocator._cached[2] = 1


@pytest.mark.parametrize(
    "break_it",
    [
        _lose_a_block,
        _free_a_block_twice,
        _free_an_owned_block,
        _free_the_null_block,
        _go_negative,
        _cache_a_free_block,
    ],
)
def test_check_integrity_finds_a_broken_pool(break_it):
    allocator = BlockAllocator(3)
    allocator.allocate()
    allocator.check_integrity()
    break_it(allocator)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


def test_the_control_plane_imports_no_torch():
    code = "import sys, specpaged.paging.prefix_cache; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})

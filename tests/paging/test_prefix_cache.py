from __future__ import annotations

import pytest

from specpaged.paging.block_allocator import BlockAllocator, IntegrityError
from specpaged.paging.page_table import DRAFT, TARGET, PageTable
from specpaged.paging.prefix_cache import PrefixCache

S = 4
TOKENS = list(range(100, 112))  # three full blocks


@pytest.fixture
def allocator():
    return BlockAllocator(8)


@pytest.fixture
def cache(allocator):
    return PrefixCache(allocator, S)


def filled(allocator: BlockAllocator, num_tokens: int, num_pools: int = 1) -> PageTable:
    table = PageTable(allocator, S, num_pools)
    table.reserve(num_tokens)
    for pool in range(num_pools):
        table.advance(pool, num_tokens)
    return table


def found(cache: PrefixCache, allocator: BlockAllocator, token_ids, max_tokens=None) -> list[int]:
    """Like match, without keeping the blocks."""
    return matched(cache, allocator, token_ids, max_tokens, 1)[0]


def matched(cache, allocator, token_ids, max_tokens=None, num_pools=2) -> tuple[list[int], list[int]]:
    """Blocks, and how many tokens are valid in each pool; the blocks are not kept."""
    blocks, context_lens = cache.match(token_ids, len(token_ids) if max_tokens is None else max_tokens, num_pools)
    for block in reversed(blocks):
        allocator.free(block)
    return blocks, context_lens


@pytest.mark.parametrize("max_tokens", range(15))
def test_match_finds_full_blocks_below_max_tokens_only(cache, allocator, max_tokens):
    table = filled(allocator, 12)
    assert cache.publish(table, TOKENS) == 3
    assert found(cache, allocator, TOKENS, max_tokens) == table.blocks[: min(max_tokens, 12) // S]


def test_a_match_is_owned_by_its_caller(cache, allocator):
    table = filled(allocator, 12)
    cache.publish(table, TOKENS)
    adopter = PageTable(allocator, S)
    adopter.adopt(*cache.match(TOKENS, 11))
    assert adopter.context_lens == [8]
    allocator.check_integrity([table.blocks, adopter.blocks])
    table.free()
    assert allocator.num_held == 2
    adopter.free()
    assert allocator.num_held == 0


def test_a_block_is_found_by_its_tokens_and_everything_before_them(cache, allocator):
    table = filled(allocator, 8)
    cache.publish(table, TOKENS)
    other_first = [0, *TOKENS[1:]]
    other_second = [*TOKENS[:7], 0]
    assert found(cache, allocator, other_first) == []
    assert found(cache, allocator, other_second) == table.blocks[:1]
    assert found(cache, allocator, TOKENS[4:8]) == []  # the second block's tokens in first place


def test_only_full_blocks_of_committed_tokens_are_published(cache, allocator):
    table = filled(allocator, 12)
    assert cache.publish(table, TOKENS[:3]) == 0
    assert cache.publish(table, TOKENS[:7]) == 1  # positions 7.. hold drafts that nobody has verified
    assert found(cache, allocator, TOKENS) == table.blocks[:1]


def test_a_block_is_found_with_the_pools_that_have_it_and_gains_the_draft_once_that_has_caught_up(cache, allocator):
    table = PageTable(allocator, S, num_pools=2)
    table.reserve(12)
    table.advance(TARGET, 12)
    table.advance(DRAFT, 7)
    # target |xxxx|xxxx|xxxx|
    # draft  |oooo|ooo.|....|
    assert cache.publish(table, TOKENS) == 3 + 1
    assert matched(cache, allocator, TOKENS) == (table.blocks, [12, 4])
    table.advance(DRAFT, 1)
    assert cache.publish(table, TOKENS) == 1
    assert cache.publish(table, TOKENS) == 0
    assert matched(cache, allocator, TOKENS) == (table.blocks, [12, 8])
    cache.check_integrity()


def test_the_draft_s_tokens_end_where_a_block_lacks_them(cache, allocator):
    table = filled(allocator, 12, num_pools=2)
    cache.publish(table, TOKENS)
    second = table.blocks[1]
    table.free()
    allocator.uncache(second)  # the beginning and the end stay
    target_alone = filled(allocator, 8)
    cache.publish(target_alone, TOKENS)
    blocks, context_lens = matched(cache, allocator, TOKENS)
    assert (len(blocks), context_lens) == (3, [12, 4])


def test_blocks_of_the_target_alone_serve_everybody_until_blocks_with_the_draft_take_their_place(cache, allocator):
    target_alone, both = filled(allocator, 8), filled(allocator, 4, num_pools=2)
    assert cache.publish(target_alone, TOKENS) == 2
    assert found(cache, allocator, TOKENS) == target_alone.blocks
    assert matched(cache, allocator, TOKENS) == (target_alone.blocks, [8, 0])
    assert cache.publish(both, TOKENS) == 1
    assert [allocator.is_cached(block) for block in target_alone.blocks] == [False, True]
    assert found(cache, allocator, TOKENS) == [both.blocks[0], target_alone.blocks[1]]
    assert matched(cache, allocator, TOKENS) == ([both.blocks[0], target_alone.blocks[1]], [8, 4])
    again = filled(allocator, 4)
    assert cache.publish(again, TOKENS) == 0
    cache.check_integrity()
    target_alone.free()
    both.free()
    again.free()
    assert matched(cache, allocator, TOKENS)[1][DRAFT] == 4
    allocator.check_integrity([])
    cache.check_integrity()


def test_publish_is_idempotent_and_continues_where_it_ended(cache, allocator):
    table = filled(allocator, 5)
    assert [cache.publish(table, TOKENS[:6]) for _ in range(3)] == [1, 0, 0]
    table.reserve(12)
    table.advance(TARGET, 7)
    assert [cache.publish(table, TOKENS) for _ in range(3)] == [2, 0, 0]
    assert cache.num_cached_blocks == 3
    cache.check_integrity()


def test_of_two_equal_blocks_the_first_stays(cache, allocator):
    first, second = filled(allocator, 8), filled(allocator, 12)
    assert cache.publish(first, TOKENS[:8]) == 2
    assert cache.publish(second, TOKENS) == 1
    assert found(cache, allocator, TOKENS) == [*first.blocks, second.blocks[2]]
    second_only = second.blocks[:2]
    second.free()
    assert not any(allocator.is_cached(block) for block in second_only)
    cache.check_integrity()


def test_an_unowned_block_stays_findable_until_its_space_is_needed(cache, allocator):
    table = filled(allocator, 12)
    cache.publish(table, TOKENS)
    blocks = list(table.blocks)
    table.free()
    assert allocator.num_free == 8
    other = filled(allocator, 5 * S)  # takes the plain free ones
    assert found(cache, allocator, TOKENS) == blocks
    other.reserve(6 * S)
    assert found(cache, allocator, TOKENS) == blocks[:2]  # a continuation goes before what it continues
    other.reserve(8 * S)
    assert found(cache, allocator, TOKENS) == []
    assert (cache.num_cached_blocks, allocator.num_free) == (0, 0)
    cache.check_integrity()
    allocator.check_integrity([other.blocks])


def test_the_prefix_not_used_for_longest_is_evicted_first(cache, allocator):
    prompts = [[i] * S for i in range(8)]
    for prompt in prompts:
        table = filled(allocator, S)
        cache.publish(table, prompt)
        table.free()
    assert found(cache, allocator, prompts[0])  # used just now
    filled(allocator, 2 * S)
    survivors = [i for i, prompt in enumerate(prompts) if found(cache, allocator, prompt)]
    assert survivors == [0, 3, 4, 5, 6, 7]


def test_an_owned_block_is_never_evicted(cache, allocator):
    table = filled(allocator, 8)
    cache.publish(table, TOKENS)
    other = filled(allocator, 6 * S)
    other.free()
    filled(allocator, 6 * S)
    assert found(cache, allocator, TOKENS) == table.blocks


def test_a_continuation_outlives_an_evicted_beginning_and_is_found_again_with_it(cache, allocator):
    first, second = filled(allocator, 4), filled(allocator, 8)
    cache.publish(first, TOKENS)
    cache.publish(second, TOKENS)  # its first block is a copy of first's, and not cached
    first.free()
    hog = filled(allocator, 6 * S)  # evicts the beginning; second holds the continuation
    assert cache.num_cached_blocks == 1
    assert found(cache, allocator, TOKENS) == []
    cache.check_integrity()
    hog.free()
    third = filled(allocator, 4)
    assert cache.publish(third, TOKENS) == 1
    assert found(cache, allocator, TOKENS) == [third.blocks[0], second.blocks[1]]


def test_a_table_whose_equal_block_was_evicted_publishes_its_own(cache, allocator):
    first, second = filled(allocator, 4), filled(allocator, 4)
    cache.publish(first, TOKENS)
    assert cache.publish(second, TOKENS) == 0
    first.free()
    filled(allocator, 7 * S).free()
    assert cache.num_cached_blocks == 0
    second.reserve(8)
    second.advance(TARGET, 4)
    assert cache.publish(second, TOKENS) == 2
    assert found(cache, allocator, TOKENS) == second.blocks


@pytest.mark.parametrize("write", ["reserve", "advance"])
def test_a_block_about_to_be_overwritten_is_no_longer_found(cache, allocator, write):
    table = filled(allocator, 8)
    cache.publish(table, TOKENS)
    table.truncate(TARGET, 6)
    table.reserve(6)
    table.advance(TARGET, 0)
    # |xxxx|xx..|   both blocks are published, and intact
    assert found(cache, allocator, TOKENS) == table.blocks
    if write == "reserve":
        table.reserve(7)
    else:
        table.advance(TARGET, 2)
    assert found(cache, allocator, TOKENS) == table.blocks[:1]
    table.advance(TARGET, 8 - table.context_lens[TARGET])
    assert cache.publish(table, [*TOKENS[:6], 0, 0]) == 1
    assert found(cache, allocator, TOKENS) == table.blocks[:1]
    assert found(cache, allocator, [*TOKENS[:6], 0, 0]) == table.blocks
    cache.check_integrity()


def test_a_reserve_that_fails_leaves_the_cache_as_it_was(cache, allocator):
    table = filled(allocator, 8)
    cache.publish(table, TOKENS)
    table.truncate(TARGET, 6)
    with pytest.raises(RuntimeError):
        table.reserve(1000)
    assert found(cache, allocator, TOKENS) == table.blocks


def test_a_freed_table_publishes_from_its_beginning_again(cache, allocator):
    table = filled(allocator, 8)
    cache.publish(table, TOKENS)
    table.free()
    other = [*TOKENS[:4][::-1], *TOKENS]
    table.reserve(12)
    table.advance(TARGET, 12)
    assert cache.publish(table, other) == 3
    assert found(cache, allocator, other) == table.blocks
    cache.check_integrity()


def test_an_allocator_serves_one_cache(cache, allocator):
    with pytest.raises(ValueError, match="allocator must not have a prefix cache yet"):
        PrefixCache(allocator, S)


def test_bad_arguments_are_named(cache, allocator):
    with pytest.raises(ValueError, match="max_tokens must be >= 0, got -1"):
        cache.match(TOKENS, -1)
    with pytest.raises(ValueError, match="table must have the cache's block size, 4, got 16"):
        cache.publish(PageTable(allocator, 16), TOKENS)
    with pytest.raises(ValueError, match="block_size must be an int >= 1, got 0"):
        PrefixCache(BlockAllocator(1), 0)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda cache, allocator: allocator._cached.__setitem__(1, 0),
        lambda cache, allocator: allocator._cached.__setitem__(5, 1),
        lambda cache, allocator: cache._nodes.pop(2),
        lambda cache, allocator: setattr(cache._nodes[2], "parent", cache._root),
        lambda cache, allocator: setattr(cache._nodes[2], "block", 0),
    ],
)
def test_check_integrity_finds_a_broken_cache(cache, allocator, break_it):
    cache.publish(filled(allocator, 8), TOKENS)
    cache.check_integrity()
    break_it(cache, allocator)
    with pytest.raises(IntegrityError):
        cache.check_integrity()


def test_a_table_that_publishes_its_own_after_an_eviction_does_so_in_every_pool(cache, allocator):
    first, second = filled(allocator, 4, num_pools=2), filled(allocator, 4, num_pools=2)
    cache.publish(first, TOKENS)
    assert cache.publish(second, TOKENS) == 0
    first.free()
    filled(allocator, 7 * S).free()  # evicts the first block
    second.reserve(8)
    second.advance(TARGET, 4)
    assert cache.publish(second, TOKENS) == 2 + 1
    assert matched(cache, allocator, TOKENS) == (second.blocks, [8, 4])


def test_a_table_cut_below_what_the_target_has_published_publishes_every_pool_from_the_beginning(cache, allocator):
    """The draft, which was behind, has lost nothing: yet its blocks are not to be hung below its last one."""
    table = filled(allocator, 8, num_pools=2)
    table.truncate(DRAFT, S)
    cache.publish(table, TOKENS[:8])
    assert table.num_published == [2, 1]
    table.truncate(TARGET, S)
    cache.publish(table, TOKENS[:S])
    cache.check_integrity()
    assert matched(cache, allocator, TOKENS) == ([1, 2], [8, S])


@pytest.fixture
def looking_ahead(allocator):
    return PrefixCache(allocator, S, looks_ahead=True)


@pytest.mark.parametrize("behind", [[], [1], [1, 2, 3, 4, 5]])
def test_of_a_draft_that_looks_ahead_the_last_block_serves_nobody(looking_ahead, allocator, behind):
    """Behind it another token may have stood. Who has no draft takes all."""
    table = filled(allocator, 12, 2)
    looking_ahead.publish(table, TOKENS)
    assert matched(looking_ahead, allocator, TOKENS + behind) == (table.blocks[:2], [8, 8])
    assert matched(looking_ahead, allocator, TOKENS[:6]) == ([], [0, 0])
    assert matched(looking_ahead, allocator, TOKENS + behind, num_pools=1) == (table.blocks, [12])


def test_a_draft_that_looks_ahead_takes_no_block_that_it_could_not_catch_up_with(looking_ahead, allocator):
    table = filled(allocator, 12, 2)
    table.context_lens[DRAFT] = 9
    looking_ahead.publish(table, TOKENS)
    assert matched(looking_ahead, allocator, TOKENS) == (table.blocks[:1], [4, 4])
    assert matched(looking_ahead, allocator, TOKENS, num_pools=1) == (table.blocks, [12])
    looking_ahead.check_integrity()


def test_a_draft_that_looks_ahead_takes_no_block_behind_which_its_publisher_went_on_otherwise(looking_ahead, allocator):
    """A: abcd|xxxx, B: abcd|yyyy|zzzz with an abcd of its own: the first abcd's last pair is (d, x)."""
    first, second = filled(allocator, 8, 2), filled(allocator, 12, 2)
    shared, ys, zs = [1, 2, 3, 4], [7, 7, 7, 7], [8, 8, 8, 8]
    looking_ahead.publish(first, [*shared, 5, 5, 5, 5])
    looking_ahead.publish(second, shared + ys + zs)
    assert matched(looking_ahead, allocator, shared + ys + zs) == ([], [0, 0])
    assert matched(looking_ahead, allocator, [*shared, 5, 5, 5, 5, 6]) == (first.blocks[:1], [4, 4])
    assert matched(looking_ahead, allocator, shared + ys + zs, num_pools=1)[1] == [12]

"""What fits into a budget of memory, with and without drafting, and which of it to take. See docs/memory.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpaged.planning.memory_model import RECORDS, MemoryModel
from specpaged.planning.pass_costs import PassCosts
from specpaged.planning.speed import Speed
from specpaged.planning.way import Way

MOST_DRAFTS = 8  # as deep as an engine goes of its own accord
_STEPS = 48  # of memory, in a picture, and where the bound is looked for
_PRECISION = 1 << 20  # bytes, to which the bound is found


@dataclass(frozen=True)
class Planner:
    """Plans for sequences of `context` tokens, drafts included, `batch` of them at most (None: as many as there fit).

    `plain` and `drafting` are layouts by name, the draft being in the latter alone.
    """

    costs: PassCosts
    plain: dict[str, MemoryModel]
    drafting: dict[str, MemoryModel]
    context: int
    batch: int | None = None
    most_drafts: int = MOST_DRAFTS

    def ways(self, memory: int) -> list[Way]:
        """Plain decoding, and each layout that drafts at its best K; whatever does not fit has a batch of 0."""
        ways = [self._way(name, model, memory, (0,)) for name, model in self.plain.items()]
        depths = range(1, self.most_drafts + 1)
        return ways + [self._way(name, model, memory, depths) for name, model in self.drafting.items()]

    def gain(self, memory: int) -> tuple[float, float]:
        """Tokens a second of the best plain way, and of the best that drafts."""
        ways = self.ways(memory)
        plain = max((way.tokens_per_second for way in ways if way.num_drafts == 0), default=0.0)
        return plain, max((way.tokens_per_second for way in ways if way.num_drafts), default=0.0)

    def memories(self, memory: int) -> list[int]:
        """From what one sequence takes to twice the budget, evenly."""
        least = min(model.num_bytes(1, self.context) for model in self.plain.values())
        most = max(2 * memory, 2 * least)
        return [least + i * (most - least) // _STEPS for i in range(_STEPS + 1)]

    def pays(self, memory: int) -> bool:
        """Whether drafting brings more than plain decoding in so many bytes."""
        plain, drafting = self.gain(memory)
        return drafting > plain

    def bound(self, memory: int) -> int | None:
        """The bytes from which on drafting pays, up to twice the budget at most; None where it does not there.

        Batches are whole, so that there are bytes above it at which one more sequence of plain decoding fits, and
        none more of those that draft: what is returned is the end of the last stretch in which it does not pay.
        """
        grid = self.memories(memory)
        pays = [self.pays(amount) for amount in grid]
        if not pays[-1]:
            return None
        last_without = max((i for i, does in enumerate(pays) if not does), default=None)
        if last_without is None:
            return grid[0]
        low, high = grid[last_without], grid[last_without + 1]
        while high - low > _PRECISION:
            middle = (low + high) // 2
            low, high = (low, middle) if self.pays(middle) else (middle, high)
        return high

    def _way(self, name: str, model: MemoryModel, memory: int, depths: Sequence[int]) -> Way:
        speed = Speed(self.costs, 0.5 * self.context, model.window)  # contexts are half as long in the mean
        ways = []
        for k in depths:
            largest = model.largest_batch(memory, self.context - k, k)
            batch = largest if self.batch is None else min(largest, self.batch)
            brings = speed.tokens_per_second(batch, k, model.num_drafting(batch))
            ways.append(Way(name, model, k, batch, largest, brings))
        return max(ways, key=lambda way: (way.tokens_per_second, -way.num_drafts))


def closed_bound(memory: MemoryModel, speed: float, context: int) -> float | None:
    """The bytes from which on drafting pays where passes take as long for a batch as for one sequence.

    It is `speed` times as fast as plain decoding in the same batch. With weights W and W', KV k and k' of a sequence,
    it pays if  speed * (M - W - W') / (k + k') > (M - W) / k,  that is  M > W + W' / (1 - (1 + k' / k) / speed).  None
    where speed <= 1 + k' / k: batches are smaller by more than they are faster, whatever memory there is.
    """
    if memory.draft is None:
        return None
    ratio = 1.0 + memory.drafting_share * memory.of_draft(context).total / memory.of_target(context).total
    if speed <= ratio:
        return None
    beside = memory.null_blocks + memory.workspace(1) + RECORDS
    return memory.target.weight_bytes + beside + memory.draft.weight_bytes / (1.0 - ratio / speed)

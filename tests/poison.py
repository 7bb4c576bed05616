"""A request whose logits turn to NaN, in an engine whose unowned slots hold NaN all along."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specpaged import LLM
from specpaged.modeling.forward_output import Argmax, ForwardOutput
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedBatch


def spoil_logits(runner: ModelRunner, spoil: Callable[[RaggedBatch, Tensor], None], monkeypatch) -> None:
    """Let `spoil` change the logits of every pass, in place, before anything is made of them."""
    forward = runner.forward

    def spoiled_forward(batch, *, argmax_of=None, hidden=None):
        output = forward(batch, hidden=hidden)
        spoil(batch, output.logits)
        if argmax_of is None:
            return output
        return ForwardOutput(None, Argmax.of(output.logits[:, :argmax_of]), output.hidden_states)

    monkeypatch.setattr(runner, "forward", spoiled_forward)
    monkeypatch.setattr(runner, "runs_greedy", False)  # which makes no logits that could be seen


class Poison:
    """Spoils the request with this prompt once it has `after` output tokens; `reused_blocks` were its blocks."""

    def __init__(self, llm: LLM, prompt: list[int], after: int, monkeypatch):
        self.engine = llm.engine
        self.prompt = prompt
        self.after = after
        self.victim_blocks: set[int] = set()
        self.reused_blocks: set[int] = set()
        self._schedule = self.engine.scheduler.schedule
        spoil_logits(self.engine.target, self.spoil, monkeypatch)
        monkeypatch.setattr(self.engine.scheduler, "schedule", self.schedule)

    def victim(self):
        running = self.engine.scheduler.running
        return next((s for s in running if s.token_ids[: len(self.prompt)] == self.prompt), None)

    def schedule(self):
        engine = self.engine
        for pool, runner in enumerate(filter(None, (engine.target, engine.draft))):
            tables = [sequence.page_table for sequence in engine.scheduler]
            owned = {slot for t in tables for slot in slots(t.blocks, t.context_lens[pool], engine.config.block_size)}
            runner.kv_cache.fill_unowned(owned)
        if self.victim_blocks and self.victim() is None:
            held = {block for sequence in engine.scheduler for block in sequence.page_table.blocks}
            self.reused_blocks |= held & self.victim_blocks
        return self._schedule()

    def spoil(self, batch, logits):
        sequence = self.victim()
        if sequence is not None and len(sequence.output_token_ids) >= self.after:
            self.victim_blocks.update(sequence.page_table.blocks)
            owners = [n for n, count in enumerate(batch.num_logits) for _ in range(count)]
            first_blocks = batch.page_table[:, 0].tolist()
            rows = [r for r, n in enumerate(owners) if first_blocks[n] == sequence.page_table.blocks[0]]
            logits[rows] = float("nan")


def slots(blocks, length, block_size):
    return [blocks[p // block_size] * block_size + p % block_size for p in range(length)]

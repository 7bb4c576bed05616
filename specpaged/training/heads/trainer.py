"""The training loop of heads: resumable to the bit.

Whole microbatches run on threads of their own, and the target's pass of the next batch on another one, each with one
thread inside: threads that wait for each other within an operation suffer beside busy neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specpaged.training.heads.acceptance import Acceptance, measure_heads
from specpaged.training.heads.batches import Batch, batch_indices
from specpaged.training.heads.budget import Budget
from specpaged.training.heads.clover import Clover
from specpaged.training.heads.continuations import Continuation
from specpaged.training.heads.distillation import distillation_loss
from specpaged.training.heads.eagle3 import Eagle3
from specpaged.training.heads.target import FrozenTarget
from specpaged.training.trainer import gradients, load_checkpoint, save_checkpoint

BETAS = (0.9, 0.95)
CLIP = 0.5  # of the gradient's norm, as published for both
MICROBATCH = {"cpu": 2, "cuda": 4}  # sequences
NUM_EVALUATIONS = 16


@dataclass
class Settings:
    """What a trainer is told beside the models and the text."""

    batch_size: int
    learning_rate: float
    seed: int
    threads: int
    save_every: float  # seconds between two checkpoints


@dataclass
class Progress:
    """Where a run shows how far it is: a share of 0 to 1 with a line beside it, and lines that stay."""

    show: Callable[[float, str], object] = field(default=lambda share, line: None)
    say: Callable[[str], object] = field(default=lambda line: None)


class Trainer:
    """Heads, their optimiser, and the position of their run: all that a checkpoint holds."""

    def __init__(
        self,
        heads: Eagle3 | Clover,
        target: FrozenTarget,
        train: Sequence[Continuation],
        held_out: Sequence[Continuation],
        budget: Budget,
        settings: Settings,
        checkpoint: Path,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.heads, self.target = heads.to(target.device), target
        self.train, self.held_out = train, held_out
        self.budget, self.settings = budget, settings
        self.checkpoint, self.clock = checkpoint, clock
        self.optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.learning_rate, betas=BETAS, weight_decay=0.0)
        self.lengths = [len(continuation.all_token_ids) for continuation in train]
        self.position: dict[str, Any] = {"step": 0, "elapsed": 0.0, "tokens": 0, "losses": [], "curve": []}
        if checkpoint.exists():
            self.position = load_checkpoint(checkpoint, self.heads, [self.optimizer])

    def run(self, progress: Progress) -> Acceptance:
        """Train until the budget is over; returns the acceptance at the end."""
        position, budget, settings = self.position, self.budget, self.settings
        workers = settings.threads if self.target.device.type == "cpu" else 1
        last = self.clock()
        saved = position["elapsed"]
        one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with (
            ThreadPoolExecutor(workers, **one_thread) as pool,
            ThreadPoolExecutor(1, **one_thread) as self._target_thread,
        ):
            if not position["curve"]:
                self._evaluate(progress)
            self._next = self._submit_batch(position["step"])
            while not budget.is_over(position["step"], position["elapsed"]):
                loss, num_tokens = self._step(pool, workers)
                position["losses"].append(loss)
                position["tokens"] += num_tokens
                position["step"] += 1
                now = self.clock()
                position["elapsed"] += now - last
                line = f"step {position['step']}, loss {loss:.3f}, {num_tokens / max(now - last, 1e-9):.0f} tokens/s"
                last = now
                share = budget.progress(position["step"], position["elapsed"])
                progress.show(share, f"{line}, acceptance {self._last_length():.2f}")
                is_over = share >= 1
                if is_over or share * NUM_EVALUATIONS >= len(position["curve"]):
                    self._evaluate(progress)
                if is_over or position["elapsed"] - saved >= settings.save_every:
                    saved = position["elapsed"]
                    save_checkpoint(self.checkpoint, self.heads, [self.optimizer], position)
        return Acceptance(**position["curve"][-1]["acceptance"])

    def _step(self, pool: ThreadPoolExecutor, workers: int) -> tuple[float, int]:
        """One update; returns its loss and how many tokens its sequences have."""
        position, settings, heads = self.position, self.settings, self.heads
        batch = self._next.result()
        self._next = self._submit_batch(position["step"] + 1)
        size = min(MICROBATCH[self.target.device.type], max(1, settings.batch_size // workers))
        microbatches = batch.microbatches(size, heads.num_steps, heads.decay)
        loss, grads = gradients(
            heads, lambda heads, part: distillation_loss(heads, self.target, part), microbatches, pool, workers
        )
        for parameter, grad in zip(heads.parameters(), grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(heads.parameters(), CLIP)
        factor = self.budget.rate_factor(position["step"], position["elapsed"])
        self.optimizer.param_groups[0]["lr"] = settings.learning_rate * factor
        self.optimizer.step()
        return loss, int(batch.lengths.sum())

    def _submit_batch(self, step: int) -> Future[Batch]:
        """The batch of a step, on the one thread that runs the target."""
        picked = batch_indices(self.lengths, step, self.settings.batch_size, self.settings.seed)
        return self._target_thread.submit(Batch.of, [self.train[i] for i in picked], self.heads, self.target)

    def _evaluate(self, progress: Progress) -> None:
        """Another point of the curve: the mean loss since the one before, and acceptance on held-out text."""
        position = self.position
        measured = (self.heads, self.target, self.held_out, self.settings.batch_size)
        acceptance = self._target_thread.submit(measure_heads, *measured).result()
        losses = position["losses"]
        mean_loss = sum(losses) / len(losses) if losses else None
        of_it = {"starts": acceptance.starts, "accepted": list(acceptance.accepted)}
        position["curve"].append({"step": position["step"], "loss": mean_loss, "acceptance": of_it})
        position["losses"] = []
        shares = " ".join(f"{share:.2f}" for share in acceptance.by_position)
        of_loss = "" if mean_loss is None else f"loss {mean_loss:.3f}, "
        progress.say(
            f"step {position['step']}, {position['tokens']} tokens: {of_loss}acceptance by position {shares}, "
            f"mean length {acceptance.mean_length:.2f}"
        )

    def _last_length(self) -> float:
        return Acceptance(**self.position["curve"][-1]["acceptance"]).mean_length

"""Distils one draft, and keeps it after every so many tokens. Resumable to the bit.

The rate is constant behind a warm-up, as a rate that falls would have to know where training ends, and every checkpoint
is to be what training would have ended with there. What is kept is an average of the weights over the last tenth or so
of the steps, whose length grows with them: polynomial-decay averaging (Shamir and Zhang 2013, arXiv 1212.1824).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpaged.training.draft import ARGMAX_WEIGHT
from specpaged.training.heads.batches import batch_indices
from specpaged.training.scaling.lessons import Lesson
from specpaged.training.trainer import gradients, load_checkpoint, make_optimizers, save_checkpoint

MUON_RATE, ADAM_RATE = 0.02, 4e-3  # the embedded draft's
WARM_UP_STEPS = 10
AVERAGED = 8  # the average reaches back over about 1 / (1 + AVERAGED) of the steps
CLIP = 1.0
SAVE_SECONDS = 60.0


class DraftTrainer:
    """A draft in training, the average of its weights, its optimisers and its position."""

    def __init__(
        self,
        draft: torch.nn.Module,
        lessons: Sequence[Lesson],
        batch_size: int,
        seed: int,
        checkpoint: Path,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.draft, self.average = draft, deepcopy(draft).requires_grad_(False)
        self._both = torch.nn.ModuleList([draft, self.average])
        self.lessons, self.lengths = lessons, [len(lesson.token_ids) for lesson in lessons]
        self.batch_size, self.seed = batch_size, seed
        self.checkpoint, self.threads, self.clock = checkpoint, threads, clock
        self.optimizers = make_optimizers(draft, MUON_RATE, ADAM_RATE)
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.position: dict[str, Any] = {"step": 0, "tokens": 0, "loss": None}
        if checkpoint.exists():
            self.position = load_checkpoint(checkpoint, self._both, self.optimizers)

    def train(self, tokens: int, deadline: float, on_step: Callable[[int, float], object]) -> bool:
        """Go on until so many tokens have been learned from, or until the clock says `deadline`; whether they have.

        Both ways the position is saved. At least one step is made where tokens are missing. `on_step` is told of the
        tokens and the loss.
        """
        saved = self.clock()
        one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with ThreadPoolExecutor(self.threads, **one_thread) as pool:
            while self.position["tokens"] < tokens:
                self._step(pool)
                on_step(self.position["tokens"], self.position["loss"])
                now = self.clock()
                if now >= deadline:
                    break
                if now - saved >= SAVE_SECONDS:
                    saved = now
                    self.save()
        self.save()
        return self.position["tokens"] >= tokens

    def save(self) -> None:
        """Write weights, average, optimisers and position."""
        save_checkpoint(self.checkpoint, self._both, self.optimizers, self.position)

    def _step(self, pool: ThreadPoolExecutor) -> None:
        position = self.position
        step = position["step"]
        picked = batch_indices(self.lengths, step, self.batch_size, self.seed)
        parts = [picked[i :: self.threads] for i in range(min(self.threads, len(picked)))]
        total = sum(self.lessons[i].num_tokens for i in picked)
        batches = [(Batch.of([self.lessons[i] for i in part]), len(parts) / total) for part in parts]
        loss, grads = gradients(self.draft, _loss, batches, pool, self.threads)
        for parameter, grad in zip(self.draft.parameters(), grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), CLIP)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP_STEPS)
            optimizer.step()
        share = (AVERAGED + 1) / (AVERAGED + 1 + step)
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.draft.parameters(), strict=True):
                mean.lerp_(parameter, share)
        position["step"], position["tokens"], position["loss"] = step + 1, position["tokens"] + total, loss


class Batch:
    """Lessons side by side. Dimensions: B of them, T tokens of the longest but its last one, N tokens to learn from."""

    def __init__(self, token_ids: Tensor, rows: Tensor, top_ids: Tensor, top_probs: Tensor):
        self.token_ids = token_ids  # [B, T] int64, zeros behind a lesson's end, which no row before it reads
        self.rows = rows  # [N] int64: those of [B * T] that say something of a token to learn from
        self.top_ids, self.top_probs = top_ids, top_probs  # [N, TOP]

    @classmethod
    def of(cls, lessons: Sequence[Lesson]) -> Batch:
        """The lessons, in their order."""
        token_ids = torch.nn.utils.rnn.pad_sequence([lesson.token_ids[:-1] for lesson in lessons], batch_first=True)
        width = token_ids.shape[1]
        rows = [
            torch.arange(i * width + lesson.prompt_length - 1, i * width + len(lesson.token_ids) - 1)
            for i, lesson in enumerate(lessons)
        ]
        tops = torch.cat([lesson.top_ids for lesson in lessons]), torch.cat([lesson.top_probs for lesson in lessons])
        return cls(token_ids, torch.cat(rows), *tops)


def _loss(draft: torch.nn.Module, batch: tuple[Batch, float]) -> Tensor:
    """Of a batch and a weight: cross-entropy to the target's TOP probabilities, plus that to its most likely token."""
    lessons, weight = batch
    hidden = draft.model(input_ids=lessons.token_ids, use_cache=False).last_hidden_state
    logits = draft.lm_head(hidden.flatten(0, 1)[lessons.rows])
    log_draft = logits.log_softmax(-1).gather(-1, lessons.top_ids)
    losses = (lessons.top_probs * log_draft).sum(-1) + ARGMAX_WEIGHT * log_draft[:, 0]
    return -weight * losses.sum()

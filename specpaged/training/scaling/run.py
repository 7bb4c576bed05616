"""Trains the drafts of a recipe one after the other, and goes on where it was stopped."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specpaged.training.export import export
from specpaged.training.heads.continuations import open_engine
from specpaged.training.heads.target import FrozenTarget
from specpaged.training.scaling.draft_model import fresh_draft
from specpaged.training.scaling.lessons import Lesson, LessonFiles
from specpaged.training.scaling.recipe import Recipe, write_json
from specpaged.training.scaling.shape import DraftShape
from specpaged.training.scaling.trainer import DraftTrainer

POSITION = "training.json"  # beside a kept draft: what it has been trained on
Progress = Callable[[str, int], Callable[[int], object]]


class TrainingRun:
    """The run of a recipe in a folder.

    What is in the folder: `lessons/`, `checkpoints/SIZE.safetensors` to go on from, and `drafts/SIZE/TOKENS/`, which
    are drafts like any others, each with what it was trained on in training.json.
    """

    def __init__(self, recipe: Recipe, work: Path, prompts: Sequence[Sequence[int]], threads: int = 1):
        self.recipe, self.work, self.threads = recipe, work, threads
        self.lessons = LessonFiles(work / "lessons", prompts, recipe.continuations, recipe.seed)
        self._target: FrozenTarget | None = None

    def draft_of(self, shape: DraftShape, tokens: int) -> Path:
        """Where a draft lies, or will lie."""
        return self.work / "drafts" / shape.name / str(tokens)

    @property
    def missing(self) -> list[tuple[DraftShape, int]]:
        """The drafts that are still to be trained, in the order in which they are."""
        of_all = [(shape, tokens) for shape in self.recipe.shapes for tokens in self.recipe.checkpoints]
        return [key for key in of_all if not (self.draft_of(*key) / POSITION).is_file()]

    def run(self, progress: Progress, seconds: float = float("inf")) -> bool:
        """Do what is left to do, or as much of it as `seconds` allow; whether nothing is left."""
        deadline = time.monotonic() + seconds
        if not self.missing:
            return True
        torch.set_num_threads(self.threads)
        if not self._write_lessons(progress, deadline):
            return False
        lessons = self.lessons.read()
        for shape in dict.fromkeys(shape for shape, _ in self.missing):
            if not self._train(shape, lessons, progress, deadline):
                return False
        return True

    def _write_lessons(self, progress: Progress, deadline: float) -> bool:
        missing = self.lessons.missing
        if not missing:
            return True
        length = self.recipe.sequence_length
        llm = open_engine(self.recipe.target, length, "cpu")
        advance = progress("files of continuations", len(missing))
        for number in missing:
            self.lessons.write(number, llm, self.target, length)
            advance(1)
            if time.monotonic() >= deadline:
                break
        return not self.lessons.missing

    def _train(self, shape: DraftShape, lessons: Sequence[Lesson], progress: Progress, deadline: float) -> bool:
        recipe = self.recipe
        folder = self.work / "checkpoints"
        folder.mkdir(exist_ok=True)
        trainer = DraftTrainer(
            fresh_draft(shape, self.target, recipe.seed),
            lessons,
            recipe.batch_size,
            recipe.seed,
            folder / f"{shape.name}.safetensors",
            self.threads,
        )
        for tokens in recipe.checkpoints:
            if (self.draft_of(shape, tokens) / POSITION).is_file():
                continue
            if trainer.position["tokens"] >= tokens + recipe.batch_size * recipe.sequence_length:
                raise ValueError(
                    f"--checkpoints names {tokens}, and training {shape.name} is past that, at "
                    f"{trainer.position['tokens']}; allowed: later ones, or another --work"
                )
            before = trainer.position["tokens"]
            advance = _counter(progress(f"{shape.name}: tokens to {tokens}", max(0, tokens - before)), before)
            if not trainer.train(tokens, deadline, advance):
                return False
            self._keep(trainer, shape, tokens)
            if time.monotonic() >= deadline and self.missing:
                return False
        return True

    def _keep(self, trainer: DraftTrainer, shape: DraftShape, tokens: int) -> None:
        """The average of the weights as a draft; its last file is there when all are."""
        from transformers import AutoTokenizer

        folder = self.draft_of(shape, tokens)
        partial = folder.with_name(f"{tokens}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        export(trainer.average, AutoTokenizer.from_pretrained(self.recipe.target), partial)
        position = {name: trainer.position[name] for name in ("tokens", "step", "loss")}
        write_json(partial / POSITION, {"size": shape.name} | position)
        os.replace(partial, folder)

    @property
    def target(self) -> FrozenTarget:
        """The target, loaded when it is first asked for."""
        if self._target is None:
            self._target = FrozenTarget.load(self.recipe.target, self.recipe.sequence_length, "cpu")
        return self._target


def _counter(advance: Callable[[int], object], start: int) -> Callable[[int, float], object]:
    last = start

    def on_step(tokens: int, loss: float) -> None:
        nonlocal last
        advance(tokens - last)
        last = tokens

    return on_step

"""A training run from its arguments to its folder: checks, continuations, heads, figures. Started again, it goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specpaged.training.heads.acceptance import (
    LONGEST_LOOKUP,
    NUM_DRAFTS,
    Acceptance,
    measure_heads,
    measure_prompt_lookup,
)
from specpaged.training.heads.arguments import (
    DEFAULT_DRAFT_VOCAB_SIZE,
    TrainingArguments,
    check_out,
)
from specpaged.training.heads.budget import Budget
from specpaged.training.heads.clover import Clover
from specpaged.training.heads.continuations import Continuation, ContinuationFile, Request, open_engine, request_of
from specpaged.training.heads.curve import draw_curve
from specpaged.training.heads.eagle3 import Eagle3
from specpaged.training.heads.head_checkpoint import save_heads
from specpaged.training.heads.model_card import model_card, serving_line
from specpaged.training.heads.prompt_data import Prompts, read_data, tokenize
from specpaged.training.heads.speed import measure_speed
from specpaged.training.heads.target import FrozenTarget, check_target
from specpaged.training.heads.trainer import Progress, Settings, Trainer
from specpaged.training.heads.vocabulary import draft_vocabulary

WRITING_SHARE = 0.2  # of a budget of time, where no number of continuations is asked for
SPEED_SHARE = 0.02  # of a budget of time, in which the engine decodes with the heads
SPEED_SECONDS_OF_STEPS = 30.0  # at most, where steps are counted
CONTINUATIONS_OF_STEPS = 2048  # where steps are counted, and no number is asked for
MOST_CONTINUATIONS = 65_536
SAVE_SECONDS = 60.0
EARLY_TOKENS = 64  # of continuations, measured by themselves: small targets repeat themselves later on
SAMPLE = 8  # continuations that fresh heads are fitted to the scale of
# By width: as published, and what a narrow target's heads learned most with in a few minutes.
LEARNING_RATES = {"eagle3": {256: 3e-3, 4096: 1e-4}, "clover": {256: 8e-3, 4096: 1e-3}}


class TrainingRun:
    """A run that can begin, or go on: everything that could be wrong with its arguments has been looked at.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments
        data = read_data(arguments.data)
        self.sequence_length = check_target(arguments.target, arguments.sequence_length)
        self.out = Path(arguments.out)
        self.work = self.out / "training"
        check_out(self.out)
        identity = arguments.identity()
        if (self.work / "run.json").is_file():
            arguments.check_is_run(identity, json.loads((self.work / "run.json").read_text()))
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        self.threads = torch.get_num_threads()
        self._files = {name: ContinuationFile(self.work / f"{name}.jsonl") for name in ("held_out", "train")}
        self._llm, self._prompts = None, None
        if not all(file.is_complete for file in self._files.values()):
            self._llm = open_engine(arguments.target, self.sequence_length, arguments.device)
            if self._llm.tokenizer is None:
                raise ValueError(f"--target={arguments.target!r} has no tokenizer; allowed: a checkpoint with one")
            self._prompts = tokenize(data, self._llm.tokenizer, arguments.target, self.sequence_length)
        self.work.mkdir(parents=True, exist_ok=True)
        _write_json(self.work / "run.json", identity)

    def run(self, progress: Progress) -> dict[str, Any]:
        """Do all that is left to do; returns what final.json holds."""
        final = self.out / "final.json"
        if final.is_file():
            return json.loads(final.read_text())
        self._write_continuations(progress)
        self._llm = self._prompts = None  # their memory is for training
        train, held_out = self._files["train"].read(), self._files["held_out"].read()
        if not train or not held_out:
            raise ValueError(
                f"--target={self.arguments.target!r} writes next to nothing behind the prompts of "
                f"--data={self.arguments.data!r}: there is nothing to learn from"
            )
        lookup, shortest = measure_prompt_lookup(held_out)
        target = FrozenTarget.load(self.arguments.target, self.sequence_length, self.arguments.device)
        trainer = self._trainer(target, train, held_out)
        acceptance = trainer.run(progress)
        save_heads(trainer.heads, self.out, target.loaded.dtype)
        figures = self._figures(trainer, acceptance, lookup, shortest) | {"early": self._early(trainer)}
        del trainer, target  # the engine has a target of its own
        progress.show(1.0, "the engine's speed")
        figures["speed"] = self._speed(held_out)
        title = f"{self.arguments.method} heads for {self.arguments.target}"
        progress.say(draw_curve(figures["curve"], lookup, title, self.out / "curve.png"))
        (self.out / "README.md").write_text(model_card(figures, (self.out / "curve.png").exists()), encoding="utf-8")
        _write_json(final, figures)  # the last file: a run that has it is over
        return figures

    def _write_continuations(self, progress: Progress) -> None:
        if self._llm is None:
            return
        arguments, prompts = self.arguments, self._prompts
        requests: dict[str, tuple[Callable[[int], Request], int, float | None]] = {
            "held_out": (partial(_held_out_request, prompts), len(prompts.held_out), None),
            "train": (
                partial(request_of, prompts.train, seed=arguments.seed),
                self._num_continuations(),
                None if arguments.seconds is None else WRITING_SHARE * arguments.seconds,
            ),
        }
        for name, (request_at, count, seconds) in requests.items():
            file = self._files[name]

            def show(done: int, count: int = count, seconds: float | None = seconds, file: Any = file) -> None:
                by_time = 0.0 if seconds is None else file.seconds / seconds
                progress.show(min(1.0, max(done / count, by_time)), f"{done} continuations")

            file.write(self._llm, request_at, count, seconds, show)
        progress.say(
            f"{self._files['train'].count} continuations to train on, {self._files['held_out'].count} held out, "
            f"{self._files['train'].seconds:.0f} s"
        )

    def _num_continuations(self) -> int:
        if self.arguments.continuations is not None:
            return self.arguments.continuations
        return CONTINUATIONS_OF_STEPS if self.arguments.seconds is None else MOST_CONTINUATIONS

    def _trainer(self, target: FrozenTarget, train: list[Continuation], held_out: list[Continuation]) -> Trainer:
        arguments = self.arguments
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(arguments.seed)
            if arguments.method == "clover":
                heads = Clover.fresh(target)
            else:
                vocab_size = target.config.vocab_size
                size = min(vocab_size, arguments.draft_vocab_size or DEFAULT_DRAFT_VOCAB_SIZE)
                heads = Eagle3.fresh(target, draft_vocabulary(train, vocab_size, size), _sample(train))
        seconds = arguments.seconds
        if seconds is not None:
            written = self._files["train"].seconds + self._files["held_out"].seconds
            seconds = max(1.0, (1 - SPEED_SHARE) * seconds - written)
        rate = arguments.learning_rate or default_learning_rate(arguments.method, target.config.hidden_size)
        settings = Settings(arguments.batch_size, rate, arguments.seed, self.threads, SAVE_SECONDS)
        budget = Budget(arguments.steps, seconds)
        return Trainer(heads, target, train, held_out, budget, settings, self.work / "checkpoint.safetensors")

    def _early(self, trainer: Trainer) -> dict[str, Any]:
        """The same figures of the first EARLY_TOKENS tokens of the held-out continuations."""
        texts = [Continuation(c.prompt_token_ids, c.token_ids[:EARLY_TOKENS]) for c in trainer.held_out]
        heads = measure_heads(trainer.heads, trainer.target, texts, self.arguments.batch_size)
        lookup = measure_prompt_lookup(texts)[0]
        return {"tokens": EARLY_TOKENS, "heads": heads.as_dict(), "prompt_lookup": lookup.as_dict()}

    def _speed(self, held_out: list[Continuation]) -> dict[str, Any]:
        arguments = self.arguments
        heads = {"method": arguments.method, "model": str(self.out), "num_speculative_tokens": NUM_DRAFTS}
        llm = open_engine(arguments.target, self.sequence_length, arguments.device, heads)
        seconds = SPEED_SECONDS_OF_STEPS if arguments.seconds is None else SPEED_SHARE * arguments.seconds
        return measure_speed(llm, [continuation.prompt_token_ids for continuation in held_out], seconds)

    def _figures(self, trainer: Trainer, heads: Acceptance, lookup: Acceptance, shortest: int) -> dict[str, Any]:
        arguments, position = self.arguments, trainer.position
        return {
            "target": arguments.target,
            "method": arguments.method,
            "out": arguments.out,
            "serve": serving_line(arguments.method, arguments.out),
            "parameters": sum(parameter.numel() for parameter in trainer.heads.parameters()),
            "heads": heads.as_dict(),
            "prompt_lookup": lookup.as_dict(),
            "prompt_lookup_min": shortest,
            "prompt_lookup_max": LONGEST_LOOKUP,
            "data": arguments.data,
            "held_out_continuations": len(trainer.held_out),
            "continuations": len(trainer.train),
            "continuation_tokens": sum(len(continuation.token_ids) for continuation in trainer.train),
            "steps": position["step"],
            "tokens_seen": position["tokens"],
            "seconds": {
                "continuations": round(sum(file.seconds for file in self._files.values()), 1),
                "training": round(position["elapsed"], 1),
            },
            "batch_size": arguments.batch_size,
            "sequence_length": self.sequence_length,
            "learning_rate": trainer.settings.learning_rate,
            "seed": arguments.seed,
            "threads": self.threads,
            "device": arguments.device,
            "curve": position["curve"],
        }


def default_learning_rate(method: str, hidden_size: int) -> float:
    """That of the nearest of LEARNING_RATES, and between two widths a straight line of logarithms."""
    (narrow, high), (wide, low) = LEARNING_RATES[method].items()
    share = math.log(hidden_size / narrow) / math.log(wide / narrow)
    return high * (low / high) ** min(1.0, max(0.0, share))


def _sample(continuations: list[Continuation]) -> list[list[int]]:
    return [continuation.all_token_ids for continuation in continuations[:SAMPLE]]


def _held_out_request(prompts: Prompts, index: int) -> Request:
    return Request(prompts.held_out[index], 0.0, 0)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial_path = path.with_suffix(".partial")
    partial_path.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial_path, path)

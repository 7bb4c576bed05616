"""The study, stage by stage: train, count acceptance, clock rounds, fit. What is in its folder is not done again.

Clocked figures are: who names the stage wants them anew. The folder holds, beside what training.scaling.run leaves
there, outputs.json (the target's own), acceptance.json and speed.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specpaged.modeling.flat.config import why_not
from specpaged.modeling.loading import load_config, load_tokenizer
from specpaged.prompts import clip
from specpaged.studies.environment import environment
from specpaged.studies.result import Result, Row
from specpaged.studies.scaling import fits, pictures, speed
from specpaged.studies.scaling.acceptance import Outputs, count
from specpaged.studies.scaling.counts import Counts
from specpaged.studies.scaling.drafts import DraftPoint, check_sizes, final
from specpaged.studies.scaling.options import ScalingOptions
from specpaged.studies.scaling.tables import COLUMNS
from specpaged.studies.workload import check_out
from specpaged.training.heads.target import check_target
from specpaged.training.scaling.recipe import split, target_files, write_json
from specpaged.training.scaling.run import TrainingRun

Progress = Callable[[str, int], Callable[[int], object]]


@dataclass(frozen=True)
class Study:
    """A study that can begin, or go on: everything that could be wrong with its options has been looked at."""

    options: ScalingOptions
    learned: list[list[int]]  # prompts whose continuations drafts are trained on
    measured: list[list[int]]  # prompts that everything is measured on
    longest: int  # positions of the target

    @classmethod
    def prepare(cls, options: ScalingOptions) -> Study:
        """Read the prompts as the target's tokens.

        Raises:
            ValueError: naming the flag, its value and what is allowed.
        """
        check_out(options.out)
        check_target(options.target, options.recipe.sequence_length)
        longest = _positions(options.target)
        tokenizer = load_tokenizer(options.target, False)
        if tokenizer is None:
            raise ValueError(f"--model={options.target!r} has no tokenizer; allowed: a checkpoint with one")
        if options.max_tokens >= longest:
            raise ValueError(f"--max-tokens={options.max_tokens} must be below the target's {longest} positions")
        for draft in options.drafts or ():
            _check_draft(draft, tokenizer)
        prompts = [tokenizer.encode(text) for text in options.texts]
        learned, measured = ([], prompts) if options.drafts is not None else split(prompts)
        learned, _ = clip(learned, options.recipe.sequence_length // 2)
        measured, _ = clip(measured, longest - options.max_tokens)
        if options.drafts is None:
            options.recipe.claim(options.work)
        options.work.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(options.threads)
        return cls(options, learned, measured, longest)

    def run(self, progress: Progress) -> Result | None:
        """Do the stages; None where drafts are missing that there was no time to train, or where nothing is to be fit.

        Raises:
            ValueError: a stage needs one before it.
        """
        options = self.options
        if "train" in options.stages and options.drafts is None:
            run = TrainingRun(options.recipe, options.work, self.learned, options.threads)
            if not run.run(progress, options.seconds):
                return None
        if options.stages == ("train",):
            return None
        drafts = self._drafts()
        if "acceptance" in options.stages:
            self._count(drafts, progress)
        if "speed" in options.stages:
            self._clock(final(drafts), progress)
        return self._fit(drafts) if "fit" in options.stages else None

    @property
    def is_trained(self) -> bool:
        """Whether there is no draft left to train."""
        options = self.options
        if options.drafts is not None:
            return True
        return not TrainingRun(options.recipe, options.work, self.learned, options.threads).missing

    def _drafts(self) -> list[DraftPoint]:
        options = self.options
        if options.drafts is not None:
            return list(options.drafts)
        run = TrainingRun(options.recipe, options.work, self.learned, options.threads)
        if run.missing:
            shape, tokens = run.missing[0]
            raise ValueError(
                f"--stages={','.join(options.stages)}: --work={str(options.work)!r} has no draft of size {shape.name} "
                f"after {tokens} tokens; allowed: train before them"
            )
        of_all = [(shape, tokens) for shape in options.recipe.shapes for tokens in options.recipe.checkpoints]
        drafts = [DraftPoint.read(str(run.draft_of(*key)), options.target) for key in of_all]
        check_sizes("--sizes", drafts)
        return drafts

    def _count(self, drafts: Sequence[DraftPoint], progress: Progress) -> None:
        key, outputs = self._key(), _read(self.options.work / "outputs.json")
        if outputs.get("key") != key:
            llm = self._clocked().llm(None, 0, min(32, len(self.measured)))
            outputs = {"key": key} | Outputs.write(llm, self.measured, self.options.max_tokens).as_dict()
            write_json(self.options.work / "outputs.json", outputs)
        file = self.options.work / "acceptance.json"
        counted = _read(file)
        if counted.get("key") != key:
            counted = {"key": key}
        of_outputs = Outputs(outputs["sequences"], outputs["prompt_lengths"])
        advance = progress("acceptance of drafts", len(drafts))
        for draft in drafts:
            stamp = _stamp(draft)
            if counted.get(draft.name, {}).get("stamp") != stamp:
                counted[draft.name] = {"stamp": stamp} | count(draft, of_outputs).as_dict()
                write_json(file, counted)
            advance(1)

    def _clock(self, finals: Sequence[DraftPoint], progress: Progress) -> None:
        options, clocked = self.options, self._clocked()
        counts = {of.draft: of for of in self._counts(finals)}
        rounds: list[Row] = []
        advance = progress("rounds of drafts", len(finals))
        for draft in finals:
            of_draft = speed.time_rounds(clocked, draft, options.batch_sizes)
            rounds += [{"B": b, **draft.as_dict(), "seconds": seconds} for b, seconds in of_draft.items()]
            advance(1)
        swept: list[Row] = []
        for batch_size in options.batch_sizes:
            of_batch = {row["size"]: row["seconds"] for row in rounds if row["B"] == batch_size}
            chosen = {draft: speed.best_k(counts[draft], of_batch[draft.size]) for draft in finals}
            swept += speed.sweep(clocked, chosen, batch_size, progress)
        middle = finals[len(finals) // 2]
        sizes = sorted({*options.batch_sizes, *(b for b in (1, 2, 4, 8, 16, 32) if b < max(options.batch_sizes))})
        of_middle = speed.by_batch_size(clocked, middle, options.num_speculative_tokens, sizes, progress)
        values = {"key": self._key(), "environment": environment(options.threads) | {"clock": options.clock}}
        write_json(options.work / "speed.json", values | {"rounds": rounds, "sweep": swept, "batch": of_middle})

    def _fit(self, drafts: Sequence[DraftPoint]) -> Result:
        options, k = self.options, self.options.num_speculative_tokens
        counts = self._counts(drafts)
        rows, held_out = fits.predictions(counts, options.hold_out, k)
        notes: dict[str, Any] = {"laws": fits.laws_of_acceptance(counts, k), "held_out": held_out}
        notes["counts"] = [of.as_dict() for of in counts]
        clocked = _read(options.work / "speed.json")
        if clocked.get("key") == self._key() and {row["size"] for row in clocked["rounds"]} == {d.size for d in drafts}:
            notes |= {name: clocked[name] for name in ("rounds", "sweep", "batch")}
            notes |= {"clocked_on": clocked["environment"], "optima": fits.optima(counts, clocked["rounds"])}
            notes["laws"] += fits.laws_of_batch(clocked["batch"])
        return Result(
            "scaling",
            f"tokens of a round by size and training of the draft; greedy, K = {k}",
            COLUMNS,
            rows,
            environment(options.threads),
            options.as_dict() | {"measured_prompts": len(self.measured)},
            "95 %: of outputs drawn with replacement; predicted: by the log-linear law of those that it is fitted to",
            notes=notes,
            draw=lambda result, out: [pictures.draw(result, out / "scaling.png")],
        )

    def _counts(self, drafts: Sequence[DraftPoint]) -> list[Counts]:
        counted = _read(self.options.work / "acceptance.json")
        for draft in drafts:
            if counted.get("key") != self._key() or draft.name not in counted:
                raise ValueError(
                    f"--stages={','.join(self.options.stages)}: --work={str(self.options.work)!r} has no acceptance of "
                    f"{draft.name} on these prompts; allowed: acceptance before them"
                )
        return [Counts.of_dict(draft, counted[draft.name]) for draft in drafts]

    def _clocked(self) -> speed.Clocked:
        options = self.options
        return speed.Clocked(
            options.target,
            self.measured,
            options.max_tokens,
            self.longest,
            options.rounds,
            options.round_seconds,
            options.clock,
        )

    def _key(self) -> str:
        """What figures depend on beside the drafts: target, prompts and length."""
        facts = [target_files(self.options.target), self.measured, self.options.max_tokens]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _check_draft(draft: DraftPoint, tokenizer: Any) -> None:
    """Raise ValueError unless the flat decoder covers a draft, and its tokens are those of the target's tokenizer."""
    reason = why_not(load_config(draft.path), trust_remote_code=False)
    if reason is not None:
        raise ValueError(f"--drafts: {draft.path!r} is of no family whose acceptance is counted here: {reason}")
    own = load_tokenizer(draft.path, False)
    if own is not None and own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"--drafts: {draft.path!r} has another vocabulary than the target, of {len(own)} and {len(tokenizer)} "
            "tokens; allowed: drafts of the target's vocabulary"
        )


def _positions(target: str) -> int:
    return int(load_config(target).max_position_embeddings)


def _stamp(draft: DraftPoint) -> list[list[Any]]:
    """What tells that a draft's files are not those that were counted."""
    files = sorted(Path(draft.path).glob("*.safetensors"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}

"""What `specpaged bench scaling` is asked for, checked before any work. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpaged.checks import check_choice, check_int
from specpaged.config import EMBEDDED_TARGET
from specpaged.prompts import evenly_spread, load_prompts
from specpaged.studies.scaling.counts import MOST_DRAFTS
from specpaged.studies.scaling.drafts import DraftPoint, check_sizes, read_drafts, vocab_size
from specpaged.training.scaling.recipe import Recipe, check_work
from specpaged.training.scaling.shape import parse_shapes

CLOCKS = ("wall", "cpu")
STAGES = ("train", "acceptance", "speed", "fit")
LEAST_SIZES = 3  # that a law of size is fitted to
MIN_PROMPTS = 4


@dataclass(frozen=True)
class ScalingOptions:
    """As said on the command line. `drafts` of a user's own stand in the place of those that a recipe trains."""

    work: Path
    stages: tuple[str, ...]
    target: str
    drafts: tuple[DraftPoint, ...] | None
    recipe: Recipe
    texts: tuple[str, ...]  # prompts
    prompts: str | None
    batch_sizes: tuple[int, ...]
    num_speculative_tokens: int
    max_tokens: int
    rounds: int
    round_seconds: float
    clock: str  # of CLOCKS
    hold_out: str | None  # a size; None: none
    threads: int
    seconds: float  # of training, at most, before the command ends
    out: Path | None

    @classmethod
    def read(
        cls,
        *,
        work: Path,
        stages: str,
        model: str | None,
        drafts: str | None,
        sizes: str,
        checkpoints: list[int],
        continuations: int,
        sequence_length: int,
        batch_size: int,
        seed: int,
        prompts: str | None,
        num_prompts: int | None,
        batch_sizes: list[int],
        num_speculative_tokens: int,
        max_tokens: int,
        rounds: int,
        round_seconds: float,
        clock: str,
        hold_out: str | None,
        threads: int,
        minutes: float | None,
        out: Path | None,
    ) -> ScalingOptions:
        """Of the command's flags.

        Raises:
            ValueError: naming the flag, its value and what is allowed.
        """
        named = tuple(stages.split(","))
        for stage in named:
            check_choice("--stages", stage, STAGES)
        check_work(work)
        if num_speculative_tokens > MOST_DRAFTS:
            raise ValueError(f"--num-speculative-tokens={num_speculative_tokens} must be at most {MOST_DRAFTS}")
        check_int("--batch-sizes", min(batch_sizes), 1)
        if minutes is not None and minutes <= 0:
            raise ValueError(f"--minutes={minutes:g} must be more than 0")
        if round_seconds <= 0:
            raise ValueError(f"--round-seconds={round_seconds:g} must be more than 0")
        check_choice("--clock", clock, CLOCKS)
        if clock == "cpu" and threads > 1:
            raise ValueError(f"--clock='cpu' adds up the time of --threads={threads}; allowed: 'wall', or one thread")
        target = model or EMBEDDED_TARGET
        vocab_size(target)
        texts = tuple(record.text for record in evenly_spread(load_prompts(prompts), num_prompts))
        if len(texts) < MIN_PROMPTS:
            raise ValueError(f"--prompts holds {len(texts)} prompts; allowed: {MIN_PROMPTS} or more")
        own = None if drafts is None else tuple(read_drafts(drafts.split(","), target))
        recipe = Recipe(
            target,
            prompts,
            tuple(parse_shapes(sizes)),
            tuple(checkpoints),
            continuations=continuations,
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
        )
        names = [shape.name for shape in recipe.shapes] if own is None else list(dict.fromkeys(d.size for d in own))
        if own is None and len(names) < LEAST_SIZES:
            raise ValueError(
                f"--sizes={sizes!r} names {len(names)}; allowed: {LEAST_SIZES} sizes or more, as a law of size has two "
                "coefficients"
            )
        return cls(
            work,
            tuple(stage for stage in STAGES if stage in named),
            target,
            own,
            recipe,
            texts,
            prompts,
            tuple(batch_sizes),
            num_speculative_tokens,
            max_tokens,
            rounds,
            round_seconds,
            clock,
            _held_out(hold_out, names, own),
            threads,
            float("inf") if minutes is None else 60 * minutes,
            out,
        )

    def as_dict(self) -> dict[str, Any]:
        """As a result records it: names, no paths."""
        recipe = self.recipe
        trained = {
            "sizes": [shape.name for shape in recipe.shapes],
            "checkpoints": list(recipe.checkpoints),
            "continuations": recipe.continuations,
            "sequence_length": recipe.sequence_length,
            "batch_size": recipe.batch_size,
            "seed": recipe.seed,
        }
        return {
            "target": "embedded" if self.target == EMBEDDED_TARGET else Path(self.target).name,
            "drafts": trained if self.drafts is None else sorted({draft.size for draft in self.drafts}),
            "prompts": "embedded" if self.prompts is None else Path(self.prompts).name,
            "num_prompts": len(self.texts),
            "batch_sizes": list(self.batch_sizes),
            "num_speculative_tokens": self.num_speculative_tokens,
            "max_tokens": self.max_tokens,
            "rounds": self.rounds,
            "hold_out": self.hold_out,
        }


def _held_out(said: str | None, names: list[str], own: tuple[DraftPoint, ...] | None) -> str | None:
    """The size held out: as said, or the last and largest, where enough others are left."""
    if said is None:
        return names[-1] if len(names) > LEAST_SIZES else None
    if said not in names:
        raise ValueError(f"--hold-out={said!r} is none of the sizes; allowed: {', '.join(names)}")
    if own is not None:
        check_sizes("--drafts, without --hold-out,", [draft for draft in own if draft.size != said])
    elif len(names) <= LEAST_SIZES:
        raise ValueError(f"--hold-out={said!r} leaves {len(names) - 1} sizes; allowed: {LEAST_SIZES} or more")
    return said

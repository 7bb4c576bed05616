"""The drafts of a study, looked at before any of them is loaded: sizes, vocabulary, and what they were trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpaged.planning.checkpoint_tensors import CheckpointTensors
from specpaged.planning.model_memory import ModelMemory

POSITION = "training.json"  # beside a draft, as training.scaling.run leaves it: its "size" and its "tokens"


@dataclass(frozen=True)
class DraftPoint:
    """A draft: one of a size, after some tokens of training."""

    size: str  # drafts of one name are one draft in training
    path: str
    parameters: int
    tokens: int | None  # learned from; None where nobody has said

    @property
    def name(self) -> str:
        """Of the draft alone."""
        return self.size if self.tokens is None else f"{self.size}@{self.tokens}"

    @classmethod
    def read(cls, path: str, target: str) -> DraftPoint:
        """What the headers of a checkpoint say of it.

        Raises:
            ValueError: it is no checkpoint of a model, or none for this target.
        """
        argument = "--drafts"
        if not Path(path).is_dir():
            raise ValueError(f"{argument}: {path!r} is no directory; allowed: checkpoints of draft models, with commas")
        tensors = CheckpointTensors.read(path, argument)
        if tensors.is_heads:
            raise ValueError(f"{argument}: {path!r} holds heads, which are of one size; allowed: draft models")
        draft, wanted = ModelMemory.of(tensors, argument=argument), vocab_size(target)
        if draft.vocab_size < wanted:
            raise ValueError(
                f"{argument}: {path!r} has {draft.vocab_size} embedding rows for the target's {wanted}; allowed: "
                "drafts of the target's vocabulary"
            )
        file = Path(path) / POSITION
        training = json.loads(file.read_text()) if file.is_file() else {}
        size, tokens = str(training.get("size", Path(path).name)), training.get("tokens")
        return cls(size, str(path), draft.num_parameters, None if tokens is None else int(tokens))

    def as_dict(self) -> dict[str, Any]:
        """Plain data; no path."""
        return {"size": self.size, "parameters": self.parameters, "tokens": self.tokens}


def vocab_size(target: str) -> int:
    """Of a local target, by its headers. ValueError, naming --model."""
    return ModelMemory.of(CheckpointTensors.read(target)).vocab_size


def read_drafts(paths: Sequence[str], target: str) -> list[DraftPoint]:
    """Drafts of a user's own, in order of their size.

    Raises:
        ValueError: as DraftPoint.read; or they are of fewer sizes than a law can be fitted to.
    """
    drafts = [DraftPoint.read(path, target) for path in paths]
    named: dict[str, str] = {}
    for draft in drafts:
        other = named.setdefault(draft.name, draft.path)
        if other != draft.path:
            raise ValueError(
                f"--drafts: {other!r} and {draft.path!r} are both {draft.name!r}; allowed: names that differ"
            )
    check_sizes("--drafts", drafts)
    return sorted(drafts, key=lambda draft: (draft.parameters, draft.tokens or 0))


def check_sizes(argument: str, drafts: Sequence[DraftPoint], least: int = 3) -> None:
    """Raise ValueError unless there are drafts of at least so many numbers of parameters."""
    sizes = {draft.parameters for draft in drafts}
    if len(sizes) < least:
        raise ValueError(
            f"{argument} names drafts of {len(sizes)} size{'s' * (len(sizes) != 1)}; allowed: {least} sizes or more, "
            "as a law of size has two coefficients"
        )


def final(drafts: Sequence[DraftPoint]) -> list[DraftPoint]:
    """Of every size the draft that was trained longest, in order of size."""
    longest: dict[str, DraftPoint] = {}
    for draft in drafts:
        if draft.size not in longest or (draft.tokens or 0) > (longest[draft.size].tokens or 0):
            longest[draft.size] = draft
    return sorted(longest.values(), key=lambda draft: draft.parameters)

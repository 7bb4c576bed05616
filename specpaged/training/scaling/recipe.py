"""What drafts of several sizes are trained on, and how long: frozen, checked before any work. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specpaged.checks import check_int
from specpaged.training.scaling.shape import DraftShape

FREE = ("shapes", "checkpoints")  # more of them go on with the same run


@dataclass(frozen=True)
class Recipe:
    """All that the trained drafts are a function of, on one machine with one number of threads."""

    target: str  # local path or hub id
    prompts: str | None  # JSON lines in Spec-Bench form; None: the embedded prompts
    shapes: tuple[DraftShape, ...]
    checkpoints: tuple[int, ...]  # ascending: tokens learned from, after which a draft is kept
    continuations: int = 4096  # that the target writes to learn from
    sequence_length: int = 256  # tokens of a prompt and its continuation
    batch_size: int = 8  # sequences of a step
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("--continuations", self.continuations, 1)
        check_int("--sequence-length", self.sequence_length, 16)
        check_int("--batch-size", self.batch_size, 1)
        check_int("--seed", self.seed, 0)
        if not self.shapes:
            raise ValueError("--sizes names none; allowed: WIDTH or WIDTHxLAYERS, with commas between them")
        ascending = all(a < b for a, b in zip(self.checkpoints, self.checkpoints[1:], strict=False))
        if not self.checkpoints or self.checkpoints[0] < 1 or not ascending:
            raise ValueError(
                f"--checkpoints={','.join(map(str, self.checkpoints))!r} must ascend; allowed: numbers of tokens with "
                "commas between them"
            )

    def identity(self) -> dict[str, Any]:
        """What makes a run the same run; further sizes and later checkpoints belong to it as well."""
        values = {name: value for name, value in asdict(self).items() if name not in FREE}
        values["target"] = target_files(self.target) or self.target
        if self.prompts is not None:
            values["prompts"] = hashlib.sha256(Path(self.prompts).read_bytes()).hexdigest()
        return values

    def claim(self, work: Path) -> None:
        """Take a folder for this run, or go on with it there. ValueError where it holds another one."""
        file, identity = work / "recipe.json", self.identity()
        if file.is_file():
            was = json.loads(file.read_text())
            for name, value in identity.items():
                if was.get(name) != value:
                    what = "another content" if name in ("target", "prompts") else f"{was.get(name)!r}, not {value!r}"
                    raise ValueError(
                        f"--work={str(work)!r} holds drafts whose --{name.replace('_', '-')} was {what}; allowed: the "
                        "same one, or an empty folder"
                    )
        work.mkdir(parents=True, exist_ok=True)
        write_json(file, identity)


def check_work(work: Path) -> None:
    """Raise ValueError unless the folder can be made, or is there and may be written into."""
    place = work
    while not place.exists():
        place = place.absolute().parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"--work={str(work)!r} cannot be written; allowed: a folder that is yours, or a new one in it")


def write_json(path: Path, value: Any) -> None:
    """Plain data as a file, which is there whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(partial, path)


def split(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to learn from and prompts to measure with: by turns, as neighbours in a file may be of one kind."""
    return list(prompts[::2]), list(prompts[1::2])


def target_files(target: str) -> list[list[Any]]:
    """Name and size of a local target's weights, and its configuration's hash; nothing of a hub id."""
    directory = Path(target)
    if not directory.is_dir():
        return []
    config = directory / "config.json"
    sizes = [[path.name, path.stat().st_size] for path in sorted(directory.glob("*.safetensors"))]
    return [*sizes, [config.name, hashlib.sha256(config.read_bytes()).hexdigest()]]

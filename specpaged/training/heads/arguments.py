"""What a training run is asked for: frozen, checked before any work. No torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specpaged.checks import check_choice, check_int
from specpaged.config import EMBEDDED_TARGET

METHODS = ("eagle3", "clover")
DEFAULT_MINUTES = 60.0
DEFAULT_DRAFT_VOCAB_SIZE = 32_000  # as published for EAGLE-3
FREE = ("out", "threads")  # another one goes on with the same run


@dataclass(frozen=True)
class TrainingArguments:
    """The arguments of `specpaged train-drafter`; None stands for what depends on the target or on the budget.

    The budget is `minutes` of time in all, or `steps` of training. A run with `steps` and `continuations` is a function
    of its arguments; how far one with `minutes` comes is the machine's.
    """

    target: str
    method: str
    data: str
    out: str
    minutes: float | None = None
    steps: int | None = None
    batch_size: int = 4
    sequence_length: int | None = None  # tokens of a prompt and its continuation
    learning_rate: float | None = None
    draft_vocab_size: int | None = None  # of EAGLE-3
    continuations: int | None = None
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_choice("--method", self.method, METHODS)
        for name, minimum in (("steps", 1), ("batch_size", 1), ("continuations", 1), ("seed", 0), ("threads", 1)):
            self._check_int(name, minimum)
        self._check_int("sequence_length", 16)
        self._check_int("draft_vocab_size", 2)
        if self.draft_vocab_size is not None and self.method != "eagle3":
            raise ValueError(
                f"--draft-vocab-size={self.draft_vocab_size} is for --method eagle3; the heads of {self.method} have "
                "the target's whole vocabulary"
            )
        for name in ("minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{_flag(name)}={value} must be a positive number")
        if self.minutes is not None and self.steps is not None:
            raise ValueError(f"--minutes={self.minutes} and --steps={self.steps} are two budgets; allowed: one of them")

    @property
    def seconds(self) -> float | None:
        """The budget of time; None where steps are counted."""
        return None if self.steps is not None else 60 * (self.minutes or DEFAULT_MINUTES)

    def identity(self) -> dict[str, Any]:
        """What makes a run the same run: the arguments, and what lies in the files that they name."""
        arguments = {name: value for name, value in asdict(self).items() if name not in FREE}
        return arguments | {"target_files": _files(self.target), "data_sha256": _sha256(Path(self.data))}

    def check_is_run(self, identity: dict[str, Any], other: dict[str, Any]) -> None:
        """Raise ValueError where OUT holds the run of another identity."""
        for name, value in identity.items():
            if other.get(name) != value:
                what = _flag(name) if hasattr(self, name) else {"data_sha256": "--data"}.get(name, "--target")
                was = f"{other.get(name)!r}, now {value!r}" if hasattr(self, name) else "another content"
                raise ValueError(
                    f"--out={self.out!r} holds a run whose {what} was {was}; allowed: the same arguments, which go on "
                    "with it, or an empty folder"
                )

    def _check_int(self, name: str, minimum: int) -> None:
        if getattr(self, name) is not None:
            check_int(_flag(name), getattr(self, name), minimum)


def check_out(out: Path) -> None:
    """Raise ValueError unless OUT is a folder that holds a run or nothing, or that can be made."""
    if (out / "training" / "run.json").is_file():
        return
    if out.exists() and (not out.is_dir() or any(path.is_file() for path in out.rglob("*"))):
        raise ValueError(f"--out={str(out)!r} holds something else than a run; allowed: a new or an empty folder")
    place = out
    while not place.exists():
        place = place.absolute().parent
    if not os.access(place, os.W_OK):
        raise ValueError(f"--out={str(out)!r} cannot be written; allowed: a folder that is yours")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _files(target: str) -> list[list[Any]]:
    """Name and size of the weights of a local target, and its configuration's hash; nothing of a hub id."""
    directory = Path(target)
    if not directory.is_dir():
        return []
    sizes = [[path.name, path.stat().st_size] for path in sorted(directory.glob("*.safetensors"))]
    config = directory / "config.json"
    return [*sizes, *([[config.name, _sha256(config)]] if config.is_file() else [])]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def default_target(target: str | None) -> str:
    """The target, which is the embedded one where none is named."""
    return EMBEDDED_TARGET if target is None else target

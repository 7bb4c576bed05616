"""What a study compares: a schedule and a rollback method, and what an ablation takes away from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specpaged.config import ROLLBACKS, SCHEDULES, EngineConfig

if TYPE_CHECKING:
    from specpaged.llm import LLM

# The schedule of a rollback method that is named alone.
SCHEDULE_OF = {
    "truncate": "continuous",
    "repad": "eqspec",
    "gather": "eqspec",
    "compact": "eqspec",
    "batch_min": "eqspec",
    "group": "exspec",
}
VARIATIONS = ("uncached", "ungrouped", "sorted")
PLAIN = "plain"


@dataclass(frozen=True)
class Method:
    """A schedule and a rollback method, with variations.

    `plain` decodes without drafts; `uncached` has a draft that forgets its KV after every round, as the paper's code
    has; `ungrouped` is EXSPEC without looking for equal lengths, `sorted` EXSPEC with its window by length.
    """

    schedule: str
    rollback: str
    plain: bool = False
    uncached: bool = False
    ungrouped: bool = False
    sorted: bool = False

    @classmethod
    def parse(cls, text: str) -> Method:
        """A method from 'schedule/rollback' or from a rollback alone, with VARIATIONS behind it; or 'plain'.

        Raises:
            ValueError: naming what is not known, and what is allowed.
        """
        if text == PLAIN:
            return cls("continuous", "truncate", plain=True)
        names = text.split("/")
        schedule = names.pop(0) if names[0] in SCHEDULES else None
        rollback = names.pop(0) if names else ""
        if rollback not in ROLLBACKS:
            raise ValueError(
                f"--arms: {text!r} has no rollback method {rollback!r}; allowed: {', '.join(ROLLBACKS)}, each also as "
                f"SCHEDULE/ROLLBACK with SCHEDULE one of {', '.join(SCHEDULES)}; or {PLAIN!r}"
            )
        for name in names:
            if name not in VARIATIONS:
                raise ValueError(f"--arms: {text!r} ends in {name!r}; allowed: {', '.join(VARIATIONS)}")
        method = cls(schedule or SCHEDULE_OF[rollback], rollback, **{name: True for name in names})
        if (method.ungrouped or method.sorted) and method.schedule != "exspec":
            raise ValueError(
                f"--arms: {text!r}: 'ungrouped' and 'sorted' are for schedule 'exspec', which alone groups"
            )
        return method

    @property
    def name(self) -> str:
        """The text that `parse` makes the method from."""
        if self.plain:
            return PLAIN
        return "/".join([self.schedule, self.rollback, *(name for name in VARIATIONS if getattr(self, name))])

    def engine_arguments(self, batch_size: int, window: int | None) -> dict[str, Any]:
        """The arguments of LLM in which methods differ."""
        arguments: dict[str, Any] = {
            "schedule": self.schedule,
            "rollback": self.rollback,
            "max_num_seqs": batch_size,
            "num_scheduler_steps": 1,  # what methods differ in is what lies between two rounds
        }
        if self.schedule == "exspec":
            arguments |= {"window": window, "sort_by_length": self.sorted}
        return arguments

    def check(self, batch_size: int, window: int | None, device: str) -> None:
        """Raise ValueError unless an engine can run the method at this batch size."""
        arguments = self.engine_arguments(batch_size, window)
        EngineConfig(device=device, max_num_batched_tokens=max(2048, batch_size), **arguments)

    def apply(self, llm: LLM) -> None:
        """Switch off in an engine what the method does without: the draft's cache, or grouping by length."""
        if self.uncached:
            from specpaged.studies.forgetful import Forgetful

            llm.engine.kv_layout = Forgetful(llm.engine.kv_layout)
        if self.ungrouped:
            llm.engine.scheduler.group_by_length = False


def parse_methods(text: str) -> list[Method]:
    """Methods from names with commas between them, each once."""
    return list(dict.fromkeys(Method.parse(name.strip()) for name in text.split(",")))


def check_methods(methods: Sequence[Method], batch_sizes: Sequence[int], window: int | None, device: str) -> None:
    """Raise ValueError for the first method that cannot be run at some batch size."""
    for method in methods:
        for batch_size in batch_sizes:
            method.check(batch_size, window, device)

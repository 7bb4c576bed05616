"""What a study compares: a schedule and a rollback arm, and what an ablation takes away from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specpaged.config import ROLLBACKS, SCHEDULES, EngineConfig

if TYPE_CHECKING:
    from specpaged.llm import LLM

# The schedule of an arm that is named alone.
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
    """`plain` decodes without drafts; `uncached` has a draft that forgets its KV after every round, as the paper's
    code has; `ungrouped` is EXSPEC without looking for equal lengths, `sorted` EXSPEC with its window by length."""

    schedule: str
    rollback: str
    plain: bool = False
    uncached: bool = False
    ungrouped: bool = False
    sorted: bool = False

    @classmethod
    def parse(cls, text: str) -> Method:
        """A method from 'schedule/arm' or from an arm alone, with VARIATIONS behind it; or 'plain'.

        Raises:
            ValueError: naming the part that is not known, and what is allowed.
        """
        if text == PLAIN:
            return cls("continuous", "truncate", plain=True)
        parts = text.split("/")
        schedule = parts.pop(0) if parts[0] in SCHEDULES else None
        rollback = parts.pop(0) if parts else ""
        if rollback not in ROLLBACKS:
            raise ValueError(
                f"--arms: {text!r} has no arm {rollback!r}; allowed: {', '.join(ROLLBACKS)}, each also as SCHEDULE/ARM "
                f"with SCHEDULE one of {', '.join(SCHEDULES)}; or {PLAIN!r}"
            )
        for part in parts:
            if part not in VARIATIONS:
                raise ValueError(f"--arms: {text!r} ends in {part!r}; allowed: {', '.join(VARIATIONS)}")
        method = cls(schedule or SCHEDULE_OF[rollback], rollback, **{part: True for part in parts})
        if (method.ungrouped or method.sorted) and method.schedule != "exspec":
            raise ValueError(
                f"--arms: {text!r}: 'ungrouped' and 'sorted' are for schedule 'exspec', which alone groups"
            )
        return method

    @property
    def name(self) -> str:
        """What `parse` reads."""
        if self.plain:
            return PLAIN
        return "/".join([self.schedule, self.rollback, *(name for name in VARIATIONS if getattr(self, name))])

    def engine_arguments(self, batch_size: int, window: int | None) -> dict[str, Any]:
        """The LLM's arguments that make the difference."""
        arguments: dict[str, Any] = {
            "schedule": self.schedule,
            "rollback": self.rollback,
            "max_num_seqs": batch_size,
        }
        if self.schedule == "exspec":
            arguments |= {"window": window, "sort_by_length": self.sorted}
        return arguments

    def check(self, batch_size: int, window: int | None, device: str) -> None:
        """Raises ValueError if no engine can be made so."""
        arguments = self.engine_arguments(batch_size, window)
        EngineConfig(device=device, max_num_batched_tokens=max(2048, batch_size), **arguments)

    def apply(self, llm: LLM) -> None:
        """Take from an engine what the method is without."""
        if self.uncached:
            from specpaged.studies.forgetful import Forgetful

            llm.engine.kv_layout = Forgetful(llm.engine.kv_layout)
        if self.ungrouped:
            llm.engine.scheduler.group_by_length = False


def parse_methods(text: str) -> list[Method]:
    """Methods from names with commas between them, each once."""
    return list(dict.fromkeys(Method.parse(name.strip()) for name in text.split(",")))


def check_methods(methods: Sequence[Method], batch_sizes: Sequence[int], window: int | None, device: str) -> None:
    """Raises ValueError for the first that cannot be run at some batch size."""
    for method in methods:
        for batch_size in batch_sizes:
            method.check(batch_size, window, device)

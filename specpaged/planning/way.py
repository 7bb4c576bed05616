"""One way to decode within a budget, and what it takes and brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specpaged.planning.memory_model import MemoryModel


@dataclass(frozen=True)
class Way:
    """One way to decode: its layout, and how deep it drafts."""

    name: str
    memory: MemoryModel
    num_drafts: int
    batch: int  # sequences at once
    largest_batch: int  # that there is memory for
    tokens_per_second: float

    def as_dict(self, context: int) -> dict[str, Any]:
        """Plain data."""
        kv, own = self.memory.kv_bytes(self.batch, context - self.num_drafts, self.num_drafts)
        draft = self.memory.draft if self.num_drafts else None
        return {
            "name": self.name,
            "num_speculative_tokens": self.num_drafts,
            "kv_cache_dtype": self.memory.target.kv_dtype,
            "draft_kv_cache_dtype": None if draft is None else draft.kv_dtype,
            "draft_kv_window": self.memory.window,
            "num_drafting": self.memory.num_drafting(self.batch) if self.num_drafts else 0,
            "batch": self.batch,
            "largest_batch": self.largest_batch,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "kv_cache_memory_bytes": kv,
            "draft_kv_cache_memory_bytes": own,
            "bytes": self.memory.num_bytes(self.batch, context - self.num_drafts, self.num_drafts),
            **self.memory.as_dict(context - self.num_drafts, self.num_drafts),
            "workspace": self.memory.workspace(self.batch, self.num_drafts),
        }

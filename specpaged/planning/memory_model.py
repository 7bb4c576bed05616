"""What speculation holds: the bytes of a sequence, of a batch, and of an engine. See docs/memory.md."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from specpaged.planning.model_memory import ModelMemory

DRAFT_ROWS = 512  # of a pass of a draft, at most; as drafting.draft_model has it
# Bytes of an engine's own records: objects of requests, and tables of the libraries that run. Measured: docs/memory.md.
RECORDS = 3_000_000


@dataclass(frozen=True, slots=True)
class PoolBytes:
    """One sequence's KV in one pool."""

    committed: int  # of its known tokens
    unverified: int  # of drafts
    slack: int  # of its last block, or of slots that drafts leave free

    @property
    def total(self) -> int:
        """All of its blocks."""
        return self.committed + self.unverified + self.slack


@dataclass(frozen=True)
class MemoryModel:
    """A target, a draft if there is one, and the layout of their KV.

    `window` is SpeculativeConfig's `kv_window`; the draft has blocks of its own with it, or where the `drafting_share`
    of sequences is below 1: the others have no draft KV. A pass has `max_num_batched_tokens` rows at most, as many as a
    prefill.
    """

    target: ModelMemory
    draft: ModelMemory | None = None
    block_size: int = 16
    window: int | None = None
    drafting_share: float = 1.0
    max_num_batched_tokens: int = 2048

    @property
    def shares_blocks(self) -> bool:
        """Whether a block of the target's has one of the draft's beside it."""
        return self.draft is not None and self.window is None and self.drafting_share == 1.0

    def num_drafting(self, num_seqs: int) -> int:
        """Of so many sequences, those that draft."""
        return 0 if self.draft is None else math.ceil(self.drafting_share * num_seqs)

    @property
    def weight_bytes(self) -> int:
        """Of both models."""
        return self.target.weight_bytes + (0 if self.draft is None else self.draft.weight_bytes)

    def num_blocks(self, num_tokens: int, num_drafts: int = 0) -> int:
        """The target's blocks of a sequence of so many known tokens, with slots for so many drafts behind them."""
        return -(-(num_tokens + num_drafts) // self.block_size)

    def num_draft_blocks(self, num_tokens: int, num_drafts: int = 0) -> int:
        """The same of the draft's own, where it has any: of the text that it reads."""
        if self.draft is None or self.shares_blocks:
            return 0
        num_slots = num_tokens + num_drafts
        return -(-min(num_slots, self.window or num_slots) // self.block_size)

    def of_target(self, num_tokens: int, num_drafts: int = 0) -> PoolBytes:
        """A sequence's KV in the target's pool."""
        of_token = self.target.kv_bytes_per_token
        held = self.num_blocks(num_tokens, num_drafts) * self.block_size
        return PoolBytes(num_tokens * of_token, num_drafts * of_token, (held - num_tokens - num_drafts) * of_token)

    def of_draft(self, num_tokens: int, num_drafts: int = 0) -> PoolBytes:
        """A sequence's KV in the draft's pool, which has none of its last draft."""
        if self.draft is None:
            return PoolBytes(0, 0, 0)
        of_token, unverified = self.draft.kv_bytes_per_token, max(0, num_drafts - 1)
        held = self.num_draft_blocks(num_tokens, num_drafts) * self.block_size
        if self.shares_blocks:
            held = self.num_blocks(num_tokens, num_drafts) * self.block_size
        committed = min(num_tokens, held - unverified)
        return PoolBytes(committed * of_token, unverified * of_token, (held - committed - unverified) * of_token)

    def workspace(self, num_seqs: int, num_drafts: int = 0) -> int:
        """Buffers of the largest pass, which are kept, for both models: a prefill's of the target, or one that
        verifies, or as many rows as the draft has in one; and the logits that either makes.
        """
        num_verified = num_seqs * (1 + num_drafts)
        num_rows = max(num_verified, self.max_num_batched_tokens)
        of_rows, of_logits = num_rows * self.target.row_bytes, num_verified * self.target.logits_bytes
        if self.draft is not None:
            draft_rows = max(num_seqs, min(num_rows, DRAFT_ROWS))
            of_rows = max(of_rows, draft_rows * self.draft.row_bytes)
            of_logits = max(of_logits, num_seqs * self.draft.logits_bytes)
        return of_rows + of_logits

    @property
    def null_blocks(self) -> int:
        """Bytes of each pool's null block."""
        of_draft = 0 if self.draft is None else self.draft.kv_bytes_per_token
        return self.block_size * (self.target.kv_bytes_per_token + of_draft)

    def kv_bytes(self, num_seqs: int, num_tokens: int, num_drafts: int = 0) -> tuple[int, int]:
        """KV of a batch of sequences of so many known tokens, as an engine is to be given it: in all, and of these in a
        pool of the draft's own (or 0).
        """
        of_target = num_seqs * self.of_target(num_tokens, num_drafts).total
        of_draft = self.num_drafting(num_seqs) * self.of_draft(num_tokens, num_drafts).total
        return of_target + of_draft, 0 if self.shares_blocks else of_draft

    def num_bytes(self, num_seqs: int, num_tokens: int, num_drafts: int = 0) -> int:
        """All that an engine holds for such a batch."""
        kv, _ = self.kv_bytes(num_seqs, num_tokens, num_drafts)
        return self.weight_bytes + self.null_blocks + kv + self.workspace(num_seqs, num_drafts) + RECORDS

    def largest_batch(self, memory: int, num_tokens: int, num_drafts: int = 0, most: int = 4096) -> int:
        """Sequences of so many known tokens that fit into so many bytes; 0 where none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_bytes(middle, num_tokens, num_drafts) <= memory:
                low = middle
            else:
                high = middle - 1
        return low

    def as_dict(self, num_tokens: int, num_drafts: int) -> dict[str, Any]:
        """Plain data of a sequence and of the engine."""
        return {
            "weights": self.weight_bytes,
            "null_blocks": self.null_blocks,
            "target_kv": asdict(self.of_target(num_tokens, num_drafts)),
            "draft_kv": asdict(self.of_draft(num_tokens, num_drafts)),
        }

"""The layouts of KV that a plan compares."""

from __future__ import annotations

from dataclasses import replace

from specpaged.planning.memory_model import MemoryModel
from specpaged.planning.model_memory import ModelMemory

DEFAULT_WINDOW = 512


def layouts(
    target: ModelMemory,
    draft: ModelMemory | None,
    layout: dict[str, int],
    context: int,
    window: int | None,
    may_narrow: bool,
    may_narrow_draft: bool,
) -> tuple[dict[str, MemoryModel], dict[str, MemoryModel]]:
    """Those without a draft, and those with one, by name: in blocks that both share, with a window, and with a pool of
    the draft's own for half of the sequences.

    Where nobody has said what KV is to be, the draft's is in 16 bits, and the target's both as its arithmetic has it
    and in 16 bits: that rounds what plain decoding reads, too.
    """
    targets = {"": target}
    if may_narrow and target.kv_dtype == "float32":
        targets[", 16-bit KV"] = _narrowed(target)
    plain = {f"plain{of_kv}": MemoryModel(model, **layout) for of_kv, model in targets.items()}
    if draft is None:
        return plain, {}
    if may_narrow_draft and draft.kv_dtype == "float32":
        draft = _narrowed(draft)
    drafting, read = {}, window or DEFAULT_WINDOW
    for of_kv, model in targets.items():
        drafting[f"draft{of_kv}"] = MemoryModel(model, draft, **layout)
        drafting[f"half draft{of_kv}"] = MemoryModel(model, draft, drafting_share=0.5, **layout)
        if read < context:
            drafting[f"window {read}{of_kv}"] = MemoryModel(model, draft, window=read, **layout)
    return plain, drafting


def _narrowed(model: ModelMemory) -> ModelMemory:
    """The model with KV in bfloat16 in place of float32."""
    return replace(model, kv_dtype="bfloat16", kv_bytes_per_token=model.kv_bytes_per_token // 2)

"""The layouts of KV that a plan compares."""

from __future__ import annotations

from dataclasses import replace

from specpaged.planning.memory_model import MemoryModel
from specpaged.planning.model_memory import KV_DTYPE_BYTES, ModelMemory

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

    Where nobody has said what KV is to be, the draft's is in 16 bits, and in blocks that are shared in 8 bits, too; and
    the target's both as its arithmetic has it and in 16 bits: that rounds what plain decoding reads, too.
    """
    targets = {"": target}
    if may_narrow and target.kv_dtype == "float32":
        targets[", 16-bit KV"] = _narrowed(target, "bfloat16")
    plain = {f"plain{of_kv}": MemoryModel(model, **layout) for of_kv, model in targets.items()}
    if draft is None:
        return plain, {}
    if may_narrow_draft and draft.kv_dtype == "float32":
        draft = _narrowed(draft, "bfloat16")
    drafting, read = {}, window or DEFAULT_WINDOW
    for of_kv, model in targets.items():
        drafting[f"draft{of_kv}"] = MemoryModel(model, draft, **layout)
        if may_narrow_draft:
            drafting[f"draft of 8-bit KV{of_kv}"] = MemoryModel(model, _narrowed(draft, "fp8_e4m3"), **layout)
        drafting[f"half draft{of_kv}"] = MemoryModel(model, draft, drafting_share=0.5, **layout)
        if read < context:
            drafting[f"window {read}{of_kv}"] = MemoryModel(model, draft, window=read, **layout)
    return plain, drafting


def _narrowed(model: ModelMemory, kv_dtype: str) -> ModelMemory:
    """The model with KV of this dtype."""
    num_elements = model.kv_bytes_per_token // KV_DTYPE_BYTES[model.kv_dtype]
    return replace(model, kv_dtype=kv_dtype, kv_bytes_per_token=num_elements * KV_DTYPE_BYTES[kv_dtype])

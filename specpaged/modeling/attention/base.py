"""The attention hook: any HF decoder, packed [1, N], on paged KV.

Models are loaded with attn_implementation=HOOK. No mask function is registered under that name, so transformers builds
no mask, and the keyword `paged_pass` of a forward call reaches every layer's attention through the model's own code.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

HOOK = "specpaged"


class PagedPass(Protocol):
    """One forward pass on paged KV: what is written where and read by whom, worked out once for all layers.

    Made of a batch, the number of rows of the pass (those past the batch's N tokens are filler: nothing of theirs is
    stored or read, and their output is zeros), and the layers' pools [P * S, 2, Hkv, D].
    """

    gathered_bytes: int  # of KV copied to be read

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [num_rows, Hq, D]
        key: Tensor,  # [num_rows, Hkv, D]
        value: Tensor,  # [num_rows, Hkv, D]
        scaling: float | None,
        window: int | None = None,  # a token reads itself and the window - 1 tokens before it
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:
        """Stores the pass's KV in the layer's pool, then attends. Returns [num_rows, Hq, D]."""
        ...


def paged_attention_hook(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,  # [1, Hkv, N, D]
    attention_mask: Tensor | None,
    *,
    paged_pass: PagedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Returns [1, N, Hq, D], as transformers' attention functions do."""
    if attention_mask is not None:
        raise ValueError("it makes an attention mask of its own, beyond causality and windows")
    if not getattr(module, "is_causal", True):
        raise ValueError("its attention is not causal")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    output = paged_pass.attend(module.layer_idx, query, key, value, scaling, sliding_window, softcap, s_aux)
    return output[None], None


AttentionInterface.register(HOOK, paged_attention_hook)

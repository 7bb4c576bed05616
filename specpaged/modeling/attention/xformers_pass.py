"""Paged attention by xformers' split-K kernel, for passes in which every sequence has as many query tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

import torch
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.attention.torch_pass import TorchPass, store
from specpaged.modeling.numerics import AttentionScheme
from specpaged.modeling.ragged_batch import RaggedBatch

MAX_QUERY_LEN = 16  # of the kernel, where it is causal
PAGE = 64  # its pages are multiples of this


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    geometries: Iterable[tuple[int, int, int]],
    block_size: int,
    numerics: str,
) -> str | None:
    """Why it cannot serve a model here; None if it can."""
    if numerics == "exact":
        return "the bits of its rows depend on the pass, and numerics is 'exact'"
    if importlib.util.find_spec("xformers") is None:
        return "xformers is not installed (pip install specpaged[xformers])"
    if not hasattr(tl, "make_block_ptr"):
        return "its kernel needs triton's make_block_ptr, which triton 3.9 removed"
    if device.type != "cuda":
        return f"device {str(device)!r} is no CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not float16 or bfloat16"
    if block_size % PAGE:
        return f"block_size={block_size} is no multiple of {PAGE}"
    for _, _, head_dim in geometries:
        if head_dim & (head_dim - 1):
            return f"a layer's head_dim={head_dim} is no power of two"
    return None


class XformersPass(PagedPass):
    """A PagedPass in xformers' kernel. Ragged passes, and layers with windows, soft-capping or sinks, are torch's."""

    def __init__(
        self,
        batch: RaggedBatch,
        num_rows: int,
        kv_layers: Sequence[Tensor],  # per layer [P * S, 2, Hkv, D]
        scheme: AttentionScheme,
        dtype: torch.dtype,
    ):
        self.batch = batch
        self.num_rows = num_rows
        self.kv_layers = kv_layers
        self.uniform = len(set(batch.query_lens)) == 1 and batch.query_lens[0] <= MAX_QUERY_LEN
        self._arguments = (batch, num_rows, kv_layers, scheme, dtype)
        self._torch_pass: TorchPass | None = None
        self._mask: object | None = None

    @property
    def gathered_bytes(self) -> int:
        """The bytes of KV that layers which torch ran have copied to be read."""
        return self._torch_pass.gathered_bytes if self._torch_pass else 0

    @override
    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [num_rows, Hq, D]
        key: Tensor,  # [num_rows, Hkv, D]
        value: Tensor,
        scaling: float | None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [Hq]
    ) -> Tensor:
        if not self.uniform or not (window is softcap is sinks is None):
            if self._torch_pass is None:
                self._torch_pass = TorchPass(*self._arguments)
            return self._torch_pass.attend(layer_idx, query, key, value, scaling, window, softcap, sinks)
        from xformers.ops import fmha

        batch, pool = self.batch, self.kv_layers[layer_idx]
        store(pool, key, value, batch.slot_mapping)
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = key.shape[1]
        group = num_heads // num_kv_heads
        if self._mask is None:
            mask = fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
            lengths = [c + q for c, q in zip(batch.context_lens_host, batch.query_lens, strict=True)]
            self._mask = mask.from_seqlens(
                list(batch.query_lens), lengths, batch.page_table, batch.block_size, device=query.device
            )
        output = query.new_zeros(self.num_rows, num_heads, head_dim)
        attended = fmha.memory_efficient_attention_forward(
            query[: batch.num_tokens].reshape(1, -1, num_kv_heads, group, head_dim),
            *(pool[None, :, i, :, None].expand(-1, -1, -1, group, -1) for i in (0, 1)),
            attn_bias=self._mask,
            scale=scaling,
            op=fmha.triton_splitk.FwOp,
        )
        output[: batch.num_tokens] = attended.reshape(-1, num_heads, head_dim)
        return output

"""What the kernels can run."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

HEAD_DIMS = (16, 256)  # the smallest and the largest
MAX_GROUP = 64  # heads that share a KV head
BLOCK_SIZES = (16, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    geometries: Iterable[tuple[int, int, int]],  # (Hq, Hkv, D) of the layers
    block_size: int,
) -> str | None:
    """Why a model's passes cannot run in these kernels; None if they can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"device {str(device)!r} is no CUDA device (Triton's interpreter, TRITON_INTERPRET=1, is for tests)"
    if not BLOCK_SIZES[0] <= block_size <= BLOCK_SIZES[1] or block_size & (block_size - 1):
        return f"block_size={block_size} is no power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[1]}"
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, DTYPES))}"
    for num_heads, num_kv_heads, head_dim in geometries:
        if not HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1]:
            return f"a layer's head_dim={head_dim} is not in {HEAD_DIMS[0]}..{HEAD_DIMS[1]}"
        if dtype == torch.float32 and head_dim > 128 and not interpreted:
            return f"a layer's head_dim={head_dim} in float32 does not fit into registers; at most 128 do"
        if num_heads // num_kv_heads > MAX_GROUP:
            return f"a layer has {num_heads // num_kv_heads} query heads for a KV head, more than {MAX_GROUP}"
    return None

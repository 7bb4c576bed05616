"""What the kernels can run."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

HEAD_DIMS = (32, 64, 128, 256)  # in the interpreter, whatever lies between
BLOCK_SIZES = (16, 128)  # the smallest and the largest power of two
MAX_BLOCK_SIZE = 2**24  # of attention alone: 32 blocks of a split have positions below 2**31
MIN_CAPABILITY = (8, 0)
MAX_VOCAB_SIZE = 64 * 8192
MAX_NORM_SIZE = 16384
MAX_ROWS = 32  # that one sequence verifies: K + 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fits(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether two tiles of keys and values, and the sums, stay in registers."""
    return head_dim * dtype.itemsize <= 512


def max_group(head_dim: int, dtype: torch.dtype) -> int:
    """Query heads that may share a KV head; where a key is long, fewer rows spare registers."""
    return 32 if dtype.itemsize > 2 or head_dim > 128 else 64


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    geometries: Iterable[tuple[int, int, int]],  # (Hq, Hkv, D) of the layers
    block_size: int,
    vocab_size: int,
) -> str | None:
    """Why a model's passes cannot run in these kernels; None if they can."""
    if device.type != "cuda" and not interpreted():
        return f"device {str(device)!r} is no CUDA device (Triton's interpreter, TRITON_INTERPRET=1, is for tests)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"device {str(device)!r} has compute capability below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    if not BLOCK_SIZES[0] <= block_size <= BLOCK_SIZES[1] or block_size & (block_size - 1):
        return f"block_size={block_size} is no power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[1]}"
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, DTYPES))}"
    if vocab_size > MAX_VOCAB_SIZE:
        return f"a vocabulary of {vocab_size} is larger than {MAX_VOCAB_SIZE}"
    for num_heads, num_kv_heads, head_dim in geometries:
        if head_dim not in HEAD_DIMS and not (interpreted() and HEAD_DIMS[0] // 2 <= head_dim < HEAD_DIMS[-1]):
            return f"a layer's head_dim={head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if not fits(head_dim, dtype):
            return f"a layer's head_dim={head_dim} in {dtype} does not fit into registers"
        group, limit = num_heads // num_kv_heads, max_group(head_dim, dtype)
        if group > limit:
            return f"a layer has {group} query heads for a KV head, and at most {limit} fit with head_dim={head_dim}"
    return None

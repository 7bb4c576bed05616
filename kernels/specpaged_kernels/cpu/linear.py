"""Exact linear layers on a CPU: see linear.cpp."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged_kernels.cpu.build import BuildError, load

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PANEL = 16  # outputs; as in the C++ file


def why_not(dtype: torch.dtype) -> str | None:
    """Why it cannot run here; None if it can."""
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, DTYPES))}"
    try:
        _functions()
    except BuildError as error:
        return str(error)
    return None


@functools.cache
def _functions() -> dict[torch.dtype, ctypes._CFuncPtr]:
    library = load(Path(__file__).with_suffix(".cpp"))
    functions = {}
    for dtype, name in DTYPES.items():
        function = getattr(library, f"linear_{name}")
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [pointer, size, size, pointer, pointer, size, size, pointer, ctypes.c_int]
        function.restype = None
        functions[dtype] = function
    return functions


def pack(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / PANEL), K, PANEL], contiguous: outputs side by side, zeros behind N."""
    weight = F.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def linear(
    x: Tensor,  # [M, K] dtype, K contiguous
    packed: Tensor,  # of `pack`, dtype
    bias: Tensor | None,  # [N] dtype
    out_features: int,  # N
) -> Tensor:  # [M, N] dtype
    """x times the weight's transpose, plus the bias: summed over K in order in float32, rounded once."""
    num_rows, in_features = x.shape
    y = torch.empty(num_rows, out_features, dtype=x.dtype)
    _functions()[x.dtype](
        x.data_ptr(), x.stride(0), num_rows, packed.data_ptr(), None if bias is None else bias.data_ptr(),
        in_features, out_features, y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y

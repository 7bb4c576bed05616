"""The library of all C++ kernels, and where it can be had."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specpaged_kernels.cpu.build import BuildError, load

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of weights; the numbers of vectors.h
KV_STORAGE = STORAGE | {torch.float8_e4m3fn: 3}
SOURCE = Path(__file__).with_name("library.cpp")  # which includes the others

# Of status.h: what leads outside of its table.
_OUTSIDE = (
    None, "token_ids", "positions", "logits_idx", "stop_rule", "vocab_size", "hidden_idx", "layer_inputs",
    "slot_mapping", "page_table", "cu_query_lens", "context_lens",
)  # fmt: skip
_OUT_OF_MEMORY = len(_OUTSIDE)

POINTER, SIZE, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def build_name() -> str:
    """Names this build of the kernels, by their sources and flags: what passes take is of one. Raises BuildError."""
    return Path(load(SOURCE)._name).name


@functools.cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run here in this dtype; None if they can."""
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, DTYPES))}"
    try:
        load(SOURCE)
    except BuildError as error:
        return str(error)
    return None


class _ByDtype(dict):
    def __missing__(self, dtype: torch.dtype) -> None:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")


def functions(name: str, argument_types: Sequence[type], result_type: type | None = None) -> dict[torch.dtype, object]:
    """The kernel in each dtype. Raises BuildError."""
    found = _ByDtype()
    for dtype, suffix in DTYPES.items():
        function = getattr(load(SOURCE), f"{name}_{suffix}")
        function.argtypes, function.restype = argument_types, result_type
        found[dtype] = function
    return found


def check_status(status: int) -> None:
    """Raises what a kernel's status says.

    Raises:
        IndexError: an argument leads outside of its table; nothing was written.
        MemoryError: there was not enough of it.
    """
    if status == 0:
        return
    if status < _OUT_OF_MEMORY:
        raise IndexError(f"{_OUTSIDE[status]} leads outside of its table")
    if status == _OUT_OF_MEMORY:
        raise MemoryError("a C++ kernel found no memory for what it computes on the way")
    raise RuntimeError(f"a C++ kernel failed with status {status}")


def check_tensor(
    name: str, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, contiguous: bool = True
) -> None:
    """Raises ValueError unless a kernel can read the tensor at its address; None is let through."""
    if tensor is None or (
        tensor.shape == shape and tensor.dtype is dtype and tensor.is_cpu and (not contiguous or tensor.is_contiguous())
    ):  # several times in a step: the sentence is looked for only where there is one
        return
    if tensor.shape != tuple(shape) or tensor.dtype != dtype or (contiguous and not tensor.is_contiguous()):
        strides = f", strides {list(tensor.stride())}" if contiguous and not tensor.is_contiguous() else ""
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype}{strides}; "
            f"allowed: {list(shape)} {dtype}{', contiguous' if contiguous else ''}"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; allowed: a CPU")

"""How kernels are compiled: once for each dtype and set of constants, whatever the sizes.

Triton compiles anew for an integer that is 1, or a multiple of 16, or a pointer that is aligned. Here only arguments
that a kernel names as `aligned` are looked at in that way: pointers and strides of what it reads in wide loads. So
the variants that can be launched are a list, and can be compiled ahead of time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1", torch.float64: "fp64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Variant:
    """What one compilation is for."""

    kernel: Any
    types: dict[str, str]  # of the arguments that are no int32: "*fp16", "fp32"
    constants: dict[str, Any]  # constants and OPTIONS, as the launch says them


def kernel(*aligned: str) -> Callable[[Callable], Any]:
    """triton.jit for a kernel whose `aligned` arguments are multiples of 16 (bytes of a pointer) where it counts."""

    def decorate(function: Callable) -> Any:
        parameters = inspect.signature(function).parameters
        names = [name for name, p in parameters.items() if "constexpr" not in str(p.annotation)]
        assert set(aligned) <= set(names), f"{function.__name__} has no arguments {set(aligned) - set(names)}"
        jitted = triton.jit(function, do_not_specialize=[name for name in names if name not in aligned])
        if isinstance(jitted, JITFunction):  # no interpreter
            jitted.run = on_its_device(jitted.run)
        return jitted

    return decorate


def on_its_device(run: Callable) -> Callable:
    """A launch on the device of its first argument, which Triton would make on the thread's current one."""

    def run_there(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        device = tensor.device
        if device.index == torch.cuda.current_device():
            return run(tensor, *args, **named)
        with torch.cuda.device(device):
            return run(tensor, *args, **named)

    return run_there

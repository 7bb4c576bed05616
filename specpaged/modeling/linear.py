"""Linear layers whose rows do not depend on each other: the same bits for a row in whatever batch it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from specpaged_kernels.cpu import library as cpu_library
from specpaged_kernels.cpu import linear as cpu_linear

# Below this many weights a prepacked call costs more than its faster kernel saves.
SMALL_WEIGHT = 2**19
# Up to this many weights numerics="fast" keeps the plain weight, for many rows, beside the packed one.
TWO_COPIES_WEIGHT = 2**24
OWN_KERNELS = {"cpp", "triton"}  # of a backend or a LinearScheme: an output is a function of its row and column alone


@dataclass(frozen=True)
class LinearScheme:
    """How x [rows, K] times a weight [N, K] is computed.

    Rows are filled up with zero rows to a multiple of `row_multiple` and at least `min_rows`; more than `max_rows`
    are run in pieces of `max_rows`.
    """

    kernel: str  # of KERNELS; "cpp" and "triton" are exact in any rows
    row_multiple: int
    min_rows: int
    max_rows: int
    upcast: bool = False  # weight and input as float32, the result rounded to the model's dtype

    @property
    def name(self) -> str:
        """What the start-up report calls the scheme."""
        name = self.kernel
        if self.kernel == "stock":
            name = "stock per row" if self.max_rows == 1 else f"stock x{self.row_multiple}"
        return f"float32 {name}" if self.upcast else name

    def padded_rows(self, rows: int) -> int:
        """The number of rows, filler included, that a call with `rows` rows is given."""
        return max(self.min_rows, -(-rows // self.row_multiple) * self.row_multiple)


def runs_cpp(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our C++ kernel is the first choice here: not where oneDNN has bfloat16 units to use."""
    if device.type != "cpu" or cpu_library.why_not(dtype) is not None:
        return False
    return dtype == torch.float32 or not can_pack(dtype, device)


def can_pack(weight_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this dtype on this device (bfloat16 needs a CPU with units for it)."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight_dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight_dtype == torch.float32


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _aligned(weight: Tensor) -> Tensor:
    """[N, K] -> [N up to a multiple of 16, K], contiguous and aligned, as the kernel's wide stores and loads want it.

    Mostly the tensor itself; but vocabularies have any size, and a mapped file's tensors lie anywhere.
    """
    filler = -len(weight) % 16
    if filler:
        return F.pad(weight, (0, 0, 0, filler))
    return weight if weight.is_contiguous() and weight.data_ptr() % 16 == 0 else weight.clone().contiguous()


def _column_major(weight: Tensor) -> Tensor:
    """The same values with F.linear's inner loop along N: with weights that are not in the cache, as in a whole model,
    a call takes half the time. The copy is aligned, as MKL's results may depend on that and a mapped file's tensors
    have any alignment."""
    return torch.empty_like(weight.t(), memory_format=torch.contiguous_format).copy_(weight.t()).t()


class StockKernel(nn.Module):
    """F.linear. Kernels take x [rows, K] and keep the weight in the layout that they want, which mostly is a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = _column_major(weight), bias

    def forward(self, x: Tensor) -> Tensor:
        """[rows, K] -> [rows, N]"""
        return F.linear(x, self.weight, self.bias)


class PackedKernel(nn.Module):
    """oneDNN's linear, with a prepacked weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = _pack(weight.contiguous()), bias

    def forward(self, x: Tensor) -> Tensor:
        """[rows, K] -> [rows, N]"""
        return _packed_linear(x, self.weight, self.bias)


class CppKernel(nn.Module):
    """Our C++ kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.out_features = len(weight)
        self.weight, self.bias = cpu_linear.pack(weight), bias

    def forward(self, x: Tensor) -> Tensor:
        """[rows, K] -> [rows, N]"""
        return cpu_linear.linear(x, self.weight, self.bias, self.out_features)


class TritonKernel(nn.Module):
    """Our Triton kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        from specpaged_kernels.linear import linear  # where it is wanted: defining kernels takes a second

        self.out_features = len(weight)
        self.weight = _aligned(weight)
        self.bias = None if bias is None else F.pad(bias, (0, len(self.weight) - len(bias)))
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[rows, K] -> [rows, N]"""
        return self._linear(x, self.weight, self.bias)[:, : self.out_features]

    def argmax(self, x: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
        """[rows, K] -> [rows] int64, [rows] bool: the first num_ids columns' argmax, and whether there is one."""
        from specpaged_kernels.linear import choose_tiles
        from specpaged_kernels.lm_head import lm_head

        tiles = choose_tiles(1, *self.weight.shape, x.dtype)  # the splits of K that `linear` has for the whole weight
        return lm_head(x, self.weight[:num_ids], None if self.bias is None else self.bias[:num_ids], tiles)


KERNELS = {"stock": StockKernel, "packed": PackedKernel, "cpp": CppKernel, "triton": TritonKernel}


class RowExactLinear(nn.Module):
    """weight [N, K], bias [N] | None; x [..., K] -> [..., N], under a LinearScheme."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: LinearScheme):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.scheme = scheme
        self.dtype = weight.dtype
        self._upcast = scheme.upcast
        dtype = torch.float32 if scheme.upcast else weight.dtype
        bias = None if bias is None else bias.detach().to(dtype, copy=True)
        self.kernel = KERNELS[scheme.kernel](weight.detach().to(dtype), bias)
        self._multiple, self._min, self._max = scheme.row_multiple, scheme.min_rows, scheme.max_rows

    def _gemm(self, x: Tensor) -> Tensor:
        """[rows, K] -> [rows, N]"""
        return self.kernel(x.float()).to(self.dtype) if self._upcast else self.kernel(x)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        rows = len(flat)
        if rows == 0:
            y = x.new_empty(0, self.out_features)
        elif self._min <= rows <= self._max and rows % self._multiple == 0:
            y = self._gemm(flat)
        else:
            y = self._any_rows(flat)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    @property
    def has_argmax(self) -> bool:
        """Whether `argmax` can be had without the outputs in memory."""
        return isinstance(self.kernel, TritonKernel) and not self._upcast

    def argmax(self, x: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
        """x [rows, K] -> [rows] int64, [rows] bool: the first num_ids outputs' argmax, and whether there is one."""
        return self.kernel.argmax(x, num_ids)

    def _any_rows(self, x: Tensor) -> Tensor:
        """x [rows, K] -> [rows, N], in pieces and with filler rows."""
        pieces = []
        for piece in x.split(self._max):
            rows = piece.shape[0]
            filler = self.scheme.padded_rows(rows) - rows
            pieces.append(self._gemm(F.pad(piece, (0, 0, 0, filler)))[:rows] if filler else self._gemm(piece))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @override
    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.kernel.bias is not None}, {self.scheme.name}"


class FastLinear(nn.Module):
    """A quick kernel for the row count, whatever that does to the last bits.

    With the backend "cpp" that is ours, except for bfloat16 on a CPU with units for it; else stock for small weights,
    for a few rows and for many, and packed between.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, backend: str = "torch"):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        ours = backend == "cpp" and runs_cpp(weight.dtype, weight.device)
        self.upcast = (
            weight.dtype == torch.bfloat16
            and weight.device.type == "cpu"
            and not can_pack(torch.bfloat16, weight.device)
            and not ours
        )
        weight = weight.detach().float() if self.upcast else weight.detach()
        self.bias = None if bias is None else bias.detach().to(weight.dtype, copy=True)
        self.cpp: CppKernel | None = None
        self.operand: Tensor | None = None
        self.packed: Tensor | None = None
        if ours:
            self.cpp = CppKernel(weight, self.bias)
            return
        if weight.numel() >= SMALL_WEIGHT and can_pack(weight.dtype, weight.device):
            self.packed = _pack(weight.contiguous())
        if self.packed is None or weight.numel() <= TWO_COPIES_WEIGHT:
            self.operand = _column_major(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        if self.upcast:
            x = x.float()
        rows = x.numel() // self.in_features
        if self.cpp is not None:
            y = self.cpp(x.reshape(rows, self.in_features)).view(*x.shape[:-1], self.out_features)
        elif self.packed is not None and (self.operand is None or 2 < rows <= 16):
            y = _packed_linear(x, self.packed, self.bias)
        else:
            y = F.linear(x, self.operand, self.bias)
        return y.to(self.dtype) if self.upcast else y

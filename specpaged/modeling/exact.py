"""Makes the modules of a loaded model exact: every matrix product under a probed scheme, element-wise tails aligned."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specpaged.modeling.linear import FastLinear, LinearScheme, RowExactLinear
from specpaged.modeling.numerics import InexactError, choose_linear_scheme, choose_stock_scheme

# Element-wise kernels treat what is left after whole pairs of vectors (of 64 bytes at most, AVX-512's) with scalar
# code, which can differ in the last bit.
VECTOR_PAIR_BYTES = 128
# Above this many elements they are split evenly over threads, wherever that cuts a pair: GELU's threshold in ATen's
# Activation.cpp (GELU_MIN_ELEMENTS_FOR_MULTI_THREADING), the lowest; others' is at::internal::GRAIN_SIZE, 32768.
ELEMENTWISE_GRAIN = 16384
_ROWS_WITHOUT_TAIL = 32  # of any width: two vectors of 16 floats is the most that torch takes at once
ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


def elementwise_unit(num_threads: int, dtype: torch.dtype) -> int:
    """Elements in a tensor must be a multiple of this for element-wise results not to depend on their place in it."""
    return VECTOR_PAIR_BYTES // dtype.itemsize * min(num_threads, 2)


def aligned_multiple(multiple: int, inner_sizes: set[int], num_threads: int, dtype: torch.dtype) -> int:
    """The smallest multiple of `multiple` rows that leaves no tail at any of the inner sizes."""
    unit = elementwise_unit(num_threads, dtype)
    return math.lcm(multiple, *(unit // math.gcd(unit, size) for size in inner_sizes))


class RowExactExperts(nn.Module):
    """A mixture's experts, one after the other, each on its rows through exact linears.

    A token's experts are summed in the router's order. `experts` is a module that transformers' experts interface
    drives.
    """

    def __init__(self, experts: nn.Module, num_threads: int, backend: str):
        super().__init__()
        if not getattr(experts, "has_gate", True) or getattr(experts, "_is_expert_parallel", False):
            raise InexactError(f"numerics='exact' is not possible for {type(experts).__name__}: no gated experts")
        self.apply_gate = experts._apply_gate
        self.gate_up = nn.ModuleList(_expert_linears(experts, "gate_up_proj", backend))
        self.down = nn.ModuleList(_expert_linears(experts, "down_proj", backend))
        on_cpu = experts.gate_up_proj.device.type == "cpu"
        # apply_gate needs the module's activation, not its weights.
        for name in list(experts._parameters):
            experts._parameters[name] = None
        schemes = [self.gate_up[0].scheme, self.down[0].scheme]
        inner = self.down[0].in_features
        self._multiple = aligned_multiple(
            math.lcm(*(max(s.row_multiple, s.min_rows) for s in schemes)),
            {inner} if on_cpu else set(),
            num_threads,
            self.down[0].dtype,
        )
        limit = min(s.max_rows for s in schemes if s.max_rows > 1) if any(s.max_rows > 1 for s in schemes) else 256
        # An activation that is no module (GPT-OSS's) is not run in pieces: the rows must be so few that it is whole.
        if num_threads > 2 and not any(isinstance(part, ElementwisePieces) for part in experts.modules()):
            limit = min(limit, ELEMENTWISE_GRAIN // inner)
            if limit < self._multiple:
                raise InexactError(
                    f"numerics='exact' is not possible for {type(experts).__name__} of inner size {inner} with "
                    f"{num_threads} threads: its activation is split over them; use at most 2 threads"
                )
        self._max = max(self._multiple, limit // self._multiple * self._multiple)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]"""
        num_tokens, top_k = top_k_index.shape
        experts = top_k_index.reshape(-1)
        by_expert = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=len(self.down)).tolist()
        outputs = hidden_states.new_empty(num_tokens * top_k, hidden_states.shape[-1])
        for expert, choice_idx in enumerate(by_expert.split(counts)):
            for piece in choice_idx.split(self._max):
                rows = piece.shape[0]
                if rows:
                    x = F.pad(hidden_states[piece // top_k], (0, 0, 0, -rows % self._multiple))
                    outputs[piece] = self.down[expert](self.apply_gate(self.gate_up[expert](x)))[:rows]
        weighted = outputs.view(num_tokens, top_k, -1).float() * top_k_weights[..., None].float()
        total = weighted[:, 0]
        for choice in range(1, top_k):
            total = total + weighted[:, choice]
        return total.to(hidden_states.dtype)


def _expert_linears(experts: nn.Module, name: str, backend: str) -> list[RowExactLinear]:
    weights = getattr(experts, name).detach()
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    scheme = choose_linear_scheme(*weights.shape[1:], experts.has_bias, weights.dtype, weights.device, backend)
    return [RowExactLinear(weight.contiguous(), bias, scheme) for weight, bias in zip(weights, biases, strict=True)]


class RowwiseModule(nn.Module):
    """A row-wise module with a matrix of its own (a router), given row counts at which F.linear is exact."""

    def __init__(self, inner: nn.Module, scheme: LinearScheme):
        super().__init__()
        self.inner = inner
        self.scheme = scheme

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, ...]:
        """hidden_states [..., H] -> what the inner module returns for [T, H]"""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        results = []
        for piece in flat.split(self.scheme.max_rows):
            rows = piece.shape[0]
            # What torch computes element by element, it computes otherwise in the last ones, if they fill no vector.
            whole = min(-(-rows // _ROWS_WITHOUT_TAIL) * _ROWS_WITHOUT_TAIL, self.scheme.max_rows)
            result = self.inner(F.pad(piece, (0, 0, 0, self.scheme.padded_rows(whole) - rows)))
            parts = result if isinstance(result, tuple) else (result,)
            results.append(tuple(part[:rows] for part in parts))
        joined = tuple(torch.cat(parts) for parts in zip(*results, strict=True)) if len(results) > 1 else results[0]
        return joined if isinstance(result, tuple) else joined[0]


class ElementwisePieces(nn.Module):
    """An activation applied to so few elements at a time that no kernel splits them over threads.

    Always to contiguous ones: a strided tensor (half of a fused projection) has a tail in every row.
    """

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        pieces = [self.inner(piece) for piece in x.reshape(-1).split(ELEMENTWISE_GRAIN)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(x.shape)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' experts interface drives the module."""
    return hasattr(module, "is_transposed") and hasattr(module, "gate_up_proj") and hasattr(module, "_apply_gate")


def find_routers(model: nn.Module) -> set[str]:
    """Paths of the modules beside experts that have one matrix of their own, with a row per expert."""
    routers = set()
    for path, block in model.named_modules():
        num_experts = {len(child.gate_up_proj) for child in block.children() if is_experts(child)}
        for name, child in block.named_children():
            own = [p for p in child.parameters(recurse=False) if p.dim() >= 2]
            if not is_experts(child) and len(own) == 1 and own[0].dim() == 2 and len(own[0]) in num_experts:
                routers.add(f"{path}.{name}" if path else name)
    return routers


def is_activation(module: nn.Module) -> bool:
    """Whether the module is an element-wise function of torch's or transformers', by trial: it has no parameters, and
    shuffled elements give shuffled results."""
    if type(module).__module__ not in ACTIVATION_MODULES or any(p.numel() > 1 for p in module.parameters()):
        return False
    x = torch.linspace(-3, 3, 24, dtype=torch.float64).view(4, 6)
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    try:
        return torch.allclose(module(x).flatten()[shuffled], module(x.flatten()[shuffled].view(4, 6)).flatten())
    except (RuntimeError, TypeError, IndexError):  # another shape or other arguments: no function of elements
        return False


class ExactLinears:
    """Makes linear layers exact, in the backend's kernels where it has them, and keeps account of what it chose."""

    def __init__(self, device: torch.device, backend: str):
        self.device = device
        self.backend = backend
        self.num_threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._chosen: dict[str, set[str]] = defaultdict(set)
        self._multiples = [1]

    def make(self, weight: Tensor, bias: Tensor | None) -> RowExactLinear:
        """An exact layer of weight [N, K] and bias [N]. Raises InexactError."""
        scheme = choose_linear_scheme(*weight.shape, bias is not None, weight.dtype, weight.device, self.backend)
        self.note(scheme, *weight.shape)
        return RowExactLinear(weight, bias, scheme)

    def note(self, scheme: LinearScheme, n: int, k: int, sees_whole_passes: bool = True) -> None:
        """Takes down a layer, and the rows that it wants to be given if it sees passes as they are."""
        self._chosen[scheme.name].add(f"{n}x{k}")
        if sees_whole_passes:
            self.want_rows(scheme.row_multiple)

    def want_rows(self, multiple: int) -> None:
        """Ask that passes be filled up to a multiple of so many rows."""
        self._multiples.append(multiple)

    def row_multiple(self, inner_sizes: set[int], dtype: torch.dtype) -> int:
        """The multiple that the rows of a pass are filled up to.

        Element-wise functions run on last dimensions of `inner_sizes`, in `dtype` or wider.
        """
        if self.device.type != "cpu":
            inner_sizes = set()  # a GPU treats every element of an element-wise function alike
        return aligned_multiple(math.lcm(*self._multiples), inner_sizes, self.num_threads, dtype)

    def __str__(self) -> str:
        parts = [f"{name} ({', '.join(sorted(shapes, key=_numeric))})" for name, shapes in sorted(self._chosen.items())]
        return "linears " + ", ".join(parts)


def make_exact(model: nn.Module, linears: ExactLinears) -> None:
    """Replaces the matrix products of `model` by exact ones. Raises InexactError."""
    routers = find_routers(model)
    # Two threads halve what they split, and that is aligned; a third has pieces of any size.
    if linears.num_threads > 2:
        for path, module in list(model.named_modules()):
            if is_activation(module):
                replace_module(model, path, ElementwisePieces(module))
    for path, module in list(model.named_modules()):
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() >= 2}
        if not own or isinstance(module, nn.Embedding):
            continue
        if type(module) is nn.Linear:
            new: nn.Module = linears.make(module.weight, module.bias)
        elif is_experts(module):
            new = RowExactExperts(module, linears.num_threads, linears.backend)
            for layers in (new.gate_up, new.down):
                linears.note(layers[0].scheme, layers[0].out_features, layers[0].in_features, sees_whole_passes=False)
        elif path in routers:
            (weight,) = own.values()
            scheme = _router_scheme(weight)
            new = RowwiseModule(module, scheme)
            linears.note(scheme, *weight.shape)
        else:
            raise InexactError(
                f"numerics='exact' is not possible for this model: {path} ({type(module).__name__}) multiplies by "
                f"{', '.join(own)} outside a linear layer; use numerics='fast'"
            )
        replace_module(model, path, new)


def _numeric(shape: str) -> list[int]:
    return [int(size) for size in shape.split("x")]


def _router_scheme(weight: Tensor) -> LinearScheme:
    # Some routers compute in float32 whatever the model's dtype.
    schemes = [
        choose_stock_scheme(*weight.shape, bias, dtype, weight.device)
        for dtype in dict.fromkeys((weight.dtype, torch.float32))
        for bias in (False, True)
    ]
    most = max(scheme.row_multiple for scheme in schemes)
    limit = min(scheme.max_rows for scheme in schemes)
    if limit == 1:
        return replace(schemes[0], row_multiple=1, min_rows=1, max_rows=1)
    return replace(schemes[0], row_multiple=most, min_rows=most, max_rows=limit // most * most)


def make_fast(model: nn.Module, backend: str) -> None:
    """Replaces linear layers by ones that take the quickest kernel per row count."""
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            replace_module(model, path, FastLinear(module.weight, module.bias, backend))


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Puts `new` in the place of the submodule at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)

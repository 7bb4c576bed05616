"""The flat decoder as one compiled graph, for packed passes of any size."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor, nn

from specpaged.modeling.attention import PagedPass
from specpaged.modeling.flat.decoder import FlatDecoder

# What the operators below stand for, by the handle that they carry through a graph: a graph holds no modules, and
# prepacked weights are opaque to the compiler.
_OBJECTS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_HANDLES = itertools.count()

_library = torch.library.Library("specpaged", "DEF")
_library.define("linear(Tensor x, int handle, int out_features) -> Tensor")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int handle, int layer_idx, float? scaling, int? window, "
    "float? softcap) -> Tensor"
)


def _handle(target: object) -> int:
    handle = next(_HANDLES)
    _OBJECTS[handle] = target
    return handle


def _linear(x: Tensor, handle: int, out_features: int) -> Tensor:
    return _OBJECTS[handle](x).contiguous()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    handle: int,
    layer_idx: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    return _OBJECTS[handle].current.attend(layer_idx, query, key, value, scaling, window, softcap)


_library.impl("linear", _linear, "CompositeExplicitAutograd")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake(
    "specpaged::linear", lambda x, handle, out_features: x.new_empty(*x.shape[:-1], out_features), lib=_library
)
torch.library.register_fake(
    "specpaged::attend", lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format), lib=_library
)


class _Linear(nn.Module):
    """A linear layer as one operator."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.handle = _handle(inner)
        self.out_features = inner.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        return torch.ops.specpaged.linear(x, self.handle, self.out_features)


class _Pass:
    """Attention of the current pass as one operator."""

    def __init__(self) -> None:
        self.handle = _handle(self)
        self.current: PagedPass | None = None

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See PagedPass.attend."""
        return torch.ops.specpaged.attend(query, key, value, self.handle, layer_idx, scaling, window, softcap)


class CompiledDecoder(nn.Module):
    """See Source. One graph serves every number of rows: the same machine code, so that a row's bits cannot depend on
    how many there are."""

    def __init__(self, decoder: FlatDecoder):
        super().__init__()
        for layer in decoder.layers:
            for name in ("qkv", "o", "gate_up", "down"):
                setattr(layer, name, _Linear(getattr(layer, name)))
        decoder.output = _Linear(decoder.output)
        self.decoder = decoder
        self._pass = _Pass()
        self._step = torch.compile(decoder.forward, dynamic=True, fullgraph=True)

    def forward(self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, logits_idx: Tensor | None) -> Tensor:
        """token_ids and positions [N] int64, logits_idx [M] int64 (None: all rows) -> [M, V]"""
        if logits_idx is None:
            logits_idx = torch.arange(len(token_ids), device=token_ids.device)
        self._pass.current = paged_pass
        try:
            return self._step(token_ids, positions, self._pass, logits_idx)
        finally:
            self._pass.current = None

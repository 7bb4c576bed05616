"""A model that is ready to run on paged KV, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest
from specpaged.modeling.numerics import AttentionScheme
from specpaged.paging.kv_cache import KVSpec


@dataclass
class LoadedModel:
    """`loading.load_model` makes it; the last block is what a ModelRunner needs to keep a pass exact."""

    decoder: nn.Module  # a Decoder, see `source`
    implementation: str  # "flat" | "transformers"
    not_flat: str | None  # why the flat decoder does not run it
    not_ours: str | None  # why none of our kernels does
    hf_config: PreTrainedConfig
    name: str  # the path or hub id that was asked for
    architecture: str
    dtype: torch.dtype  # of the arithmetic
    kv_dtype: torch.dtype  # that keys and values are stored as
    device: torch.device
    vocab_size: int  # rows of the output layer
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_spec: KVSpec
    num_parameters: int
    weight_bytes: int  # held in memory: see held_bytes
    numerics_scheme: str

    attention_scheme: AttentionScheme | None = field(repr=False)  # where torch attends
    backend: str = "torch"  # or "cpp", "triton", "xformers"
    exact: bool = True
    row_multiple: int = 1  # rows of a pass, and of its logits, are filled up to it
    num_threads: int = 1  # that the schemes were chosen for

    @property
    def has_argmax(self) -> bool:
        """Whether the decoder can take the argmax of its logits without having them in memory."""
        return getattr(self.decoder, "has_argmax", False)

    @property
    def hidden_size(self) -> int:
        return self.hf_config.get_text_config().hidden_size

    @property
    def storage(self) -> str:
        """'float16': how linears' weights are stored, by name, where that is not `dtype`; '' where all of them are."""
        packed = [tensor for tensor in _held(self.decoder) if not isinstance(tensor, nn.Parameter)]
        narrower = {t.dtype for t in packed if t.is_floating_point() and t.itemsize < self.dtype.itemsize}
        return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrower))

    def run(
        self,
        token_ids: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        paged_pass: PagedPass,
        request: ForwardRequest,
    ) -> ForwardOutput:
        """One pass of the decoder; logits in the model's dtype. `request.argmax_of` only where it `has_argmax`."""
        return self.decoder(token_ids, positions, paged_pass, request)


def held_bytes(module: nn.Module) -> int:
    """The bytes of a module's parameters, buffers and the copies that our linears keep in their kernels' layouts.

    What modules share counts once.
    """
    held = {}
    for tensor in _held(module):
        # A packed tensor of oneDNN's has no address that could be asked for.
        place = id(tensor) if tensor.is_mkldnn else tensor.data_ptr()
        held[place] = max(held.get(place, 0), tensor.numel() * tensor.element_size())
    return sum(held.values())


def _held(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        own = (tensor for tensor in vars(part).values() if isinstance(tensor, Tensor))
        yield from (*part.parameters(recurse=False), *part.buffers(recurse=False), *own)

"""The attention of one pass, by the backend that was chosen for the model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specpaged.modeling.attention.base import PagedPass
from specpaged.modeling.attention.cpp_pass import CppPass
from specpaged.modeling.attention.torch_pass import TorchPass
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.ragged_batch import RaggedBatch


def new_pass(model: LoadedModel, batch: RaggedBatch, num_rows: int, kv_layers: Sequence[Tensor]) -> PagedPass:
    """The attention of a batch that is filled up to num_rows, on the layers' pools [P * S, 2, Hkv, D] each."""
    # Kernels are not imported before they are wanted: that takes seconds.
    if model.backend == "triton":
        from specpaged.modeling.attention.triton_pass import TritonPass

        return TritonPass(batch, num_rows, kv_layers)
    if model.backend == "cpp":
        return CppPass(batch, kv_layers)
    if model.backend == "xformers":
        from specpaged.modeling.attention.xformers_pass import XformersPass

        return XformersPass(batch, num_rows, kv_layers, model.attention_scheme, model.dtype)
    return TorchPass(batch, num_rows, kv_layers, model.attention_scheme, model.dtype)

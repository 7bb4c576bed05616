"""What a pass has to read and to multiply, and how long that would take if it did nothing else.

    roofs of a pass     bytes / (bytes/s of a bare loop)     flops / (flops/s of a bare loop)

No pass is quicker than the larger of the two. Bytes are those of weights as they are stored, and of KV; flops those of
matrix products, and of attention. What else a pass does (norms, activations, rotations, the argmax) counts for nothing,
so that it is part of what lies above the roof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

from specpaged.modeling.flat.config import FlatConfig, flat_config
from specpaged.modeling.flat.cpp_decoder import cpp_kernel, linears_of
from specpaged.modeling.flat.decoder import FlatDecoder
from specpaged.modeling.flat.weights import EMBEDDING, OUTPUT, expected_shapes
from specpaged.modeling.loaded_model import LoadedModel


@dataclass(frozen=True)
class Roof:
    """What a machine does in a second, at most."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Work:
    """What a pass cannot do without."""

    weight_bytes: int
    kv_bytes: int
    flops: int

    @property
    def num_bytes(self) -> int:
        """All that is read."""
        return self.weight_bytes + self.kv_bytes

    def seconds(self, roof: Roof) -> tuple[float, float]:
        """How long reading takes at this roof, and how long multiplying does."""
        return self.num_bytes / roof.bytes_per_second, self.flops / roof.flops_per_second


def work_of(
    config: FlatConfig, weight_bytes: int, kv_size: int, context_lens: Sequence[int], query_lens: Sequence[int]
) -> Work:
    """The work of a pass all of whose rows want logits: sequence i runs query_lens[i] tokens behind context_lens[i].

    `weight_bytes` are those of all matrices but the embedding, of which a few rows are read, `kv_size` those of an
    element of KV. Matrices are read once for all rows, a sequence's KV once for all of its rows. A product and its sum
    are two flops.
    """
    output = EMBEDDING if config.tied else OUTPUT
    elements = sum(
        prod(shape)
        for name, shape in expected_shapes(config).items()
        if len(shape) > 1 and (name == output or name not in (EMBEDDING, OUTPUT))
    )
    of_token = 2 * config.num_kv_heads * config.head_dim  # elements of KV in a layer
    of_pair = 4 * config.num_heads * config.head_dim  # flops of a query token and a key token: scores, and values
    kv_tokens = pairs = 0
    for layer in config.layers:
        for context_len, query_len in zip(context_lens, query_lens, strict=True):
            ends = range(context_len + 1, context_len + query_len + 1)
            window = layer.window or ends[-1]
            kv_tokens += ends[-1] - max(0, ends[0] - window)
            pairs += sum(min(end, window) for end in ends)
    return Work(
        weight_bytes=weight_bytes,
        kv_bytes=kv_size * of_token * kv_tokens,
        flops=2 * sum(query_lens) * elements + of_pair * pairs,
    )


def work_of_model(model: LoadedModel, context_lens: Sequence[int], query_lens: Sequence[int]) -> Work:
    """The same of a model that our C++ kernels run, with its weights as they are stored."""
    decoder: FlatDecoder = model.decoder.decoder
    linears = [*linears_of(decoder.layers), decoder.output]
    weight_bytes = sum(cpp_kernel(linear).weight.nbytes for linear in linears)
    return work_of(flat_config(model.hf_config), weight_bytes, model.kv_dtype.itemsize, context_lens, query_lens)


def beside_roofs(work: Work, seconds: Sequence[float], roofs: Sequence[Roof]) -> dict[str, Any]:
    """A pass beside its roofs, as plain data: seconds[i] was measured beside roofs[i], and ratios are taken there.

    `over_roof` is the pass over the larger of its two roofs, `roof` which one that is.
    """
    floors = [work.seconds(roof) for roof in roofs]
    of_bytes, of_flops = (median(times) for times in zip(*floors, strict=True))
    ratios = [of_pass / max(floor) for of_pass, floor in zip(seconds, floors, strict=True)]
    return {
        "ms": round(median(seconds) * 1e3, 4),
        "megabytes": round(work.num_bytes / 1e6, 3),
        "megaflops": round(work.flops / 1e6, 3),
        "ms_of_bytes": round(of_bytes * 1e3, 4),
        "ms_of_flops": round(of_flops * 1e3, 4),
        "roof": "bytes" if of_bytes > of_flops else "flops",
        "over_roof": {
            "median": round(median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3),
        },
    }  # fmt: skip

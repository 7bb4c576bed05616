"""The tensors of a checkpoint, as the headers of its safetensors files name them."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from specpaged.modeling.checkpoint import check_local_checkpoint

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_IGNORED = "rotary_emb.inv_freq"  # old checkpoints hold it, and it follows from the config
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F16"

    @property
    def num_elements(self) -> int:
        """The product of its sizes."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of it in its file."""
        return self.num_elements * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class CheckpointTensors:
    """A local checkpoint's config.json and tensors, of which no value has been read."""

    directory: Path
    config: dict
    tensors: tuple[StoredTensor, ...]

    @classmethod
    def read(cls, name: str, argument: str = "--model") -> CheckpointTensors:
        """Of a local directory, or of a hub id whose files are in the hub's cache here.

        Raises:
            ValueError: naming the argument or the file, and what is allowed.
        """
        directory = Path(name)
        if not directory.exists():
            directory = _cached(name, argument)
        check_local_checkpoint(str(directory))
        index = directory / _INDEX
        files = [_WEIGHTS]
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        tensors = tuple(tensor for file in files for tensor in _tensors(directory / file))
        return cls(directory, json.loads((directory / "config.json").read_text()), tensors)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def is_heads(self) -> bool:
        """Whether these are EAGLE-3's or Clover's heads, and no model that stands alone."""
        names = [*(self.config.get("architectures") or ()), self.config.get("speculators_model_type") or ""]
        return any(kind in name.lower() for name in names for kind in ("eagle", "clover")) or any(
            tensor.name.startswith("midlayer.") for tensor in self.tensors
        )

    @property
    def dtype(self) -> str:
        """The dtype of most of its elements: "float16"; "float32" where that is none of ours."""
        by_dtype: dict[str, int] = {}
        for tensor in self.tensors:
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.num_elements
        return _DTYPES.get(max(by_dtype, key=lambda dtype: by_dtype[dtype]), "float32")


def _cached(name: str, argument: str) -> Path:
    """Where the hub's cache has it. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    config = None
    if not name.startswith((".", "~", os.sep)):
        try:
            config = try_to_load_from_cache(name, "config.json")
        except (HFValidationError, ValueError):
            config = None
    if not isinstance(config, str):
        raise ValueError(
            f"{argument}={name!r} is no directory, nor in the hub's cache here; allowed: a checkpoint whose files are "
            "here, as a plan reads their headers and downloads nothing"
        )
    return Path(config).parent


def _tensors(path: Path) -> list[StoredTensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return [
        StoredTensor(name, tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__" and _IGNORED not in name
    ]

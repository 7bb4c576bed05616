"""What can be known about a checkpoint from its files, before transformers opens it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100_000_000


def first_line(error: BaseException) -> str:
    """What a library says of an error before it goes into detail."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_local_checkpoint(model: str) -> None:
    """Raises ValueError, naming the file, where a local directory cannot be loaded."""
    directory = Path(model)
    if not directory.is_dir():
        raise ValueError(
            f"model {model!r} is a file; it must be a directory with config.json and safetensors, or a hub id"
        )
    config = directory / "config.json"
    if not config.is_file():
        raise ValueError(f"model {model!r} has no config.json")
    try:
        json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"model {model!r}: config.json is not valid JSON: {error}") from None
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f"model {model!r}: {index.name} is no safetensors index with a weight_map") from None
    else:
        files = ["model.safetensors"]
    for name in files:
        path = directory / name
        if path.is_file():
            check_safetensors(path)
            continue
        pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
        if pickles and not index.is_file():
            raise ValueError(
                f"model {model!r} holds its weights as a pickle ({pickles[0]}), which can run code when it is opened "
                f"and is never loaded; convert it to safetensors"
            )
        raise ValueError(f"model {model!r} has no weights: {name} is missing")


def check_safetensors(path: Path) -> None:
    """Compares a safetensors file's header with its size. Raises ValueError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if length is None or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is truncated or no safetensors file: its header does not fit in {size} bytes")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ValueError(f"{path} is no safetensors file: its header cannot be read") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise ValueError(f"{path} is {what}: {size} bytes where its header asks for {expected}")

"""Trained heads as a folder: config.json and model.safetensors, with the names of their authors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specpaged.training.heads.clover import Clover
from specpaged.training.heads.eagle3 import Eagle3

HEADS: dict[str, type[Eagle3] | type[Clover]] = {"eagle3": Eagle3, "clover": Clover}
ARCHITECTURES = {"LlamaForCausalLMEagle3": Eagle3, "CloverForCausalLM": Clover}


def save_heads(heads: Eagle3 | Clover, folder: Path, dtype: torch.dtype) -> None:
    """Write both files. Embedding and, for Clover, output layer are the target's and not in them."""
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    config = heads.as_config() | {"dtype": name, "torch_dtype": name}  # the older name is what older readers look for
    tensors = {
        key: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for key, tensor in heads.state_dict().items()
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_heads(folder: Path) -> Eagle3 | Clover:
    """The heads of a folder in float32, to train or to compare with."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    heads = ARCHITECTURES[config["architectures"][0]].from_config(config, tensors)
    heads.load_state_dict(tensors)
    return heads.eval()

"""Synthetic pairs: the shapes and the cost of real models, random weights, a chosen acceptance.

What a token is followed by is decided at the ends alone. Embeddings are rows of random signs, nearly orthogonal to each
other; the layers compute all that they would, and what they add is too small to turn the hidden state away from its
token's embedding; the output layer has at row f(v) the embedding of token v. So f(v) follows v, with a logit of
PEAK where the others' are near zero. The target's f is one cycle through the vocabulary in random order: no output ever
repeats. The draft's f is the same, but for a share of the tokens, whose successors have changed places.

With several acceptances the vocabulary falls into as many regions of equal size, in the order of token ids. Each has a
cycle of its own, so that an output stays in the region of its prompt's last token; or, with `turns_after`, all have one
together, which takes so many tokens of each region in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from specpaged.modeling.flat.config import flat_config
from specpaged.modeling.flat.weights import EMBEDDING, OUTPUT, expected_shapes

Shape = dict[str, Any]  # entries of a config.json

QWEN3: Shape = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
}
LLAMA3: Shape = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def _shape(family: Shape, hidden: int, intermediate: int, layers: int, heads: int, head_dim: int = 128) -> Shape:
    return family | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
    }


# From the models' published config.json files. Output layers are never tied to embeddings here: the file grows by
# that, and what a pass reads does not.
SHAPES: dict[str, Shape] = {
    "Qwen3-0.6B": _shape(QWEN3, 1024, 3072, 28, 16),
    "Qwen3-1.7B": _shape(QWEN3, 2048, 6144, 28, 16),
    "Qwen3-4B": _shape(QWEN3, 2560, 9728, 36, 32),
    "Qwen3-8B": _shape(QWEN3, 4096, 12288, 36, 32),
    "Qwen3-14B": _shape(QWEN3, 5120, 17408, 40, 40),
    "Llama-3.2-1B": _shape(LLAMA3, 2048, 8192, 16, 32, 64),
    "Llama-3.1-8B": _shape(LLAMA3, 4096, 14336, 32, 32),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PEAK = 20.0  # a sampled output at temperature 1 follows f, too: e^-20 is left for 150,000 others
LAYERS_SHARE = 0.05  # of the hidden state's norm, at most about, that all layers together add
RANDOM_VALUES = 1 << 22  # that all inner matrices are cut from
BYTES_PER_FILE = 4 << 30
SMALLEST_WIDTH = 256  # in fewer dimensions, of thousands of random directions two are too near to each other


@dataclass(frozen=True)
class SyntheticPair:
    """Directories that `LLM` and `load_model` take, and what they were made for."""

    target: str
    draft: str
    acceptance: float | tuple[float, ...]


def synthetic_pair(
    target: str | Shape,
    draft: str | Shape,
    *,
    directory: str | Path,
    acceptance: float | Sequence[float] = 0.8,
    turns_after: int | None = None,
    scale: int = 1,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> SyntheticPair:
    """Write a target and a draft into `directory`, whose greedy tokens agree at the rate `acceptance`, or at one rate
    for each region of the vocabulary; with `turns_after`, outputs go to the next region behind so many tokens.

    `target` and `draft` are names of SHAPES, or shapes like theirs; `scale` divides widths, heads, layers and the
    vocabulary (never below what the family needs). Each config.json says "synthetic", as the start-up report of an
    engine on it does.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    for name, value in (("target", target), ("draft", draft)):
        if isinstance(value, str) and value not in SHAPES:
            raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(SHAPES)}, or an entry like theirs")
    rates = (acceptance,) if isinstance(acceptance, int | float | str) else tuple(acceptance)
    if not rates or not all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates):
        raise ValueError(f"acceptance={acceptance!r} must be a number from 0 to 1, or several")
    if turns_after is not None and (not isinstance(turns_after, int) or turns_after < 1 or len(rates) < 2):
        raise ValueError(f"turns_after={turns_after!r} must be an int >= 1, beside several acceptances")
    if isinstance(scale, bool) or not isinstance(scale, int) or not 1 <= scale <= 64:
        raise ValueError(f"scale={scale!r} must be an int from 1 to 64")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    shapes = [_scaled(SHAPES[shape] if isinstance(shape, str) else shape, scale) for shape in (target, draft)]
    vocab_size = shapes[0]["vocab_size"]
    if shapes[1]["vocab_size"] != vocab_size:
        raise ValueError(f"draft={draft!r} has another vocabulary than target={target!r}; allowed: one of its family")
    generator = torch.Generator().manual_seed(seed)
    successor, proposed = successors(vocab_size, rates, generator, turns_after)
    paths = []
    for role, of_role, shape, follows in (
        ("target", target, shapes[0], successor),
        ("draft", draft, shapes[1], proposed),
    ):
        name = of_role if isinstance(of_role, str) else "custom"
        path = Path(directory) / f"synthetic-{role}-{name}"
        label = f"synthetic: the shape of {name}" + (f" / {scale}" if scale > 1 else "")
        config = AutoConfig.for_model(
            **shape, dtype=dtype, synthetic=label, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None
        )
        _write(path, config, follows, DTYPES[dtype], generator)
        paths.append(str(path))
    return SyntheticPair(*paths, rates if len(rates) > 1 else rates[0])


def successors(
    vocab_size: int, acceptance: Sequence[float], generator: torch.Generator, turns_after: int | None = None
) -> tuple[Tensor, Tensor]:
    """f of the target and of the draft, [V] int64 each: permutations that agree on the share of each region."""
    bounds = [vocab_size * i // len(acceptance) for i in range(len(acceptance) + 1)]
    regions = [first + torch.randperm(end - first, generator=generator) for first, end in pairwise(bounds)]
    cycles = regions
    if turns_after is not None:
        runs = zip_longest(*(region.split(turns_after) for region in regions), fillvalue=regions[0][:0])
        cycles = [torch.cat([run for of_turn in runs for run in of_turn])]
    successor = torch.empty(vocab_size, dtype=torch.int64)
    for cycle in cycles:
        successor[cycle] = cycle.roll(-1)
    proposed = successor.clone()
    for region, rate in zip(regions, acceptance, strict=True):
        order = torch.randperm(len(region), generator=generator)
        changed = region[order[: round((1 - rate) * len(region))]]
        proposed[changed] = successor[changed].roll(1)
    return successor, proposed


def _scaled(shape: Shape, scale: int) -> Shape:
    if scale == 1:
        return shape
    kv_heads = max(1, shape["num_key_value_heads"] // scale)
    group = shape["num_attention_heads"] // shape["num_key_value_heads"]
    return shape | {
        "vocab_size": shape["vocab_size"] // scale,
        "hidden_size": max(SMALLEST_WIDTH, shape["hidden_size"] // scale // 16 * 16),
        "intermediate_size": max(SMALLEST_WIDTH, shape["intermediate_size"] // scale // 16 * 16),
        "num_hidden_layers": max(1, shape["num_hidden_layers"] // scale),
        "num_attention_heads": group * kv_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
    }


def _write(path: Path, config: PreTrainedConfig, follows: Tensor, dtype: torch.dtype, generator: torch.Generator):
    """config.json and safetensors files of a few GB each, with their index."""
    config.save_pretrained(path)
    hidden_size, num_layers = config.hidden_size, config.num_hidden_layers
    values = torch.randn(RANDOM_VALUES, generator=generator)
    signs = torch.randint(0, 2, (len(follows), hidden_size), dtype=torch.int8, generator=generator).mul_(2).sub_(1)
    embedding = signs.to(dtype)
    files: dict[str, str] = {}
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held:
            name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            save_file(held, path / name)
            files.update(dict.fromkeys(held, name))
            held.clear()

    for name, shape in expected_shapes(flat_config(config)).items():
        if name == EMBEDDING:
            tensor = embedding
        elif name == OUTPUT:
            tensor = torch.empty_like(embedding)
            tensor[follows] = embedding * (PEAK / hidden_size)
        elif len(shape) == 1:
            tensor = torch.ones(shape, dtype=dtype)
        else:
            std = 1 / math.sqrt(shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # what a layer adds
                std *= LAYERS_SHARE / math.sqrt(2 * num_layers)
            tensor = _cut(values, shape, generator).mul_(std).to(dtype)
        if sum(t.nbytes for t in held.values()) + tensor.nbytes > BYTES_PER_FILE:
            flush()
        held[name] = tensor
    flush()
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _cut(values: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A matrix of normal values from a random place on, over and over: drawing 8 G of them would take minutes."""
    count = math.prod(shape)
    start = int(torch.randint(0, len(values), (1,), generator=generator))
    repeated = values.roll(-start).repeat(-(-count // len(values)))
    return repeated[:count].view(shape)

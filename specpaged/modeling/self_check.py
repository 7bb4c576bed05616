"""What a loaded model must show before it is used, on a few tokens and a tiny KV cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specpaged.modeling.attention.base import HOOK
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.numerics import InexactError
from specpaged.modeling.ragged_batch import RaggedRow, pack
from specpaged.paging.kv_cache import PagedKVCache

TORCH_BLOCK_SIZE = 4  # so that the few tokens lie in several blocks; kernels are compiled for the block size in use
# Differences relative to the logits' size. Rounding in half precision adds up like a random walk over the layers: toys
# differ by 0.02 at most with 2 layers, mixtures by 0.08 with 32.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE_PER_LAYER = 0.035


def _runner(model: LoadedModel, num_blocks: int, block_size: int, kv_dtype: torch.dtype | None = None) -> ModelRunner:
    cache = PagedKVCache(model.kv_spec, num_blocks, block_size, kv_dtype or model.kv_dtype, model.device)
    return ModelRunner(model, cache)


def _check_block_size(model: LoadedModel, block_size: int) -> int:
    return TORCH_BLOCK_SIZE if model.backend == "torch" else block_size


def _run(runner: ModelRunner, *rows: RaggedRow) -> Tensor:
    return runner.forward(pack(rows, runner.kv_cache.block_size, runner.model.device)).logits


def _tokens(model: LoadedModel, count: int) -> list[int]:
    return [(7 + 31 * i) % model.vocab_size for i in range(count)]


@contextmanager
def _refusing(model: LoadedModel) -> Iterator[None]:
    """Whatever the model's own code raises becomes a ValueError that names the model."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"model {model.name!r} ({model.architecture}) is not supported: its forward fails on paged KV "
            f"({type(error).__name__}: {error})"
        ) from error


@torch.inference_mode()
def check_against_eager(model: LoadedModel, block_size: int) -> None:
    """Compares packed attention, in a prefill and past it, with transformers' eager attention. Raises ValueError.

    Catches what an architecture does around attention that the hook never sees: biases, other masks, other positions.
    """
    length = min(12, model.max_model_len)
    context = length // 3
    tokens = _tokens(model, length)
    with _refusing(model):
        # KV is not rounded here: what it is stored as is none of the architecture's.
        runner = _runner(model, 3, _check_block_size(model, block_size), model.dtype)
        parts = [_run(runner, RaggedRow(tokens[:context], 0, [2, 1, 3], context))] if context else []
        parts.append(_run(runner, RaggedRow(tokens[context:], context, [2, 1, 3], length - context)))
        model.decoder.module.set_attn_implementation("eager")
        try:
            ids = torch.tensor([tokens], device=model.device)
            eager = model.decoder.module(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            model.decoder.module.set_attn_implementation(HOOK)
    apart = torch.cat(parts) - eager
    if model.dtype == torch.float32:
        tolerance = FLOAT32_TOLERANCE
        difference = float(apart.norm() / eager.norm().clamp(min=1e-6))
    else:
        # A router may pick another expert for a last bit's sake, in a few rows; what is wrong is wrong in most.
        tolerance = HALF_TOLERANCE_PER_LAYER * len(model.kv_spec.layers) ** 0.5
        difference = float((apart.norm(dim=1) / eager.norm(dim=1).clamp(min=1e-6)).median())
    if not difference <= tolerance:
        raise ValueError(
            f"model {model.name!r} ({model.architecture}) is not supported: its logits on paged KV differ from those "
            f"of transformers' eager attention by {difference:.3g} of their size, and {tolerance:.3g} is allowed"
        )


def check_rows(model: LoadedModel, block_size: int) -> None:
    """Compares the bits of one-token decodes, of a verify beside a mate and of a prefill. Raises InexactError."""
    verify = min(6, model.max_model_len - 1)
    prompt = min(9, model.max_model_len - verify)
    if verify < 1:
        return
    tokens = _tokens(model, prompt + verify)
    block_size = _check_block_size(model, block_size)
    num_blocks = -(-len(tokens) // block_size)
    blocks, shuffled = list(range(1, num_blocks + 1)), list(range(2 * num_blocks, num_blocks, -1))
    with _refusing(model):
        runner = _runner(model, 2 * num_blocks, block_size)
        _run(runner, RaggedRow(tokens[:prompt], 0, blocks, 0))
        decoded = [_run(runner, RaggedRow(tokens[i : i + 1], i, blocks, 1)) for i in range(prompt, len(tokens))]
        # The mate is the same sequence one token further behind, in other blocks.
        if prompt > 1:
            _run(runner, RaggedRow(tokens[: prompt - 1], 0, shuffled, 0))
        verified = _run(
            runner,
            RaggedRow(tokens[prompt - 1 : prompt], prompt - 1, shuffled, 1),
            RaggedRow(tokens[prompt:], prompt, blocks, verify),
        )[1:]
        prefilled = _run(_runner(model, num_blocks, block_size), RaggedRow(tokens, 0, blocks[::-1], verify))
    for other, what in ((verified, "a verify beside a mate"), (prefilled, "a prefill")):
        if not torch.equal(torch.cat(decoded), other):
            raise InexactError(
                f"model {model.name!r} ({model.architecture}) cannot be run with numerics='exact' here: logits from a "
                f"one-token decode and from {what} differ; use numerics='fast'"
            )

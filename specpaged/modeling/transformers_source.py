"""Any Hugging Face causal language model, in its own modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from specpaged.modeling.attention.base import HOOK, PagedPass
from specpaged.modeling.checkpoint import first_line
from specpaged.modeling.exact import ExactLinears, make_exact, make_fast
from specpaged.modeling.families import find_layers
from specpaged.modeling.norm import fuse_norms, use_kernel_norms
from specpaged.modeling.rope import freeze_rope


class TransformersDecoder(nn.Module):
    """A model whose attention goes through our hook. See Source."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, logits_idx: Tensor | None) -> Tensor:
        """token_ids and positions [N] int64, logits_idx [M] int64 (None: all rows) -> [M, V]"""
        return self.module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if logits_idx is None else logits_idx,
            paged_pass=paged_pass,
        ).logits[0]


class TransformersSource:
    """See Source. Raises ValueError, naming the model, for what cannot be loaded or does not run on paged KV."""

    implementation = "transformers"

    def __init__(
        self,
        model: str,
        config: PreTrainedConfig,
        dtype: torch.dtype | None,
        device: torch.device,
        max_model_len: int,
        trust_remote_code: bool,
    ):
        module = _load_module(model, config, dtype, trust_remote_code)
        if not module.dtype.is_floating_point or module.dtype.itemsize not in (2, 4):
            raise ValueError(f"dtype of model {model!r} is {module.dtype}; allowed: float32, bfloat16, float16")
        if module.dtype == torch.float16 and device.type == "cpu":
            module = module.float()
        # Never .to(dtype): it would round RoPE's frequencies.
        self.module = module.to(device).eval().requires_grad_(False)
        self.architecture = type(module).__name__
        self.dtype = module.dtype
        self.layers = find_layers(module, model, max_model_len)
        freeze_rope(module, max_model_len)
        self.vocab_size = module.get_output_embeddings().weight.shape[0]
        self.num_parameters = sum(p.numel() for p in module.parameters())

    def exact(self, linears: ExactLinears) -> tuple[nn.Module, set[int]]:
        """See Source.exact."""
        config = self.module.config.get_text_config()
        inner_sizes = {
            size
            for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
            if isinstance(size := getattr(config, name, None), int)
        }
        if getattr(config, "final_logit_softcapping", None) is not None:
            inner_sizes.add(self.vocab_size)
        for name, buffer in self.module.named_buffers():
            if name.endswith("inv_freq"):
                inner_sizes.add(buffer.shape[-1])
        (use_kernel_norms if linears.backend == "triton" else fuse_norms)(self.module, self.dtype)
        make_exact(self.module, linears)
        if linears.backend != "triton":
            linears.want_rows(2)
        return TransformersDecoder(self.module), inner_sizes

    def fast(self, backend: str) -> nn.Module:
        """See Source.fast."""
        fuse_norms(self.module, self.dtype)
        make_fast(self.module, backend)
        return TransformersDecoder(self.module)


@contextmanager
def _quiet() -> Iterator[None]:
    """What transformers warns about while it loads is an error here, in one sentence, and its progress bar is noise."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _load_module(model: str, config: PreTrainedConfig, dtype: torch.dtype | None, trust_remote_code: bool) -> nn.Module:
    options: dict[str, Any] = dict(
        config=config,
        dtype=dtype or "auto",
        attn_implementation=HOOK,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below, all of them
    )
    try:
        with _quiet():
            module, info = AutoModelForCausalLM.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        if HOOK in str(error):
            raise ValueError(
                f"model {model!r} ({config.model_type}) is not supported: its attention cannot be replaced by ours"
            ) from error
        raise ValueError(f"model {model!r} ({config.model_type}) cannot be loaded: {first_line(error)}") from error
    problems = {
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "of another shape": sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]),
    }
    if any(problems.values()):
        found = "; ".join(
            f"{len(keys)} {kind} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
            for kind, keys in problems.items()
            if keys
        )
        raise ValueError(
            f"model {model!r}: the weights are not those of {type(module).__name__}, named by config.json: {found}"
        )
    names = getattr(config, "architectures", None) or []
    if names and names[0].endswith("ForCausalLM") and names[0] != type(module).__name__:
        raise ValueError(
            f"model {model!r}: config.json names the architecture {names[0]}, its model_type {config.model_type!r} is "
            f"{type(module).__name__}"
        )
    return module

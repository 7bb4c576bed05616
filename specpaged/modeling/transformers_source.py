"""Any Hugging Face causal language model, in its own modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging
from typing_extensions import override

from specpaged.modeling.attention.base import HOOK, PagedPass
from specpaged.modeling.checkpoint import first_line
from specpaged.modeling.exact import ExactLinears, make_exact, make_fast
from specpaged.modeling.families import find_decoder_layers, find_layers
from specpaged.modeling.forward_output import ForwardOutput, ForwardRequest
from specpaged.modeling.norm import fuse_norms, use_kernel_norms
from specpaged.modeling.rope import freeze_rope
from specpaged.modeling.source import Source


class TransformersDecoder(nn.Module):
    """A Decoder (see `source`) that is a transformers model whose attention goes through our hook."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    @cached_property
    def _layers(self) -> nn.ModuleList:
        return find_decoder_layers(self.module)

    def check_shows_layers(self) -> None:
        """Raises ValueError where hidden states cannot be taken down, as there is no list of the model's layers."""
        _ = self._layers

    @override
    def forward(
        self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest
    ) -> ForwardOutput:
        if request.hidden is None:
            return ForwardOutput(self._logits(token_ids, positions, paged_pass, request), None, None)
        with _HiddenStatesHooks(self._layers, request) as hooks:
            logits = self._logits(token_ids, positions, paged_pass, request)
        return ForwardOutput(logits, None, request.hidden_states(hooks.last, hooks.layer_inputs))

    def _logits(self, token_ids: Tensor, positions: Tensor, paged_pass: PagedPass, request: ForwardRequest) -> Tensor:
        return self.module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if request.logits_idx is None else request.logits_idx,
            paged_pass=paged_pass,
        ).logits[0]


class _HiddenStatesHooks(ExitStack):
    """Hooks on a model's layers that take down, during a pass, the hidden states that are asked for."""

    def __init__(self, layers: nn.ModuleList, request: ForwardRequest):
        super().__init__()
        self.hidden_idx = request.hidden_idx
        self.last: Tensor | None = None  # [R, H]
        self.layer_inputs: dict[int, Tensor] = {}  # [R, H] each, by layer
        handles = [
            layer.register_forward_pre_hook(partial(self._take_input, layer_idx), with_kwargs=True)
            for layer_idx, layer in enumerate(layers)
            if request.wants_input_of(layer_idx)
        ]
        if request.wants_last:
            handles.append(layers[-1].register_forward_hook(self._take_last))
        for handle in handles:
            self.callback(handle.remove)

    def _take_input(self, layer_idx: int, _: nn.Module, args: tuple, kwargs: dict) -> None:
        self.layer_inputs[layer_idx] = self._rows(args[0] if args else kwargs["hidden_states"])

    def _take_last(self, _: nn.Module, __: tuple, output: Tensor | tuple) -> None:
        self.last = self._rows(output[0] if isinstance(output, tuple) else output)

    def _rows(self, hidden_states: Tensor) -> Tensor:
        """[1, N, H] -> [R, H]"""
        return hidden_states[0] if self.hidden_idx is None else hidden_states[0].index_select(0, self.hidden_idx)


class TransformersSource(Source):
    """A model as transformers loads it. Raises ValueError, by name, if it cannot be loaded or run on paged KV."""

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

    @override
    def exact(self, linears: ExactLinears) -> tuple[nn.Module, set[int]]:
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

    @override
    def fast(self, backend: str) -> nn.Module:
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
        differences = "; ".join(
            f"{len(keys)} {kind} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
            for kind, keys in problems.items()
            if keys
        )
        raise ValueError(
            f"model {model!r}: the weights are not those of {type(module).__name__}, named by config.json: "
            f"{differences}"
        )
    names = getattr(config, "architectures", None) or []
    if names and names[0].endswith("ForCausalLM") and names[0] != type(module).__name__:
        raise ValueError(
            f"model {model!r}: config.json names the architecture {names[0]}, its model_type {config.model_type!r} is "
            f"{type(module).__name__}"
        )
    return module

"""A request's sampling parameters, from vLLM's to ours: what is not translated is refused."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams as VllmSamplingParams

from specpaged.sampling_params import EXTRA_ARGS, SamplingParams

# What vLLM's front end and scheduler do by themselves, whatever a worker does.
_NOT_THE_WORKERS = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "include_stop_str_in_output",
        "output_kind",
        "repetition_detection",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stream_interval",
        "structured_outputs",  # its bitmask comes with each step
    }
)
_OURS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
)
_OTHERS = ("n", "bad_words", "extra_args")  # vLLM makes n requests, tokenises bad words; others have extra_args, too


def translated(params: VllmSamplingParams) -> SamplingParams:
    """The SamplingParams of ours that ask for what vLLM's ask for. Extra arguments that are not ours are passed over.

    Raises:
        ValueError: naming a parameter, its value and what is allowed, where one asks for what we do not do.
    """
    known = {*_OURS, *_OTHERS, *_NOT_THE_WORKERS}
    defaults = VllmSamplingParams()
    for name in params.__struct_fields__:
        if name.startswith("_") or name == "output_text_buffer_length" or name in known:
            continue
        value = getattr(params, name)
        if name == "watermarking":  # True by default where vLLM was configured for it, which the worker refuses
            continue
        if name == "prompt_logprob_token_ids" and value is not None:
            value = list(value)  # vLLM makes an array of it, which does not compare
        if value != getattr(defaults, name):
            raise ValueError(
                f"{name}={value!r} is not supported by specpaged's worker; allowed: {getattr(defaults, name)!r}"
            )
    if params.prompt_logprobs is not None and params.skip_reading_prefix_cache is False:
        raise ValueError(
            "skip_reading_prefix_cache=False is not supported by specpaged's worker with prompt_logprobs; allowed: True"
        )
    arguments = {name: getattr(params, name) for name in _OURS}
    extra_args = {name: value for name, value in (params.extra_args or {}).items() if name in EXTRA_ARGS}
    return SamplingParams(**arguments, extra_args=extra_args)

"""What a user asks of one request, with vLLM's names, meanings and defaults. Ints and strings only, no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MIN_TEMPERATURE = 1e-2  # vLLM lifts smaller temperatures to this: logits / temperature must stay finite
_MAX_LOGIT_BIAS = 100.0
_MAX_N = 16384  # vLLM's cap
EXTRA_ARGS = ("num_speculative_tokens",)


def _refuse(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name}={value!r} is not allowed: {name} must be {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; every field means what it means in vLLM.

    Lists are kept as tuples without repetitions. Errors are ValueErrors that name the argument, its value and what
    is allowed, for a keyword that does not exist too. What depends on the model is checked by `validate_for_model`.
    """

    n: int = 1
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    repetition_penalty: float = 1.0  # over prompt and output tokens
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0
    logprobs: int | None = None  # -1: the whole vocabulary
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: Mapping[str, Any] | None = None  # {"num_speculative_tokens": k}: this request's K

    def __new__(cls, *_args: object, **kwargs: object) -> SamplingParams:
        """Refuse unknown keywords by name: vLLM has more of them than we support."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in kwargs.items():
            if name not in names:
                raise ValueError(
                    f"{name}={value!r}: SamplingParams does not support {name!r}; supported: {', '.join(names)}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lists()
        if self.greedy:
            if self.n > 1:
                raise _refuse("n", self.n, "1 with temperature 0 (greedy): all outputs would be the same")
            for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                self._set(name, off)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            self._set(name, self._distinct(name) or ())
        self._set("allowed_token_ids", self._distinct("allowed_token_ids"))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                self._set(name, 1)
        if self.seed == -1:
            self._set("seed", None)
        if self.top_k == -1:
            self._set("top_k", 0)
        if _is_number(self.temperature) and 0 < self.temperature < _MIN_TEMPERATURE:
            self._set("temperature", _MIN_TEMPERATURE)

    def _distinct(self, name: str) -> tuple | None:
        """A list's entries, each once and in order."""
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, str | bytes):
            raise _refuse(name, value, "a list or None")
        try:
            return tuple(dict.fromkeys(value))
        except TypeError:
            raise _refuse(name, value, "a list or None") from None

    def _check_numbers(self) -> None:
        def number(name: str, allowed: str, ok) -> None:
            value = getattr(self, name)
            if not (_is_number(value) and ok(value)):
                raise _refuse(name, value, allowed)

        def integer(name: str, allowed: str, ok, none: bool = False) -> None:
            value = getattr(self, name)
            if not (value is None and none) and not (_is_int(value) and ok(value)):
                raise _refuse(name, value, allowed)

        integer("n", f"an int from 1 to {_MAX_N}", lambda v: 1 <= v <= _MAX_N)
        number("presence_penalty", "a number in [-2, 2]", lambda v: -2 <= v <= 2)
        number("frequency_penalty", "a number in [-2, 2]", lambda v: -2 <= v <= 2)
        number("repetition_penalty", "a finite number > 0", lambda v: v > 0)
        number("temperature", "a finite number >= 0 (0: greedy)", lambda v: v >= 0)
        number("top_p", "a number in (0, 1]", lambda v: 0 < v <= 1)
        number("min_p", "a number in [0, 1]", lambda v: 0 <= v <= 1)
        integer("top_k", "an int >= 1, or 0 or -1 (off)", lambda v: v >= 0)
        integer("seed", "None or a 64-bit int", lambda v: -(2**63) <= v < 2**64, none=True)
        integer("max_tokens", "None or an int >= 1", lambda v: v >= 1, none=True)
        integer("min_tokens", "an int >= 0", lambda v: v >= 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            integer(name, "None, an int >= 0, or -1 (the whole vocabulary)", lambda v: v >= -1, none=True)
        flags = ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")
        for name in (*flags, "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "True or False")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                raise _refuse(name, getattr(self, name), "made of strings that are not empty")
        if self.stop and not self.detokenize:
            raise _refuse("stop", self.stop, "empty with detokenize=False: stop strings are found in the text")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not all(_is_int(token_id) and token_id >= 0 for token_id in getattr(self, name) or ()):
                raise _refuse(name, getattr(self, name), "made of token ids (ints >= 0)")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _refuse("allowed_token_ids", [], "None or name at least one token id")
        if self.logit_bias is not None:
            self._set("logit_bias", self._checked_logit_bias(self.logit_bias))
        if self.extra_args is not None:
            self._check_extra_args(self.extra_args)
            self._set("extra_args", dict(self.extra_args))

    @staticmethod
    def _checked_logit_bias(logit_bias: Mapping[int, float]) -> dict[int, float]:
        """Clamped as vLLM clamps it; ids may be strings of digits, as JSON brings them."""
        allowed = "a mapping {token id: finite number}"
        if not isinstance(logit_bias, Mapping):
            raise _refuse("logit_bias", logit_bias, allowed)
        checked: dict[int, float] = {}
        for token_id, bias in logit_bias.items():
            if isinstance(token_id, str) and token_id.isdecimal():
                token_id = int(token_id)
            if not (_is_int(token_id) and token_id >= 0 and _is_number(bias)):
                raise _refuse("logit_bias", {token_id: bias}, allowed)
            checked[token_id] = min(_MAX_LOGIT_BIAS, max(-_MAX_LOGIT_BIAS, float(bias)))
        return checked

    @staticmethod
    def _check_extra_args(extra_args: Mapping[str, Any]) -> None:
        if not isinstance(extra_args, Mapping):
            raise _refuse("extra_args", extra_args, "None or a mapping")
        for name, value in extra_args.items():
            if name not in EXTRA_ARGS:
                raise ValueError(
                    f"extra_args has the key {name!r} (value {value!r}); supported: {', '.join(EXTRA_ARGS)}"
                )
            if not (_is_int(value) and value >= 0):
                raise _refuse(f"extra_args[{name!r}]", value, "an int >= 0")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken: no noise."""
        return self.temperature == 0

    @property
    def num_speculative_tokens(self) -> int | None:
        """K that this request asks for; None: the engine's."""
        return (self.extra_args or {}).get("num_speculative_tokens")


def validate_for_model(params: SamplingParams, vocab_size: int, tokenizer_present: bool) -> None:
    """Refuse token ids that the model does not have, and what needs a tokenizer where there is none."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        outside = [token_id for token_id in getattr(params, name) or () if token_id >= vocab_size]
        if outside:
            raise ValueError(f"{name} has token ids {outside} out of range: the model has 0..{vocab_size - 1}")
    if not tokenizer_present:
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise _refuse(name, getattr(params, name), "empty: there is no tokenizer to read it with")


def bad_words_token_ids(
    params: SamplingParams, tokenizer: Any, vocab_size: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of `params.bad_words`, tokenised as at the start of a text and as inside it.

    As in vLLM, the form with a leading space counts only when it has as many tokens and another first one.

    Raises:
        ValueError: for a word without tokens, or with tokens outside the vocabulary.
    """
    sequences: list[tuple[int, ...]] = []
    for word in params.bad_words or ():
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not plain:
            raise _refuse("bad_words", word, "made of words that have at least one token")
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if vocab_size is not None and max(plain + spaced) >= vocab_size:
            raise _refuse("bad_words", word, f"made of words whose token ids are below {vocab_size}")
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return tuple(sequences)

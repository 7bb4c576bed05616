"""Choosing tokens on a CPU: see sampling.cpp."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specpaged_kernels.cpu.build import load
from specpaged_kernels.cpu.library import INT, POINTER, SIZE, SOURCE, check_status


class Choice(NamedTuple):
    """How a row's token is chosen."""

    temperature: float = 1.0  # 0 and 1: logits as they are
    min_p: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    keys: tuple[int, int, int] | None = None  # uint32, of the row's noise; None: it has none


class Chosen(NamedTuple):
    """The tokens of M rows."""

    token_ids: Tensor  # [M] int64, of equals the lowest; 0 where there is none
    ok: Tensor  # [M] bool: there is one, as no logit is NaN and not all are -inf
    logprobs: Tensor  # [M] float32: its log-softmax of the logits that stay, NaN where there is none; 0 unless wanted


class _Choice(ctypes.Structure):
    _fields_ = [
        ("temperature", ctypes.c_float),
        ("log_min_p", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("keys", ctypes.c_uint32 * 3),
        ("has_noise", ctypes.c_uint32),
    ]


@functools.cache
def _function():
    function = load(SOURCE).choose
    function.argtypes = [POINTER, SIZE, SIZE, SIZE, POINTER, INT, INT, POINTER, POINTER, POINTER]
    function.restype = INT
    return function


def choose(
    logits: Tensor,  # [M, V] float32, V contiguous
    choices: Sequence[Choice],  # [M]
    wants_logprobs: bool = False,
) -> Chosen:
    """What `choose_ref` says.

    Raises:
        ValueError: logits of another kind, not as many choices, or one of them that is out of range.
        MemoryError: there is none for a copy of a row.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != torch.float32 or not logits.is_cpu or (vocab_size > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits are {logits.dtype} on {logits.device}, strides {logits.stride()}; allowed: float32 "
                         "on a CPU, V contiguous")  # fmt: skip
    if not 1 <= vocab_size < 2**31 - 8:
        raise ValueError(f"logits are of {vocab_size} ids; allowed: 1 to 2^31 - 9")
    if len(choices) != num_rows:
        raise ValueError(f"choices are {len(choices)}; allowed: {num_rows}, the rows of logits")
    table = (_Choice * num_rows)(*[_row(choice, vocab_size) for choice in choices])
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    ok = torch.empty(num_rows, dtype=torch.bool)
    logprobs = torch.empty(num_rows)
    status = _function()(
        logits.data_ptr(), logits.stride(0), num_rows, vocab_size, ctypes.addressof(table), wants_logprobs,
        torch.get_num_threads(), token_ids.data_ptr(), ok.data_ptr(), logprobs.data_ptr(),
    )  # fmt: skip
    check_status(status)
    return Chosen(token_ids, ok, logprobs)


def _row(choice: Choice, vocab_size: int) -> tuple:
    temperature, min_p, top_k, top_p, keys = choice
    if not (temperature >= 0 and 0 <= min_p <= 1 and top_k >= 0 and 0 < top_p <= 1):
        raise ValueError(f"{choice}; allowed: temperature and top_k from 0, min_p 0 to 1, top_p above 0 up to 1")
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    top_k = min(top_k, vocab_size) or vocab_size
    return temperature, log_min_p, top_k, top_p, keys or (0, 0, 0), keys is not None


def choose_ref(
    logits: Tensor,
    choices: Sequence[Choice],
    noise: Tensor | None = None,  # [M, V] float32: the noise of rows that have some
) -> Chosen:
    """Token by token: x / temperature; -inf what lies below the largest + ln min_p, and what is not of the top_k
    largest, or of those before which less than top_p of their weight comes; then the largest with noise.

    Tokens are in the order (largest value, lowest id), and weigh floor(2^40 e^(x - largest)).
    """
    token_ids, ok, logprobs = [], [], []
    for r, (row, choice) in enumerate(zip(logits, choices, strict=True)):
        x = row / torch.tensor(choice.temperature or 1.0)
        largest = x.max()
        if not bool(largest > -math.inf):
            token_ids, ok, logprobs = [*token_ids, 0], [*ok, False], [*logprobs, math.nan]
            continue
        if choice.min_p > 0:
            x[x < largest + torch.tensor(math.log(choice.min_p))] = -math.inf
        order = sorted(range(len(x)), key=lambda v: (-x[v].item(), v))[: choice.top_k or len(x)]
        weights = [int(w * 2**40) for w in _exp_ref(torch.stack([_behind(x[v], largest) for v in order])).tolist()]
        before, num_kept = 0, len(order)
        for rank, weight in enumerate(weights):
            if choice.top_p < 1 and not float(before) < float(sum(weights)) * choice.top_p:
                num_kept = max(1, rank)
                break
            before += weight
        stay = torch.full_like(x, -math.inf)
        stay[order[:num_kept]] = x[order[:num_kept]]
        noisy = stay + noise[r] if choice.keys is not None else stay
        token_ids.append(int(noisy.argmax()))  # of equals the first
        ok.append(True)
        logprobs.append(float(torch.log_softmax(stay, 0)[token_ids[-1]]))
    return Chosen(torch.tensor(token_ids), torch.tensor(ok), torch.tensor(logprobs))


def _behind(x: Tensor, largest: Tensor) -> Tensor:
    return x - largest if x != largest else torch.tensor(0.0)


def _exp_ref(x: Tensor) -> Tensor:
    """e^x for x <= 0, each operation rounded to float32 (Cephes' expf); 0 below -87."""
    n = (x.clamp(min=-87) * math.log2(math.e)).round()
    r = x.clamp(min=-87) - n * 0.693359375
    r = r - n * -2.12194440e-4
    y = r * 1.9875691500e-4
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1):
        y = (y + coefficient) * r
    return torch.where(x < -87, 0.0, ((y + 0.5) * r * r + r + 1) * 2.0**n)

"""Triton's interpreter with a matrix product whose rows do not know where they stand.

numpy's comes from a BLAS that treats the last rows of a tile otherwise than the first, which a GPU's does not, and it
multiplies bfloat16's raw bits.
"""

import dataclasses

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from specpaged.modeling import loading
from tests import toys


def _float32(handle: TensorHandle) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right, total = _float32(a), _float32(b), d.data.astype(np.float32)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[k]
    return TensorHandle(total, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _dot_by_rows(monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


@pytest.fixture(autouse=True)
def _rows_are_not_checked_in_every_load(monkeypatch):
    """Ten passes of each model that is loaded, in the interpreter: test_engine_on_triton.py checks one."""
    honest = loading.check_rows

    def check(model, block_size):
        if model.backend != "triton":
            honest(model, block_size)

    monkeypatch.setattr(loading, "check_rows", check)


class _Patched:
    """In the place of a scope that would be restored behind every launch."""

    def restore(self):
        pass


@pytest.fixture(autouse=True)
def _language_is_patched_once(monkeypatch):
    """And not for every launch, and for every call of a function within it: of small programs that is most of the time.

    What is put into triton.language depends on which of its modules a kernel sees alone. Interpreters older than their
    scopes of patches are left as they are.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    patch, patched, seen = interpreter._patch_lang, {}, {}

    def patch_once(function):
        if function not in seen:
            modules = function.__globals__.values()
            seen[function] = frozenset(value.__name__ for value in modules if value is tl or value is tl.core)
        if seen[function] not in patched:
            patched[seen[function]] = patch(function)
        return _Patched()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    yield
    for scope in reversed(patched.values()):
        scope.restore()


@pytest.fixture(autouse=True)
def _overflow_wraps(monkeypatch):
    """As on a device, and shows in what comes out: to look for it takes longer than the sums and products do."""
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a kernel does not write shows: torch.empty gives NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory):
    """Of one layer each: the interpreter takes seconds for every round."""
    path = tmp_path_factory.mktemp("small")
    for role, seed in (("target", 0), ("draft", 0)):
        model = toys.model(seed, num_hidden_layers=1, vocab_size=64)
        if role == "draft":
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.03 * torch.randn_like(parameter))
        model.save_pretrained(path / role)
    return toys.Pair(str(path / "target"), str(path / "draft"))

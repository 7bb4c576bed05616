"""The xformers backend, with a stand-in for its kernel that follows the mask's documented meaning."""

import sys
import types

import pytest
import torch

from specpaged.modeling.attention import xformers_pass
from specpaged.modeling.attention.torch_pass import TorchPass
from specpaged.modeling.attention.xformers_pass import XformersPass
from specpaged.modeling.numerics import fast_attention_scheme
from specpaged.modeling.ragged_batch import RaggedRow, pack

S, HEADS, KV_HEADS, D = 64, 4, 2, 32


class Mask:
    """What PagedBlockDiagonalCausalWithOffsetPaddedKeysMask is made of."""

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device=None):
        mask = cls()
        mask.q_seqlen, mask.kv_seqlen, mask.block_tables, mask.page_size = q_seqlen, kv_seqlen, block_tables, page_size
        return mask


def attend(query, key, value, attn_bias, scale, op):
    """[1, N, Hkv, G, D], and keys [1, P * S, Hkv, G, D]: the last query of a sequence reads all of its keys."""
    assert op == "split-K"
    assert len(set(attn_bias.q_seqlen)) == 1
    outputs, start = [], 0
    for b, (q_len, length) in enumerate(zip(attn_bias.q_seqlen, attn_bias.kv_seqlen, strict=True)):
        positions = torch.arange(length)
        slots = attn_bias.block_tables[b].long()[positions // attn_bias.page_size] * attn_bias.page_size
        slots += positions % attn_bias.page_size
        q = query[0, start : start + q_len].permute(1, 2, 0, 3)  # [Hkv, G, T, D]
        k, v = (x[0, slots].permute(1, 2, 0, 3) for x in (key, value))
        hidden = positions > (length - q_len + torch.arange(q_len))[:, None]
        scores = (q @ k.transpose(-1, -2) * (scale or D**-0.5)).masked_fill(hidden, float("-inf"))
        outputs.append((scores.softmax(-1) @ v).permute(2, 0, 1, 3))
        start += q_len
    return torch.cat(outputs)[None]


@pytest.fixture
def kernel(monkeypatch):
    fmha = types.SimpleNamespace(
        attn_bias=types.SimpleNamespace(PagedBlockDiagonalCausalWithOffsetPaddedKeysMask=Mask),
        memory_efficient_attention_forward=attend,
        triton_splitk=types.SimpleNamespace(FwOp="split-K"),
    )
    for name, module in (("xformers", types.ModuleType("xformers")), ("xformers.ops", types.ModuleType("ops"))):
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["xformers.ops"].fmha = fmha


@pytest.mark.parametrize(("query_lens", "uniform"), [([1, 1, 1], True), ([6, 6, 6], True), ([2, 5, 1], False)])
@pytest.mark.parametrize("window", [None, 20])
def test_a_pass_is_torchs(kernel, query_lens, uniform, window):
    generator = torch.Generator().manual_seed(0)
    contexts, tables = [70, 0, 130], [[3, 1], [2], [6, 4, 5]]
    rows = [RaggedRow(list(range(q)), c, t, 1) for q, c, t in zip(query_lens, contexts, tables, strict=True)]
    batch = pack(rows, S)
    pools = [torch.randn(7 * S, 2, KV_HEADS, D, generator=generator)] * 2
    pools = [pool.clone() for pool in pools]
    num_rows = batch.num_tokens + 2
    query, key, value = (torch.randn(num_rows, h, D, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    scheme = fast_attention_scheme(torch.float32, torch.device("cpu"), HEADS // KV_HEADS)
    ours, theirs = (
        make(batch, num_rows, [pool], scheme, torch.float32)
        for make, pool in zip((XformersPass, TorchPass), pools, strict=True)
    )
    got, expected = (p.attend(0, query, key, value, 0.2, window) for p in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(*pools)
    assert (ours.gathered_bytes == 0) == (uniform and window is None)


@pytest.mark.parametrize(
    ("installed", "block_pointers", "device", "dtype", "head_dim", "block_size", "numerics", "reason"),
    [
        (False, True, "cuda", torch.float16, 64, 64, "fast", "xformers is not installed"),
        (True, False, "cuda", torch.float16, 64, 64, "fast", "make_block_ptr"),
        (True, True, "cpu", torch.float16, 64, 64, "fast", "device 'cpu' is no CUDA device"),
        (True, True, "cuda", torch.float32, 64, 64, "fast", "torch.float32 is not float16 or bfloat16"),
        (True, True, "cuda", torch.float16, 96, 64, "fast", "head_dim=96"),
        (True, True, "cuda", torch.bfloat16, 64, 16, "fast", "block_size=16 is no multiple of 64"),
        (True, True, "cuda", torch.bfloat16, 128, 128, "exact", "numerics is 'exact'"),
        (True, True, "cuda", torch.bfloat16, 128, 128, "fast", None),
    ],
)
def test_it_says_why_it_cannot_be_used(
    monkeypatch, installed, block_pointers, device, dtype, head_dim, block_size, numerics, reason
):
    monkeypatch.setattr(xformers_pass.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(xformers_pass.tl, "make_block_ptr", block_pointers, raising=False)
    if not block_pointers:
        monkeypatch.delattr(xformers_pass.tl, "make_block_ptr")
    got = xformers_pass.why_not(torch.device(device), dtype, [(HEADS, KV_HEADS, head_dim)], block_size, numerics)
    assert got is None if reason is None else reason in got

"""Which drafts stand, and the token that follows them: greedy and coupled verification on the device.

The argmax of every row of logits is taken in parts of the vocabulary, noise added on the way for rows that sample (see
`gumbel`), and nothing of size V is stored. Then one program per sequence keeps the longest prefix of drafts that the
target samples too, and cuts the sequence's context behind it:

    drafts    5 6 7        -    8 9          S = 4
    sampled   5 6 2 1      4    3 9 0        context before 10, 3, 6; 4, 1, 3 tokens run (the known one, the drafts)
    accepted  2            0    0
    output    5 6 2        4    3
    context   13           4    7            10 + 4 - 1, 3 + 1, 6 + 3 - 2
    blocks    4            1    2            of 4, 1, 3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specpaged_kernels.jit import Variant, kernel
from specpaged_kernels.limits import MAX_ROWS, MAX_VOCAB_SIZE

VOCAB_PART = 8192  # ids that one program looks at
MAX_PARTS = MAX_VOCAB_SIZE // VOCAB_PART
SAMPLED_ROWS = 16  # of one program
LN_2 = tl.constexpr(0.6931471805599453)
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)


@dataclass(frozen=True)
class Accepted:
    """What each of B sequences gains."""

    token_ids: Tensor  # [B, K + 1] int64: the first num_outputs[b] count
    num_outputs: Tensor  # [B] int32: accepted and bonus; the accepted alone where the row behind them is not ok
    num_accepted: Tensor  # [B] int32
    ok: Tensor  # [B] bool; False: NaN or no token allowed in the row behind the accepted ones
    context_lens: Tensor | None = None  # [B] int32, after truncation
    num_blocks: Tensor | None = None  # [B] int32, after truncation


@triton.jit
def _log(x):
    """ln x of normal x > 0, operation by operation as specpaged.sampling.elementwise.log_fp32_: the same bits."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - SQRT_HALF_BITS) >> 23
    x = (bits - (k << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(x - 1.0, x + 1.0)
    z = s * s
    series = (((z * (1 / 9) + 1 / 7) * z + 1 / 5) * z + 1 / 3) * z * s + s
    return series * 2.0 + k.to(tl.float32) * LN_2


@triton.jit
def _mix(x):
    """The 32-bit finaliser lowbias32 on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(token_ids, key_0, key_1, key_2):
    """Gumbel noise of int32 ids under three uint32 keys of a row: the bits of specpaged.sampling.noise.gumbel_noise."""
    bits = _mix(_mix(token_ids.to(tl.uint32) ^ key_0) + key_1) ^ key_2
    w = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31
    w = tl.minimum(w, 1 - 2.0**-24)
    u = 1.0 - w
    return 0.0 - _log(tl.div_rn((u - 1.0) + w, u) - _log(u))


@triton.jit
def _best(values, ids, any_nan, AXIS: tl.constexpr):
    """(largest value, lowest id that has it) along AXIS; NaN for the value where there was one."""
    best = tl.max(values, AXIS, keep_dims=True)
    token_id = tl.min(tl.where(values == best, ids, 2147483647), AXIS)
    return tl.where(tl.max(any_nan, AXIS) != 0, float("nan"), tl.max(values, AXIS)), token_id


@kernel()
def _argmax_kernel(
    logits, noise_keys, part_values, part_ids, vocab_size, stride_logits, num_parts,
    PART: tl.constexpr, BLOCK_V: tl.constexpr, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    best_values = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_ids = tl.full([BLOCK_V], 2147483647, tl.int32)
    any_nan = tl.zeros([BLOCK_V], tl.int32)
    keys = noise_keys + row * 4
    for start in range(part * PART, tl.minimum((part + 1) * PART, vocab_size), BLOCK_V):
        ids = start + tl.arange(0, BLOCK_V)
        pointers = logits + row * stride_logits + ids
        values = tl.load(pointers, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        if HAS_NOISE and tl.load(keys + 3) != 0:
            key_0 = tl.load(keys).to(tl.uint32, bitcast=True)
            key_1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
            key_2 = tl.load(keys + 2).to(tl.uint32, bitcast=True)
            values += gumbel(ids, key_0, key_1, key_2)
        any_nan |= (values != values).to(tl.int32)
        better = values > best_values  # of equals, the earlier: it has the lower id
        best_values = tl.where(better, values, best_values)
        best_ids = tl.where(better, ids, best_ids)
    value, token_id = _best(best_values, best_ids, any_nan, 0)
    tl.store(part_values + row * num_parts + part, value)
    tl.store(part_ids + row * num_parts + part, token_id)


@triton.jit
def _sampled(part_values, part_ids, row, num_parts, mask, BLOCK_P: tl.constexpr):
    """(token id, whether there is one) of rows [R], from their parts of the vocabulary."""
    parts = tl.arange(0, BLOCK_P)
    pointers = row.to(tl.int64)[:, None] * num_parts + parts[None, :]
    mask = mask[:, None] & (parts < num_parts)[None, :]
    values = tl.load(part_values + pointers, mask=mask, other=float("-inf"))
    ids = tl.load(part_ids + pointers, mask=mask, other=2147483647)
    any_nan = (values != values).to(tl.int32)
    value, token_id = _best(tl.where(any_nan != 0, float("-inf"), values), ids, any_nan, 1)
    return token_id, value > float("-inf")  # not for NaN either


@kernel()
def _sample_kernel(
    part_values, part_ids, token_ids, ok, num_rows, num_parts, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token_id, row_ok = _sampled(part_values, part_ids, row, num_parts, row < num_rows, BLOCK_P)
    # Whoever goes on with it all the same must find it in the vocabulary.
    tl.store(token_ids + row, tl.where(row_ok, token_id, 0).to(tl.int64), mask=row < num_rows)
    tl.store(ok + row, row_ok, mask=row < num_rows)


@kernel()
def _accept_kernel(
    part_values, part_ids, drafts, cu_rows, query_lens, context_lens, page_table,
    token_ids, num_outputs, num_accepted, ok, new_context_lens, num_blocks,
    num_parts, block_size, stride_drafts, stride_table, stride_tokens,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, TRUNCATES: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    first_row = tl.load(cu_rows + seq)
    k = tl.load(cu_rows + seq + 1) - first_row - 1
    j = tl.arange(0, BLOCK_K)
    token_id, row_ok = _sampled(part_values, part_ids, first_row + j, num_parts, j <= k, BLOCK_P)
    draft = tl.load(drafts + seq * stride_drafts + j, mask=j < k, other=0).to(tl.int32)
    stands = (j < k) & row_ok & (token_id == draft)
    accepted = tl.min(tl.where(stands, BLOCK_K, j))
    last_ok = tl.sum(tl.where(j == accepted, row_ok.to(tl.int32), 0))
    outputs = accepted + last_ok
    tl.store(token_ids + seq * stride_tokens + j, token_id.to(tl.int64), mask=j < outputs)
    tl.store(num_outputs + seq, outputs)
    tl.store(num_accepted + seq, accepted)
    tl.store(ok + seq, last_ok != 0)
    if TRUNCATES:
        written = tl.load(context_lens + seq) + tl.load(query_lens + seq)
        context_len = written - (k - accepted)
        tl.store(new_context_lens + seq, context_len)
        kept = tl.cdiv(context_len, block_size)
        tl.store(num_blocks + seq, kept)
        # Behind the cut the table shows the null block. At most K + 1 tokens' blocks are dropped.
        pointers = page_table + seq.to(tl.int64) * stride_table + kept + j
        tl.store(pointers, 0, mask=kept + j < tl.cdiv(written, block_size))


def _argmax_constants(has_noise: bool) -> dict[str, Any]:
    return {
        "PART": VOCAB_PART,
        "BLOCK_V": 1024,
        "HAS_NOISE": has_noise,
        "num_warps": 8,
        "enable_fp_fusion": False,
    }


def _sample_constants() -> dict[str, Any]:
    return {"BLOCK_R": SAMPLED_ROWS, "BLOCK_P": MAX_PARTS, "num_warps": 1}


def _accept_constants(truncates: bool) -> dict[str, Any]:
    return {"BLOCK_K": MAX_ROWS, "BLOCK_P": MAX_PARTS, "TRUNCATES": truncates, "num_warps": 4}


def variants() -> Iterator[Variant]:
    """All that `sample` and `accept` launch."""
    parts = {"part_values": "*fp32", "part_ids": "*i32"}
    for has_noise in (False, True):
        types = parts | {"logits": "*fp32", "noise_keys": "*i32"}
        yield Variant(_argmax_kernel, types, _argmax_constants(has_noise))
    yield Variant(_sample_kernel, parts | {"token_ids": "*i64", "ok": "*i1"}, _sample_constants())
    counts = ("cu_rows", "query_lens", "context_lens", "page_table", "num_outputs", "num_accepted", "new_context_lens",
              "num_blocks")  # fmt: skip
    types = parts | {name: "*i32" for name in counts} | {"drafts": "*i64", "token_ids": "*i64", "ok": "*i1"}
    for truncates in (False, True):
        yield Variant(_accept_kernel, types, _accept_constants(truncates))


def _best_of_parts(logits: Tensor, noise_keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """[M, parts] float32 and int32: the largest of each part of the vocabulary, noise added, and its lowest id."""
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, VOCAB_PART)
    values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    has_noise = noise_keys is not None
    _argmax_kernel[(num_rows, num_parts)](
        logits, noise_keys if has_noise else ids, values, ids, vocab_size, logits.stride(0), num_parts,
        **_argmax_constants(has_noise),
    )  # fmt: skip
    return values, ids


def sample(
    logits: Tensor,  # [M, V] float32, processed
    noise_keys: Tensor | None = None,  # [M, 4] int32: three keys of the row's noise, and whether it has any
) -> tuple[Tensor, Tensor]:  # [M] int64, [M] bool
    """The argmax of each row, noise added, ties to the lowest id; and whether there is one: neither NaN nor -inf.

    The id of a row that has none is 0.
    """
    num_rows = logits.shape[0]
    values, ids = _best_of_parts(logits, noise_keys)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    ok = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _sample_kernel[(triton.cdiv(num_rows, SAMPLED_ROWS),)](
        values, ids, token_ids, ok, num_rows, values.shape[1], **_sample_constants()
    )  # fmt: skip
    return token_ids, ok


def sample_ref(logits: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`noise` [M, V] float32: the noise itself; zeros where a row has none."""
    values, token_ids = (logits if noise is None else logits + noise).max(dim=-1)
    return token_ids, values > float("-inf")


@dataclass(frozen=True)
class Written:
    """What a pass wrote for each of B sequences, to be cut behind the drafts that stand."""

    query_lens: Tensor  # [B] int32: tokens that the pass ran
    context_lens: Tensor  # [B] int32, before the pass
    page_table: Tensor  # [B, max_blocks] int32; entries behind the cut become the null block, in place
    block_size: int


def accept(
    logits: Tensor,  # [M, V] float32, processed
    drafts: Tensor,  # [B, K] int64; sequence b's first cu_rows[b + 1] - cu_rows[b] - 1 count
    cu_rows: Tensor,  # [B + 1] int32: sequence b verifies rows cu_rows[b] .. cu_rows[b + 1] - 1, at least one
    noise_keys: Tensor | None = None,  # [M, 4] int32: three keys of the row's noise, and whether it has any
    written: Written | None = None,  # None: the caller truncates
) -> Accepted:
    """What `accept_ref` says; nothing waits for the device."""
    num_seqs, max_drafts = drafts.shape
    if max_drafts >= MAX_ROWS:
        raise ValueError(f"drafts has room for {max_drafts}; allowed: {MAX_ROWS - 1}")
    values, ids = _best_of_parts(logits, noise_keys)
    result = _empty(num_seqs, max_drafts, logits.device, written is not None)
    unread = result.num_outputs
    lengths = (unread,) * 3 if written is None else (written.query_lens, written.context_lens, written.page_table)
    new_lengths = (unread,) * 2 if written is None else (result.context_lens, result.num_blocks)
    _accept_kernel[(num_seqs,)](
        values, ids, drafts, cu_rows, *lengths,
        result.token_ids, result.num_outputs, result.num_accepted, result.ok, *new_lengths,
        values.shape[1], 1 if written is None else written.block_size,
        drafts.stride(0), 0 if written is None else written.page_table.stride(0), result.token_ids.stride(0),
        **_accept_constants(written is not None),
    )  # fmt: skip
    return result


def _empty(num_seqs: int, max_drafts: int, device: torch.device, truncates: bool) -> Accepted:
    counts = torch.empty(4 if truncates else 2, num_seqs, dtype=torch.int32, device=device)
    return Accepted(
        torch.zeros(num_seqs, max_drafts + 1, dtype=torch.int64, device=device),
        counts[0],
        counts[1],
        torch.empty(num_seqs, dtype=torch.bool, device=device),
        *counts[2:],
    )


def accept_ref(
    logits: Tensor,
    drafts: Tensor,
    cu_rows: Tensor,
    noise: Tensor | None = None,  # [M, V] float32: the noise itself; zeros where a row has none
    written: Written | None = None,
) -> Accepted:
    """A draft stands iff it is the argmax of its row, ties to the lowest id, and all before it stand."""
    result = _empty(*drafts.shape, logits.device, written is not None)
    token_ids, ok = sample_ref(logits, noise)
    bounds = cu_rows.tolist()
    for b in range(len(drafts)):
        rows = range(bounds[b], bounds[b + 1])
        k, accepted = len(rows) - 1, 0
        while accepted < k and ok[rows[accepted]] and token_ids[rows[accepted]] == drafts[b, accepted]:
            accepted += 1
        last_ok = bool(ok[rows[accepted]])
        num_outputs = accepted + last_ok
        result.token_ids[b, :num_outputs] = token_ids[rows[0] : rows[0] + num_outputs]
        result.num_outputs[b], result.num_accepted[b], result.ok[b] = num_outputs, accepted, last_ok
        if written is not None:
            length = int(written.context_lens[b] + written.query_lens[b])
            context_len = length - (k - accepted)
            num_blocks = -(-context_len // written.block_size)
            result.context_lens[b], result.num_blocks[b] = context_len, num_blocks
            written.page_table[b, num_blocks : -(-length // written.block_size)] = 0
    return result

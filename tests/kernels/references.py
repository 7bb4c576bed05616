"""The kernels' references in their place: an engine "on Triton" that takes milliseconds where the interpreter takes
seconds. Each kernel is held against its reference elsewhere; here is what is built of them."""

from __future__ import annotations

import torch
from torch import Tensor

from specpaged.modeling import device_round
from specpaged.modeling.attention import triton_pass
from specpaged.sampling import device as device_sampling
from specpaged.sampling import noise
from specpaged.verification import device as device_verification
from specpaged_kernels import decoding_round, linear, lm_head, res_attention, rms_norm
from specpaged_kernels.accept import accept_ref, sample_ref
from specpaged_kernels.pack import pack_ref
from specpaged_kernels.paged_attention import paged_attention_ref
from specpaged_kernels.select_drafts import select_drafts_ref
from specpaged_kernels.store_kv import store_kv_ref


def noise_of(keys: Tensor | None, vocab_size: int) -> Tensor | None:
    """[M, V] float32: what the kernel adds to rows with these keys [M, 4]."""
    if keys is None:
        return None
    k0, k1, k2, draws = keys.T.unsqueeze(-1)
    bits = noise._lowbias32_(torch.arange(vocab_size, dtype=torch.int32) ^ k0)
    bits = noise._lowbias32_(bits.add_(k1)).bitwise_xor_(k2).bitwise_and_(2**31 - 1)
    return torch.where(draws != 0, noise._gumbel(bits), 0.0)


def sample(logits, noise_keys=None):
    token_ids, ok = sample_ref(logits, noise_of(noise_keys, logits.shape[1]))
    return torch.where(ok, token_ids, 0), ok


def accept(logits, drafts, cu_rows, noise_keys=None, written=None):
    return accept_ref(logits, drafts, cu_rows, noise_of(noise_keys, logits.shape[1]), written)


def noise_keys(rows, seeds, draws, num_prompt_tokens, cu_logits, num_rows, step):
    keys = torch.zeros(num_rows, 4, dtype=torch.int32)
    for b, (low, high) in enumerate(seeds.tolist()):
        seed = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
        first = int(rows.num_tokens[b] - num_prompt_tokens[b]) + step
        for row in range(int(cu_logits[b]), int(cu_logits[b + 1])):
            keys[row] = noise.noise_keys([seed], [first + row - int(cu_logits[b])], "cpu")[0]
            keys[row, 3] = draws[b]
    return keys


def pack(*arguments):
    """Where the kernel loses what has no room, the round fails."""
    packed = pack_ref(*arguments)
    ends = packed.cu_query_lens[-1], packed.cu_logits[-1], packed.work_list.cu_items[-1]
    for what, end, room in zip(("rows", "logits", "items"), ends, arguments[6:9], strict=True):
        if end > room:
            raise AssertionError(f"a pass of {int(end)} {what} has room for {room}")
    return packed


def put_row_wise_ones_in_place(monkeypatch) -> None:
    """Those of products and norms, in models that are loaded from now on: attention stays the kernel."""
    for module, name, function in (
        (linear, "linear", lambda x, weight, bias=None, tiles=None: linear.linear_ref(x, weight, bias)),
        (lm_head, "lm_head", lambda x, weight, bias=None, tiles=None: lm_head.lm_head_ref(x, weight, bias)),
        (rms_norm, "rms_norm", rms_norm.rms_norm_ref),
        (res_attention, "res_attention", res_attention.res_attention_ref),
    ):
        monkeypatch.setattr(module, name, function)


def put_in_place(monkeypatch) -> None:
    """From now on, and in models that are loaded from now on."""
    put_row_wise_ones_in_place(monkeypatch)

    def paged_attention(query, pool, table, bounds, context_lens, block_size, work_list, *options, **named):
        return paged_attention_ref(query, pool, table, bounds, context_lens, block_size, *options, **named)

    for module, name, function in (
        (triton_pass, "paged_attention", paged_attention),
        (triton_pass, "store_kv", store_kv_ref),
        (device_sampling, "sample", sample),
        (device_verification, "accept", accept),
        (device_round, "sample", sample),
        (device_round, "noise_keys", noise_keys),
        (device_round, "pack", pack),
        (device_round, "plan_round", decoding_round.plan_round_ref),
        (device_round, "store_drafts", decoding_round.store_drafts_ref),
        (device_round, "select_drafts", select_drafts_ref),
        (device_round, "settle_round", decoding_round.settle_round_ref),
    ):
        monkeypatch.setattr(module, name, function)

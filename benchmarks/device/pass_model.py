"""What the kernels of a pass read, multiply and cost to launch, added up: a model of a device, never a measurement.

    seconds of a kernel = launches x launch seconds + max(bytes / bandwidth, flops / speed)

The kernels are those of the flat decoder, one after the other; nothing overlaps, nothing stays in a cache from one
kernel to the next, and a kernel reaches the stated bandwidth and speed whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from specpaged.modeling.flat.config import ROPE, FlatConfig, LayerConfig
from specpaged_kernels.linear import MAX_SPLIT_ROWS, choose_tiles
from specpaged_kernels.paged_attention import choose_tiles as choose_attention_tiles


@dataclass(frozen=True)
class Machine:
    """What is stated of a machine: inputs of the model, not results."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float
    memory_bytes: float = float("inf")

    def shared_by(self, count: int) -> Machine:
        """As many of them, each with a share of every matrix: what they say to each other costs nothing here."""
        return replace(
            self,
            name=f"{count} x {self.name}" if count > 1 else self.name,
            bytes_per_second=count * self.bytes_per_second,
            flops_per_second=count * self.flops_per_second,
            memory_bytes=count * self.memory_bytes,
        )


# Peaks of the vendor's data sheets: HBM, and dense bfloat16; and a guess of what a kernel of a CUDA graph costs beside.
GPUS = {
    "A100-80GB": Machine("A100-80GB", 2.039e12, 312e12, 1.5e-6, 80e9),
    "H100-SXM": Machine("H100-SXM", 3.35e12, 989e12, 1.5e-6, 80e9),
    "H200": Machine("H200", 4.8e12, 989e12, 1.5e-6, 141e9),
}


@dataclass(frozen=True)
class Kernel:
    """One operation of a pass."""

    name: str
    num_bytes: float
    flops: float = 0.0
    launches: int = 1
    count: int = 1  # times in a pass

    def seconds(self, machine: Machine) -> float:
        """All of its times together."""
        roof = max(self.num_bytes / machine.bytes_per_second, self.flops / machine.flops_per_second)
        return self.count * (self.launches * machine.launch_seconds + roof)


@dataclass(frozen=True)
class Sizes:
    """Bytes of an element, and what depends on the kernels."""

    weight: float = 2
    kv: float = 2
    row: float = 2  # of hidden states and what is between them
    splits: bool = True  # whether programs share a matrix, or a sequence's KV, as those of Triton's kernels do


def flat_shape(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab_size: int,
    head_dim: int = 128, qk_norm: bool = False, tied: bool = False,
) -> FlatConfig:  # fmt: skip
    """A Llama or Qwen3 of these sizes."""
    return FlatConfig(
        architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
        layers=(LayerConfig(None, ROPE),) * layers,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        tied=tied,
        qk_norm=qk_norm,
    )


# From the models' published config.json files.
MODELS = {
    "Qwen3-0.6B": flat_shape(1024, 3072, 28, 16, 8, 151936, qk_norm=True, tied=True),
    "Qwen3-8B": flat_shape(4096, 12288, 36, 32, 8, 151936, qk_norm=True),
    "Llama-68M": flat_shape(768, 3072, 2, 12, 12, 32000, head_dim=64),
    "Llama-2-7B": flat_shape(4096, 11008, 32, 32, 32, 32000),
    "Llama-3.1-8B": flat_shape(4096, 14336, 32, 32, 8, 128256),
    "Llama-3.1-70B": flat_shape(8192, 28672, 80, 64, 8, 128256),
}
PAIRS = (("Qwen3-8B", "Qwen3-0.6B"), ("Llama-2-7B", "Llama-68M"), ("Llama-3.1-70B", "Llama-3.1-8B"))


def kernels_of(
    config: FlatConfig, num_seqs: int, query_len: int, context_len: int, sizes: Sizes = Sizes()
) -> Iterator[Kernel]:
    """The kernels of a pass of num_seqs sequences, each with query_len tokens behind context_len, all of which want
    their most likely next token."""
    rows, hidden, inner = num_seqs * query_len, config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_layers = len(config.layers)

    def linear(name: str, outputs: int, inputs: int, count: int = num_layers) -> Kernel:
        num_bytes = outputs * inputs * sizes.weight + rows * (outputs + inputs) * sizes.row
        num_splits = -(-inputs // choose_tiles(rows, outputs, inputs, torch.bfloat16).split_len)
        launches = 1
        if sizes.splits and num_splits > 1 and rows <= MAX_SPLIT_ROWS and name != "output":
            launches, num_bytes = 2, num_bytes + 8 * num_splits * rows * outputs  # sums in float32, written and read
        return Kernel(name, num_bytes, 2.0 * rows * outputs * inputs, launches, count)

    def rowwise(name: str, elements: int, count: int = num_layers, launches: int = 1) -> Kernel:
        return Kernel(name, rows * elements * sizes.row, launches=launches, count=count)

    yield rowwise("embedding", 2 * hidden, count=1)
    yield rowwise("rotations", 4 * config.head_dim, count=1, launches=2)
    yield rowwise("norm", 4 * hidden, count=2 * num_layers + 1)  # the residual and what is added, read and written
    yield linear("qkv", q_size + 2 * kv_size, hidden)
    rotated = q_size + kv_size
    yield rowwise("rotate", 9 * rotated, launches=9)
    if config.qk_norm:
        yield rowwise("head norm", 8 * rotated, launches=4)
    yield rowwise("store KV", 4 * kv_size)
    yield _attention(config, num_seqs, query_len, context_len, sizes)
    yield linear("o", hidden, q_size)
    yield linear("gate, up", 2 * inner, hidden)
    yield rowwise("gate", 5 * inner, launches=2)
    yield linear("down", hidden, inner)
    yield linear("output", config.vocab_size, hidden, count=1)


def _attention(config: FlatConfig, num_seqs: int, query_len: int, context_len: int, sizes: Sizes) -> Kernel:
    """Both of its kernels. A program reads a split's KV for a few query tokens: more of them read it anew."""
    group = config.num_heads // config.num_kv_heads
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * sizes.kv
    length, num_blocks, partial = context_len + query_len, 1, 0.0
    if sizes.splits:
        tiles = choose_attention_tiles(config.head_dim, group, torch.bfloat16)
        num_blocks = -(-query_len // tiles.tokens(group))
        num_splits = -(-length // tiles.split_len)
        if num_splits > 1:  # rows in float32, written and read once
            partial = 8.0 * num_seqs * query_len * config.num_heads * num_splits * config.head_dim
    read = num_seqs * num_blocks * length * kv_bytes
    rows = 2 * num_seqs * query_len * config.num_heads * config.head_dim * sizes.row
    pairs = num_seqs * query_len * (context_len + (query_len + 1) / 2)
    flops = 4.0 * config.num_heads * config.head_dim * pairs
    return Kernel("attention", read + partial + rows, flops, launches=2, count=len(config.layers))


def pass_seconds(
    config: FlatConfig, machine: Machine, num_seqs: int, query_len: int, context_len: int, sizes: Sizes = Sizes()
) -> float:
    """A pass, by the model."""
    return sum(kernel.seconds(machine) for kernel in kernels_of(config, num_seqs, query_len, context_len, sizes))


ROUND_LAUNCHES = 3  # plan, noise keys, settle
DRAFT_LAUNCHES = 3  # pack, the argmax's merge, store drafts


def round_seconds(
    target: FlatConfig, draft: FlatConfig, machine: Machine, num_seqs: int, k: int, context_len: int
) -> float:
    """A round of k drafts, or of plain decoding where k is 0: the draft's k passes, and the target's."""
    launches = ROUND_LAUNCHES + (k + 1) * DRAFT_LAUNCHES
    drafting = k * pass_seconds(draft, machine, num_seqs, 1, context_len)
    return launches * machine.launch_seconds + drafting + pass_seconds(target, machine, num_seqs, k + 1, context_len)


def tokens_per_round(k: int, acceptance: float) -> float:
    """Expected tokens of a sequence where each draft stands with this chance, if those before it do (Leviathan et al.,
    arXiv 2211.17192, equation 1)."""
    return sum(acceptance**i for i in range(k + 1))


def break_even(seconds: float, plain_seconds: float, k: int) -> float | None:
    """The acceptance from which on a round of k drafts pays; None: not even where all of them stand."""
    wanted = seconds / plain_seconds
    if wanted > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(k, middle) < wanted else (low, middle)
    return high


def held_bytes(config: FlatConfig, num_seqs: int, num_tokens: int, sizes: Sizes = Sizes()) -> float:
    """Weights and KV of so many sequences of so many tokens."""
    weights = sum(
        kernel.count * kernel.flops / 2 for kernel in kernels_of(config, 1, 1, 0) if kernel.name != "attention"
    )
    if not config.tied:
        weights += config.vocab_size * config.hidden_size
    kv = 2 * len(config.layers) * config.num_kv_heads * config.head_dim * num_seqs * num_tokens
    return weights * sizes.weight + kv * sizes.kv

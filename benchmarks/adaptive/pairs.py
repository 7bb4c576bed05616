"""Pairs of every kind: a draft of little and of much of the target's cost, drafts that stand often and seldom."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer import BadParameter

from benchmarks.contenders import sample_prompts
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpaged.testing import SyntheticPair, synthetic_pair

VOCAB_SIZE = 1024
PROMPT_LEN = 48
ACCEPTANCES = (0.3, 0.6, 0.9)


@dataclass(frozen=True)
class Pair:
    """A target, who drafts for it, and what it is asked."""

    name: str
    target: str
    speculative: dict[str, Any]
    prompts: Sequence[Sequence[int]] = field(repr=False)
    output_len: int = 64
    prompts_per_seq: int = 2  # in a round: places that become free are taken


def _shape(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Of Qwen3's family, with a small vocabulary."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }


TARGET = _shape(384, 6, 6)  # 11 M parameters beside the embedding
# By the share of the target's parameters, which is about that of its cost.
DRAFTS = {0.05: _shape(128, 2, 2), 0.15: _shape(192, 3, 3), 0.4: _shape(256, 5, 4)}


def synthetic_names() -> list[str]:
    """Of every draft's cost and acceptance."""
    return [f"draft {cost}, {acceptance}" for cost in DRAFTS for acceptance in ACCEPTANCES]


NAMES = ["embedded", *synthetic_names(), "ngram, repetitive", "ngram, plain"]
# Without a model: "twice", each prompt comes a second time, whose output is that of the first. Suffix decoding knows
# the outputs of all rounds before, too: there, prompts come again in any case.
NAMES += ["ngram, twice", "suffix, repetitive", "suffix, twice"]
# Code, and the beginning of the same code with one token edited: only what the prompt holds tells how it goes on.
NAMES += ["ngram, edited", "suffix, edited"]
# Of every second request the drafts stand with 0.9, of the others with 0.2; or of each in turn.
NAMES += [f"{kind}, draft {cost}" for kind in ("mixed", "turning") for cost in DRAFTS]
TURNS_AFTER = 64  # tokens
KINDS = 0.9, 0.2  # how often drafts stand, of the vocabulary's first and second half


def named(parts: str) -> list[str]:
    """The names that hold one of these parts, which ";" separates. BadParameter: a part is in none of them."""
    for part in parts.split(";"):
        if not any(part in name for name in NAMES):
            raise BadParameter(f"{part!r} is in no name of a pair; there are {'; '.join(NAMES)}")
    return [name for name in NAMES if any(part in name for part in parts.split(";"))]


def make_pair(name: str, directory: Path, num_prompts: int) -> Pair:
    """The pair of this name, written into `directory` if it is a synthetic one."""
    method, _, text = name.partition(", ")
    if method in ("ngram", "suffix"):
        own_text = {"suffix_decoding_max_cached_requests": 0} if name == "suffix, edited" else {}
        return Pair(name, EMBEDDED_TARGET, {"method": method} | own_text, _texts(text, num_prompts))
    if name == "embedded":
        return Pair(name, EMBEDDED_TARGET, {"model": EMBEDDED_DRAFT}, sample_prompts(num_prompts))
    kind, _, rest = name.rpartition("draft ")
    cost, _, acceptance = rest.partition(", ")
    directory = directory / name.replace(" ", "-")
    turns_after = TURNS_AFTER if kind.startswith("turning") else None
    made = _synthetic(float(cost), directory, KINDS if kind else float(acceptance), turns_after)
    prompts = _random_prompts(num_prompts, halves=bool(kind))
    # Where requests differ, those whose drafts stand end long before the others.
    many = {"output_len": 2 * TURNS_AFTER, "prompts_per_seq": 4} if kind else {}
    return Pair(name, made.target, {"model": made.draft}, prompts, **many)


def make_turning(cost: float, directory: Path, turns_after: int, output_len: int, num_prompts: int) -> Pair:
    """A pair of such a draft's cost, each output of which turns from drafts that stand with 0.9 to 0.2, and back.

    BadParameter: there is no such draft.
    """
    if cost not in DRAFTS:
        raise BadParameter(f"draft {cost}: {', '.join(map(str, DRAFTS))} are allowed")
    made = _synthetic(cost, directory, KINDS, turns_after)
    prompts = _random_prompts(num_prompts, halves=True)
    return Pair(f"turning, draft {cost}", made.target, {"model": made.draft}, prompts, output_len)


def _synthetic(
    cost: float, directory: Path, acceptance: float | tuple[float, ...], turns_after: int | None = None
) -> SyntheticPair:
    draft = DRAFTS[cost]
    return synthetic_pair(
        TARGET, draft, directory=directory, acceptance=acceptance, turns_after=turns_after, dtype="float32"
    )


def _random_prompts(count: int, halves: bool) -> list[list[int]]:
    """Of random tokens; with `halves`, the last one of every second prompt is of the vocabulary's second half."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)] for _ in range(count)]
    for i, prompt in enumerate(prompts if halves else ()):
        prompt[-1] = rng.randrange(VOCAB_SIZE // 2) + i % 2 * (VOCAB_SIZE // 2)
    return prompts


def _texts(kind: str, count: int) -> list[list[int]]:
    """Sample prompts; repetitive ones hold a line of text over and over, which the target goes on with."""
    prompts = sample_prompts(count)
    if kind == "repetitive":
        return [(prompt[:16] * 6)[:96] for prompt in prompts]
    if kind == "edited":
        return [_edited(prompt[:40], prompts[i - 1][0]) for i, prompt in enumerate(prompts)]
    return [prompt for prompt in prompts for _ in range(2)][:count] if kind == "twice" else prompts


def _edited(code: Sequence[int], token_id: int) -> list[int]:
    """The code, and the first half of it once more with this token in the place of its fourth."""
    return [*code, *code[:3], token_id, *code[4 : len(code) // 2]]

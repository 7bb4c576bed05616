"""Which heads over which targets: every setting of a checkpoint, in both spellings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
TARGET = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.2, "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
FAMILIES = ("llama", "qwen3")
FAVOURED = (5, 17, 130, 301)  # that targets and heads like best, in some variants: some drafts are accepted by chance
SPELLINGS = ("authors", "speculators")
ALL_NORMS = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}
SMALLER = {"draft_vocab_size": 200}
# name -> what write_eagle3 is told in either spelling
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": SMALLER,
    "norm_before_residual": SMALLER | {"norm_before_residual": True},
    "no norm_before_residual": SMALLER | {"norm_before_residual": False},
    "norm_before_fc": SMALLER | {"norm_before_fc": True},
    "fc_norm": SMALLER | {"fc_norm": True},
    "norm_output": SMALLER | {"norm_output": True},
    "all norms": SMALLER | ALL_NORMS,
    "the target's vocabulary": {},
    "the target's embedding": SMALLER | {"own_embedding": False},
    "taps at 0, 3, 6": SMALLER | {"aux_layers": (0, 3, 6)},
    "taps named 5, 2, 4": SMALLER | {"aux_layers": (5, 2, 4)},
    "another rope_theta": SMALLER | {"rope_theta": 500.0},
    "another width": SMALLER | {"hidden_size": 96},
    "accepted at times": SMALLER | {"favoured_token_ids": FAVOURED},
    "eagle_config": SMALLER | {"norm_before_fc": True, "aux_layers": (1, 2, 5), "in_eagle_config": True},
}


def chosen(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Variant, spelling and target: each variant in both spellings, over one target or the other; a few over both."""
    for i, name in enumerate(VARIANTS):
        if names and name not in names:
            continue
        spellings = SPELLINGS if not VARIANTS[name].get("in_eagle_config") else SPELLINGS[:1]
        on_both = name in ("defaults", "all norms", "accepted at times")
        for j, spelling in enumerate(spellings):
            for family in FAMILIES if on_both else (FAMILIES[(i + j) % 2],):
                yield name, spelling, family


def write_target(path: Path, family: str, favoured: Sequence[int]) -> None:
    """A toy of random weights; rows of its output layer but those of `favoured` are small, if there are any."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TARGET))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
        if favoured:
            others = [i for i in range(VOCAB_SIZE) if i not in favoured]
            model.lm_head.weight[others] *= 0.15
    model.save_pretrained(path)

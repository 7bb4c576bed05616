"""The shape of a draft: the family of the embedded one, at a width and a number of layers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import Qwen3Config

HEAD_DIM = 32


@dataclass(frozen=True, order=True)
class DraftShape:
    """A Qwen3 whose query heads make twice its width and whose MLP is four times as wide, as the embedded draft's."""

    hidden_size: int
    num_layers: int = 1

    @classmethod
    def parse(cls, text: str) -> DraftShape:
        """The shape that 'WIDTH' or 'WIDTHxLAYERS' names. ValueError for any other text."""
        width, _, layers = text.strip().partition("x")
        layers = layers if "x" in text else "1"
        if not (width.isdecimal() and layers.isdecimal() and int(layers) > 0 and int(width) > 0):
            raise ValueError(f"--sizes: {text!r} is no size; allowed: WIDTH or WIDTHxLAYERS, as in 128 or 128x2")
        if int(width) % HEAD_DIM:
            raise ValueError(f"--sizes: {text!r} has width {width}; allowed: multiples of {HEAD_DIM}")
        return cls(int(width), int(layers))

    @property
    def name(self) -> str:
        """What `parse` reads."""
        return str(self.hidden_size) if self.num_layers == 1 else f"{self.hidden_size}x{self.num_layers}"

    def config(self, target: Any) -> Qwen3Config:
        """Of a draft for a target of this transformers configuration: its vocabulary, positions and end of text."""
        from transformers import Qwen3Config

        rope = getattr(target, "rope_parameters", None) or {}
        theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else 10000.0
        kv_heads = self.hidden_size // HEAD_DIM
        return Qwen3Config(
            vocab_size=target.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=4 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=2 * kv_heads,
            num_key_value_heads=kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=target.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=target.eos_token_id,
            pad_token_id=target.pad_token_id,
            attn_implementation="sdpa",
        )


def parse_shapes(text: str) -> list[DraftShape]:
    """Shapes with commas between them, each once, in the order given. ValueError."""
    return list(dict.fromkeys(DraftShape.parse(part) for part in text.split(",")))

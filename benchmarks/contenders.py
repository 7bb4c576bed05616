"""Who runs, and on what: the embedded pair, its sample prompts, greedy, outputs of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.ours import Ours, Run
from benchmarks.peers import Generate, GenerateBatch, missing_for_generate_batch
from specpaged.config import EMBEDDED_TARGET
from specpaged.modeling.loading import load_tokenizer
from specpaged.prompts import evenly_spread, load_prompts

OUTPUT_LEN = 128
NUM_DRAFTS = 5

PLAIN_EXACT, PLAIN_FAST = "plain exact", "plain fast"
SPECULATIVE_EXACT = "speculative exact"
PLAIN = (PLAIN_EXACT, PLAIN_FAST)


class Contender(Protocol):
    name: str

    def prepare(self, batch_size: int) -> None:
        """Get ready for this B; not timed."""

    def run(self, prompts: Sequence[Sequence[int]], batch_size: int) -> Run:
        """Decode all prompts, at most B at a time, OUTPUT_LEN tokens each."""


class Field:
    """All contenders, each loaded once, when it is first needed."""

    def __init__(self) -> None:
        self._loaded: dict[str, Contender] = {}
        self._makers = {
            PLAIN_EXACT: lambda name: Ours(name, "exact", OUTPUT_LEN, num_speculative_tokens=0),
            PLAIN_FAST: lambda name: Ours(name, "fast", OUTPUT_LEN, num_speculative_tokens=0),
            SPECULATIVE_EXACT: lambda name: Ours(name, "exact", OUTPUT_LEN),  # K is the default for each B
            "speculative fast": lambda name: Ours(name, "fast", OUTPUT_LEN),
            "speculative exact, K = 5": lambda name: Ours(name, "exact", OUTPUT_LEN, num_speculative_tokens=NUM_DRAFTS),
            "transformers generate": lambda name: Generate(name, OUTPUT_LEN),
            "transformers assisted": lambda name: Generate(name, OUTPUT_LEN, assistant={}),
            "transformers assisted, K = 5": lambda name: Generate(
                name,
                OUTPUT_LEN,
                assistant={
                    "num_assistant_tokens": NUM_DRAFTS,
                    "num_assistant_tokens_schedule": "constant",
                    "assistant_confidence_threshold": 0.0,
                },
            ),
            "transformers generate_batch": lambda name: GenerateBatch(name, OUTPUT_LEN),
        }

    def at(self, batch_size: int) -> list[Contender]:
        """Those that run at this B."""
        left_out = set()
        if batch_size > 1:
            left_out |= {name for name in self._makers if "assisted" in name}
        if missing_for_generate_batch():
            left_out.add("transformers generate_batch")
        return [self._get(name) for name in self._makers if name not in left_out]

    def _get(self, name: str) -> Contender:
        if name not in self._loaded:
            self._loaded[name] = self._makers[name](name)
        return self._loaded[name]


def sample_prompts(count: int) -> list[list[int]]:
    """Token ids of `count` of the embedded prompts, evenly spread; of more than there are, from the first on again."""
    tokenizer = load_tokenizer(EMBEDDED_TARGET, False)
    prompts = [tokenizer.encode(record.text) for record in evenly_spread(load_prompts(None), count)]
    return [prompts[i % len(prompts)] for i in range(count)]

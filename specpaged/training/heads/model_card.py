"""The README.md of trained heads: what they are, how good, how they were made, how they serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specpaged.config import EMBEDDED_TARGET

PAPERS = {
    "eagle3": ("EAGLE-3", "2503.01840", "test-time training of 7 steps, soft cross-entropy with weights 0.8^j"),
    "clover": ("Clover-2", "2408.00264", "sum over heads of 0.7^i (10 SmoothL1 + soft cross-entropy)"),
}


def serving_line(method: str, folder: str) -> str:
    """The argument that serves these heads, beside their target."""
    return f'speculative_config={{"method": "{method}", "model": "{folder}"}}'


def model_card(figures: Mapping[str, Any], has_picture: bool) -> str:
    """The card, of what final.json holds."""
    name, paper, losses = PAPERS[figures["method"]]
    heads, early = figures["heads"], figures["early"]
    positions = range(1, 1 + len(heads["by_position"]))
    rows = [("", *positions, "mean acceptance length"), ("---", *("---" for _ in positions), "---")]
    for where, of_it in (("", figures), (f", first {early['tokens']} tokens", early)):
        for label, key in (("these heads", "heads"), ("prompt lookup", "prompt_lookup")):
            shares = (f"{share:.3f}" for share in of_it[key]["by_position"])
            rows.append((label + where, *shares, f"{of_it[key]['mean_acceptance_length']:.2f}"))
    table = _markdown(rows)
    is_embedded = figures["target"] == EMBEDDED_TARGET
    target = "the embedded target of specpaged" if is_embedded else f"`{figures['target']}`"
    base_model = "" if is_embedded else f"base_model: {figures['target']}\n"
    arguments = "" if is_embedded else f'"{figures["target"]}", '
    picture = "\n![loss and acceptance](curve.png)\n" if has_picture else ""
    header, *of_sizes = speed_rows(figures["speed"])
    speed = _markdown([header, tuple("---" for _ in header), *of_sizes])
    return f"""---
{base_model}tags: [speculative-decoding, {figures["method"]}]
---
# {name} heads for {Path(figures["target"]).name}

Draft heads ({name}, arXiv {paper}) of {figures["parameters"]:,} parameters for {target}, whose
embedding they share. They draft; the target decides every token, so its output is what it is without them.

```python
from specpaged import LLM

llm = LLM({arguments}{serving_line(figures["method"], figures["out"])})
```

## Acceptance by position

The share of greedy drafts that the target would accept up to each position, at {heads["starts"]} places in
{figures["held_out_continuations"]} greedy continuations of prompts that nothing was trained on, each up to where it
begins to repeat itself. Prompt lookup drafts at the same places, with matches of
{figures["prompt_lookup_min"]} to {figures["prompt_lookup_max"]} tokens, its best there. The first tokens of each
continuation are measured by themselves, too: the more a text repeats itself later on, the better is lookup.

{table}
{picture}
## Speed

Of greedy decoding with K drafts a round, over that of plain decoding of the same held-out prompts in turn, by
specpaged's engine where they were trained; medians.

{speed}

## Training

`specpaged train-drafter` distilled them from the frozen target: {losses}.
{figures["continuations"]} continuations ({figures["continuation_tokens"]:,} tokens), half greedy and half at
temperature 0.8, of prompts in `{Path(figures["data"]).name}`; {figures["steps"]} steps, {figures["tokens_seen"]:,}
tokens seen, prompts included; {figures["seconds"]["continuations"] / 60:.1f} minutes of writing and
{figures["seconds"]["training"] / 60:.1f} of training with {figures["threads"]} thread(s) on {figures["device"]}.
Batches of {figures["batch_size"]} sequences of up to {figures["sequence_length"]} tokens, AdamW at
{figures["learning_rate"]:g}, gradients clipped at 0.5, seed {figures["seed"]}.

`training/` holds the continuations and the last checkpoint; nothing needs it to serve.
"""


def speed_rows(speed: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A table of what `measure_speed` has found, its header first."""
    num_drafts = len(next(iter(speed.values()))["over_plain"])
    rows = [("batch size", "plain, tokens/s", *(f"K = {k}" for k in range(1, 1 + num_drafts)))]
    for size, of_size in speed.items():
        ratios = (f"{ratio:.2f}" for ratio in of_size["over_plain"])
        rows.append((size, f"{of_size['plain_tokens_per_second']:.0f}", *ratios))
    return rows


def _markdown(rows: Iterable[Iterable[Any]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)

"""`python -m benchmarks.budget`: speculation with less memory beside speculation as it comes, and beside plain decoding
under the same memory where there is little; conversations of several turns, up to 1,024 tokens.

Engines take turns of 30 ms at the same conversations. Generation memory is the blocks of both pools that were held at
the peak, and a plan's buffers of the largest pass. Beside what is little stands the bound below which a plan expects
drafts not to pay, at the speed that was measured. Then, whether the largest batch of a plan is the engine's. Ends in a
table, a picture beside the JSON file, and a line of JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

MAX_MODEL_LEN = 1024
NARROW = {"kv_cache_dtype": "bfloat16"}
LITTLE = 1.5  # sequences of MAX_MODEL_LEN tokens that find room where there is little: a few, as they are shorter
WIDE, PLAIN, PLAIN_NARROW, LITTLE_PLAIN = "as it comes", "plain", "plain, 16-bit KV", "little memory, plain"
OF_DRAFT = "16-bit draft KV, window, small passes"  # whose outputs are those of the engine as it comes
K = 3  # of the largest batch, which depends on it
PLANNED = 5  # sequences, for which a plan has room


def ways_of(little: int, rows: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What the drafter and the engine are given, by name: of those with all the memory that they want, and of those
    that have so many bytes for KV. Small passes have so many rows.
    """
    plain, few = {"num_speculative_tokens": 0}, {"max_num_batched_tokens": rows}
    windowed, small = {**NARROW, "kv_window": 256}, {**NARROW, **few}
    budget = {"kv_cache_memory_bytes": little}
    return {
        WIDE: ({}, {}),
        PLAIN: (plain, {}),
        PLAIN_NARROW: (plain, NARROW),
        "16-bit KV": (NARROW, NARROW),
        "16-bit KV, window, small passes": (windowed, small),
        OF_DRAFT: (windowed, few),
        LITTLE_PLAIN: (plain, budget),
        "little memory, drafting": ({}, budget),
        "little memory, window": ({"kv_window": 256}, budget),
    }


@dataclass
class Served:
    """What an engine came to, in all turns of the conversations of a round."""

    token_ids: list[list[int]]  # of each turn of each conversation
    seconds: float
    num_blocks: tuple[int, int]  # of the target's pool and of the draft's, at the peak
    metrics: list[Any]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def serve(
    engines: dict[str, Any], conversations: Sequence[Sequence[Sequence[int]]], batch_size: int, room: int
) -> dict[str, Served]:
    """Served of each engine; a turn comes when all before it have been answered, and leaves `room` for its answer."""
    from benchmarks.ours import Stint, take_turns

    served = {name: Served([], 0.0, (0, 0), []) for name in engines}
    texts = {name: [[] for _ in conversations] for name in engines}
    for turn in range(max(map(len, conversations))):
        stints, asked = {}, {}
        for name, ours in engines.items():
            asked[name] = [
                i
                for i, turns in enumerate(conversations)
                if turn < len(turns) and len(texts[name][i]) < MAX_MODEL_LEN - room
            ]
            for i in asked[name]:
                texts[name][i] = [*texts[name][i], *conversations[i][turn]][: MAX_MODEL_LEN - room]
            stints[name] = Stint(ours, [texts[name][i] for i in asked[name]], batch_size)
        take_turns(list(stints.values()))
        for name, stint in stints.items():
            run, of = stint.run(), served[name]
            for i, answer in zip(asked[name], run.token_ids, strict=True):
                texts[name][i] = texts[name][i] + answer
            of.token_ids += run.token_ids
            of.seconds += run.seconds
            of.metrics.append(run.metrics)
            held = (
                run.metrics.peak_blocks_in_use,
                run.metrics.peak_draft_blocks_in_use or run.metrics.peak_blocks_in_use,
            )
            of.num_blocks = tuple(map(max, of.num_blocks, held))
    return served


def conversations_of(pair: Any, prompts: Path | None, count: int, num_turns: int) -> list[list[list[int]]]:
    """Token ids of so many conversations' turns: those of a file, or of the pair, whose prompts follow each other."""
    from specpaged.config import EMBEDDED_TARGET
    from specpaged.modeling.loading import load_tokenizer
    from specpaged.prompts import evenly_spread, load_prompts

    if prompts is None:
        own = [list(prompt) for prompt in pair.prompts]
        return [[own[(i + j) % len(own)] for j in range(num_turns)] for i in range(count)]
    load_prompts(prompts)  # says what is wrong with it
    entries = [json.loads(line) for line in prompts.read_text().splitlines() if line.strip()]
    several = [entry["turns"] for entry in entries if len(entry["turns"]) >= num_turns]
    if pair.target != EMBEDDED_TARGET or not several:
        raise typer.BadParameter(f"--prompts is for the embedded pair, and for files with {num_turns} turns at least")
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    return [
        [tokenizer.encode(text, add_special_tokens=not j) for j, text in enumerate(turns[:num_turns])]
        for turns in evenly_spread(several, count)
    ]


def models_of(pair: Any, num_pools: int = 2) -> list[Any]:
    """What a plan knows of the pair's models, or of the target alone."""
    from specpaged.planning.checkpoint_tensors import CheckpointTensors
    from specpaged.planning.model_memory import ModelMemory

    paths = (pair.target, pair.speculative["model"])[:num_pools]
    return [
        ModelMemory.of(CheckpointTensors.read(path), max_model_len=MAX_MODEL_LEN, dtype="float32") for path in paths
    ]


def figures_of(pair: Any, ours: Any, rounds: Sequence[dict[str, Served]], name: str, beside: str) -> dict[str, Any]:
    """Of one engine, in all rounds; its speed over that of the one `beside` it, within a round."""
    from specpaged.planning.memory_model import MemoryModel

    engine, config = ours.llm.engine, ours.llm.config
    runners = [runner for runner in (engine.target, engine.draft) if runner is not None]
    model = MemoryModel(*models_of(pair, len(runners)), max_num_batched_tokens=config.max_num_batched_tokens)
    buffers = model.workspace(config.max_num_seqs, engine.max_draft_tokens)
    blocks = [max(of_round[name].num_blocks[i] for of_round in rounds) for i in range(len(runners))]
    sizes = [runner.kv_cache.block_size * runner.kv_cache.bytes_per_token for runner in runners]
    kv = sum(count * size for count, size in zip(blocks, sizes, strict=True))
    ratios = [of_round[name].tokens_per_second / of_round[beside].tokens_per_second for of_round in rounds]
    metrics = [one for of_round in rounds for one in of_round[name].metrics]
    verified = sum(one.draft_tokens for one in metrics)
    counts = ("preemptions", "short_steps", "released_draft_tokens", "requests_without_draft_kv")
    return {
        "tokens_per_second": round(median(of_round[name].tokens_per_second for of_round in rounds), 1),
        "over": beside,
        "speed_over": round(median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "kv_bytes": kv,
        "buffers": buffers,
        "generation_bytes": kv + buffers,
        "acceptance": round(sum(one.accepted_tokens for one in metrics) / verified, 3) if verified else None,
        **{count: sum(getattr(one, count) for one in metrics) for count in counts},
    }


def bound_of(pair: Any, speed: float) -> int | None:
    """Bytes of an engine from which on drafts pay, by a plan, where they make a batch so much faster; None: they never
    do."""
    from specpaged.planning.memory_model import MemoryModel
    from specpaged.planning.plan import closed_bound

    bound = closed_bound(MemoryModel(*models_of(pair)), speed, MAX_MODEL_LEN)
    return None if bound is None else int(bound)


def held_with(pair: Any, kv_bytes: int) -> int:
    """What a bound is to be held against: an engine's bytes with so many for KV."""
    from specpaged.planning.memory_model import RECORDS, MemoryModel

    model = MemoryModel(*models_of(pair))
    return model.weight_bytes + model.null_blocks + model.workspace(1) + RECORDS + kv_bytes


def draw(name: str, figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Write a PNG: what each way holds, in megabytes, and its speed over the one that it stands beside."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = list(figures)[::-1]
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    left = [figures[way]["kv_bytes"] / 1e6 for way in ways]
    memory.barh(ways, left, label="KV")
    memory.barh(ways, [figures[way]["buffers"] / 1e6 for way in ways], left=left, label="buffers")
    memory.set_xlabel("generation memory, MB")
    memory.legend(fontsize=8)
    for i, way in enumerate(ways):
        of, is_little = figures[way], figures[way]["over"] == LITTLE_PLAIN
        speed.plot(of["spread"], [i, i], color="tab:red" if is_little else "tab:blue")
        speed.plot(of["speed_over"], i, "o", color="tab:red" if is_little else "tab:blue")
    speed.axvline(1.0, color="lightgray", linewidth=0.8, zorder=0)
    speed.set_xlabel(f"speed over {WIDE!r}; red: over plain with little memory")
    figure.suptitle(f"{name}: speculation within a memory budget", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def largest_batch(pair: Any) -> dict[str, int]:
    """How many full sequences a plan has room for, and how many an engine with that memory runs without preemption."""
    from specpaged import LLM, SamplingParams
    from specpaged.planning.memory_model import MemoryModel

    model = MemoryModel(*models_of(pair), max_num_batched_tokens=256)
    context = MAX_MODEL_LEN - K
    budget = model.num_bytes(PLANNED, context, K) + model.block_size
    planned = model.largest_batch(budget, context, K)
    kv, _ = model.kv_bytes(planned, context, K)

    def is_in_room(num_seqs: int) -> bool:
        llm = LLM(
            pair.target,
            speculative_config=pair.speculative | {"num_speculative_tokens": K},
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=kv,
        )
        half = MAX_MODEL_LEN // 2
        prompts = [
            {"prompt_token_ids": (list(pair.prompts[i % len(pair.prompts)]) * half)[:half]} for i in range(num_seqs)
        ]
        params = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN - half, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        return llm.metrics.preemptions == 0

    measured = next(count - 1 for count in range(planned - 1, planned + 4) if not is_in_room(count))
    return {"planned": planned, "measured": measured}


def print_table(name: str, figures: dict[str, dict[str, Any]], most: int) -> None:
    """A row for each way."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{name}: generation memory and speed", caption="speed: of one in the same round, and its range"
    )
    for title in ("", "KV MB", "buffers MB", "of all", "tokens/s", "speed", "over", "accepted", "preemptions"):
        table.add_column(title, justify="left" if title in ("", "over") else "right")
    for way, of in figures.items():
        low, high = of["spread"]
        table.add_row(
            way, f"{of['kv_bytes'] / 1e6:.1f}", f"{of['buffers'] / 1e6:.1f}", f"{of['generation_bytes'] / most:.0%}",
            f"{of['tokens_per_second']:.0f}", f"{of['speed_over']:.2f} ({low:.2f}-{high:.2f})", of["over"],
            "" if of["acceptance"] is None else f"{of['acceptance']:.2f}", str(of["preemptions"]),
        )  # fmt: skip
    Console(width=140).print(table)


def main(
    pair: Annotated[str, typer.Option(help="By its name in benchmarks/adaptive/pairs.py.")] = "embedded",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's form, for the embedded pair.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    num_prompts: Annotated[int, typer.Option(min=1, help="Conversations.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 192,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    k: Annotated[int | None, typer.Option(min=1, help="Drafts of a round; else decided in every step.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Of small passes.")] = 256,
    little: Annotated[
        float, typer.Option(min=1, help="Full sequences for which there is KV, where there is little.")
    ] = LITTLE,
    out: Annotated[Path | None, typer.Option(help="A file for the JSON, with a picture beside it.")] = None,
) -> None:
    """Measure."""
    import torch
    from tqdm import tqdm

    from benchmarks.adaptive.pairs import make_pair
    from benchmarks.environment import environment
    from benchmarks.ours import Ours, models_loaded_once

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        made = make_pair(pair, Path(directory), num_prompts)
        talks = conversations_of(made, prompts, num_prompts, turns)
        little_bytes = int(little * MAX_MODEL_LEN * models_of(made)[0].kv_bytes_per_token)
        of_all = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": batch_size}
        drafting = made.speculative | {"num_speculative_tokens": "auto" if k is None else k}
        with models_loaded_once():
            engines = {
                name: Ours(name, "exact", max_tokens, made.target, of_all | engine, **drafting | speculative)
                for name, (speculative, engine) in ways_of(little_bytes, rows).items()
            }
        played = [serve(engines, talks, batch_size, max_tokens) for _ in tqdm(range(1 + rounds), unit="round")][
            1:
        ]  # the first one warms up
        figures: dict[str, Any] = {}
        for name, ours in engines.items():
            beside = LITTLE_PLAIN if name.startswith("little") else WIDE
            figures[name] = figures_of(made, ours, played, name, beside)
        narrow = [name for name in engines if "16-bit" in name and name != OF_DRAFT]
        identical = all(
            of_round[name].token_ids == of_round[PLAIN_NARROW if name in narrow else PLAIN].token_ids
            for of_round in played
            for name in engines
        )
        print_table(pair, figures, figures[WIDE]["generation_bytes"])
        batch = largest_batch(made)
        bound = bound_of(made, 1 / figures[PLAIN]["speed_over"])
        held = held_with(made, little_bytes)
    print(f"outputs are {'' if identical else 'NOT '}those of plain decoding; the largest batch: {batch}")
    of_bound = "drafts do not pay in any memory" if bound is None else f"drafts pay from {bound / 1e6:.1f} MB on"
    print(f"by the plan and the speed beside plain {of_bound}; with little memory there are {held / 1e6:.1f} MB")
    settings = {"pair": pair, "prompts": prompts and prompts.name, "turns": turns, "batch_size": batch_size, "k": k,
                "num_prompts": num_prompts, "max_tokens": max_tokens, "rounds": rounds, "rows": rows,
                "little": little_bytes}  # fmt: skip
    results = environment(1) | {"study": "budget", "settings": settings, "ways": figures} | {
        "identical": identical, "largest_batch": batch, "bound": bound, "held_where_little": held
    }  # fmt: skip
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")
        draw(pair, figures, out.with_suffix(".png"))
    print(json.dumps(results))


if __name__ == "__main__":
    typer.run(main)

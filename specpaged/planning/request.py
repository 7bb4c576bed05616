"""What a user asks a plan for, checked; and the words of the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specpaged.checks import check_choice, check_share
from specpaged.config import DTYPES, EMBEDDED_DRAFT, EMBEDDED_TARGET, NUMERICS
from specpaged.planning.checkpoint_tensors import CheckpointTensors
from specpaged.planning.memory_model import MemoryModel
from specpaged.planning.model_memory import ModelMemory
from specpaged.planning.pass_costs import PassCosts, RoofLine
from specpaged.planning.plan import Planner, Way, closed_bound
from specpaged.planning.speed import Speed
from specpaged.speculative_config import MIN_KV_WINDOW
from specpaged_kernels.cpu.build import cache_folder

DEFAULT_WINDOW = 512
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(name: str, value: str) -> int:
    """'6GiB', '800MB', '1.5 GB' or '4096' as bytes. ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    unit = None if match is None else _UNITS.get(match[2].upper())
    if unit is None or float(match[1]) * unit < 1:
        raise ValueError(f"{name}={value!r} must be a number of bytes; allowed: 6GiB, 800MB, 8589934592")
    return int(float(match[1]) * unit)


def human_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(len(units) - 1, max(0, (int(num_bytes).bit_length() - 1) // 10))
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes / (1 << 10 * power):.2f} {units[power]}"


@dataclass(frozen=True)
class PlanRequest:
    """A budget of memory, in bytes, and the planner for it."""

    memory: int
    planner: Planner
    target: ModelMemory
    draft: ModelMemory | None
    device: str
    options: dict[str, Any]  # of the command lines: what a user has said

    @classmethod
    def of(
        cls,
        *,
        memory: str,
        model: str | None,
        draft_model: str | None,
        context: int,
        batch: int | None,
        draft_kv_window: int | None,
        block_size: int | None,
        max_num_batched_tokens: int,
        max_num_speculative_tokens: int,
        acceptance: float,
        measured: Path | None,
        gigabytes_per_second: float | None,
        gigaflops: float | None,
        dtype: str,
        kv_cache_dtype: str,
        draft_kv_cache_dtype: str,
        device: str,
        numerics: str,
        threads: int | None,
    ) -> PlanRequest:
        """Of the command's flags.

        Raises:
            ValueError: naming the flag, its value and what is allowed.
        """
        budget = parse_bytes("--memory", memory)
        for name, value in (("dtype", dtype), ("kv-cache-dtype", kv_cache_dtype)):
            check_choice(f"--{name}", value, DTYPES)
        check_choice("--draft-kv-cache-dtype", draft_kv_cache_dtype, DTYPES)
        check_choice("--numerics", numerics, NUMERICS)
        check_share("--acceptance", acceptance, 1.0)
        if draft_kv_window is not None and draft_kv_window < MIN_KV_WINDOW:
            raise ValueError(f"--draft-kv-window={draft_kv_window} must be an int >= {MIN_KV_WINDOW}")
        if draft_model is None and model is None:
            draft_model = EMBEDDED_DRAFT
        for name, value in (("gigabytes-per-second", gigabytes_per_second), ("gigaflops", gigaflops)):
            if value is not None and value <= 0:
                raise ValueError(f"--{name}={value!r} must be more than 0")
        of_target = CheckpointTensors.read(model or EMBEDDED_TARGET)
        common = {"device": device, "max_model_len": context, "dtype": dtype}
        target = ModelMemory.of(of_target, kv_cache_dtype=kv_cache_dtype, is_fast=numerics == "fast", **common)
        if target.max_position_embeddings and context > target.max_position_embeddings:
            raise ValueError(
                f"--context={context} must be at most the {target.max_position_embeddings} positions of the target"
            )
        draft = None
        if draft_model is not None:
            of_draft = CheckpointTensors.read(draft_model, "--draft-model")
            if of_draft.is_heads:
                raise ValueError(
                    f"--draft-model={draft_model!r} holds heads that read a target, whose KV is a layer's and has the "
                    "target's blocks; allowed: a draft model"
                )
            arguments = {"kv_cache_dtype": draft_kv_cache_dtype, "argument": "--draft-model"}
            draft = ModelMemory.of(of_draft, is_fast=True, **arguments, **common)
            if draft.vocab_size < target.vocab_size:
                raise ValueError(
                    f"--draft-model={draft_model!r} has {draft.vocab_size} embedding rows for the target's "
                    f"{target.vocab_size}; allowed: as many or more"
                )
        roof = None
        if gigabytes_per_second is not None or gigaflops is not None:
            assumed = RoofLine.assumed(device)
            roof = RoofLine(
                assumed.bytes_per_second if gigabytes_per_second is None else 1e9 * gigabytes_per_second,
                assumed.flops if gigaflops is None else 1e9 * gigaflops,
            )
        costs = PassCosts.of(target, draft, device, threads, acceptance, roof, measured, cache_folder())
        layout = {
            "block_size": block_size or (64 if device.startswith("cuda") else 16),
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        plain, drafting = layouts(
            target, draft, layout, context, draft_kv_window, kv_cache_dtype == "auto", draft_kv_cache_dtype == "auto"
        )
        planner = Planner(costs, plain, drafting, context, batch, max_num_speculative_tokens)
        said = {"model": model, "draft_model": draft_model, "dtype": dtype, "numerics": numerics, "threads": threads}
        return cls(budget, planner, target, draft, device, said | layout)

    def verdict(self, plain: Way, best: Way, bound: int | None) -> str:
        """Whether speculation is worth its memory, and from where on."""
        if self.draft is None:
            return f"plain decoding: {plain.batch} sequences; name a --draft-model to see what drafting would bring"
        gain = best.tokens_per_second / plain.tokens_per_second
        lines = [
            f"speculation is worth its memory: {best.name}, K = {best.num_drafts}, {best.batch} sequences, "
            f"{gain:.2f} x the best plain decoding"
            if best.num_drafts
            else f"speculation is not worth its memory: decode plainly, {best.batch} sequences"
        ]
        limit = human_bytes(2 * self.memory)
        lines.append(
            f"it pays from {human_bytes(bound)} on (looked for up to {limit})"
            if bound is not None
            else f"it does not pay with {limit}, either"
        )
        closed = {name: self.closed(model) for name, model in self.planner.drafting.items()}
        texts = [f"{name}: {'never' if of is None else human_bytes(of)}" for name, of in closed.items()]
        lines.append(f"by the closed form, in which a batch takes as long as one sequence: {'; '.join(texts)}")
        lines.append(f"passes {self.planner.costs.source}; acceptance {self.planner.costs.acceptance_source}")
        return "\n".join(lines)

    def closed(self, model: MemoryModel) -> float | None:
        """`closed_bound` of a layout, by the speed of a batch of one."""
        planner = self.planner
        gain = Speed(planner.costs, 0.5 * planner.context, model.window).best(1, planner.most_drafts)
        return closed_bound(model, 1.0 + model.drafting_share * (gain - 1.0), planner.context)

    def as_dict(self) -> dict[str, Any]:
        """Plain data of what was asked, and of what is taken for granted."""
        costs = self.planner.costs
        return {
            "memory": self.memory,
            "context": self.planner.context,
            "batch": self.planner.batch,
            "device": self.device,
            "block_size": self.options["block_size"],
            "costs": costs.source,
            "acceptance": costs.acceptance_source,
            "tokens_per_round": [round(costs.tokens(k), 4) for k in range(self.planner.most_drafts + 1)],
            "closed_bounds": {name: self.closed(model) for name, model in self.planner.drafting.items()},
        }


def layouts(
    target: ModelMemory,
    draft: ModelMemory | None,
    layout: dict[str, int],
    context: int,
    window: int | None,
    may_narrow: bool,
    may_narrow_draft: bool,
) -> tuple[dict[str, MemoryModel], dict[str, MemoryModel]]:
    """Those without a draft, and those with one, by name: in blocks that both share, with a window, and with a pool of
    the draft's own for half of the sequences.

    Where nobody has said what KV is to be, the draft's is in 16 bits, and the target's both as its arithmetic has it
    and in 16 bits: that rounds what plain decoding reads, too.
    """
    targets = {"": target}
    if may_narrow and target.kv_dtype == "float32":
        targets[", 16-bit KV"] = _narrowed(target)
    plain = {f"plain{of_kv}": MemoryModel(model, **layout) for of_kv, model in targets.items()}
    if draft is None:
        return plain, {}
    if may_narrow_draft and draft.kv_dtype == "float32":
        draft = _narrowed(draft)
    drafting, read = {}, window or DEFAULT_WINDOW
    for of_kv, model in targets.items():
        drafting[f"draft{of_kv}"] = MemoryModel(model, draft, **layout)
        drafting[f"half draft{of_kv}"] = MemoryModel(model, draft, drafting_share=0.5, **layout)
        if read < context:
            drafting[f"window {read}{of_kv}"] = MemoryModel(model, draft, window=read, **layout)
    return plain, drafting


def _narrowed(model: ModelMemory) -> ModelMemory:
    """The model with KV in bfloat16 in place of float32."""
    return replace(model, kv_dtype="bfloat16", kv_bytes_per_token=model.kv_bytes_per_token // 2)

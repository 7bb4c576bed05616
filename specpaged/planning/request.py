"""What a user asks a plan for, checked; and the words of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpaged.checks import check_choice, check_share
from specpaged.config import DRAFT_KV_DTYPES, DTYPES, EMBEDDED_DRAFT, EMBEDDED_TARGET, NUMERICS
from specpaged.planning.checkpoint_tensors import CheckpointTensors
from specpaged.planning.layouts import layouts
from specpaged.planning.memory_model import MemoryModel
from specpaged.planning.model_memory import ModelMemory
from specpaged.planning.pass_costs import PassCosts
from specpaged.planning.plan import Planner, closed_bound
from specpaged.planning.roof_line import RoofLine
from specpaged.planning.speed import Speed
from specpaged.planning.units import human_bytes, parse_bytes
from specpaged.planning.way import Way
from specpaged.speculative_config import MIN_KV_WINDOW
from specpaged_kernels.cpu.build import cache_folder


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
        check_choice("--draft-kv-cache-dtype", draft_kv_cache_dtype, DRAFT_KV_DTYPES)
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
        target = ModelMemory.of(of_target, kv_cache_dtype=kv_cache_dtype, **common)
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
            draft = ModelMemory.of(of_draft, **arguments, **common)
            if draft.vocab_size < target.vocab_size:
                raise ValueError(
                    f"--draft-model={draft_model!r} has {draft.vocab_size} embedding rows for the target's "
                    f"{target.vocab_size}; allowed: as many or more"
                )
        for flag, one in (("--kv-cache-dtype", target), ("--draft-kv-cache-dtype", draft)):
            if one is not None and device.startswith("cuda") and one.kv_dtype != one.dtype:
                raise ValueError(
                    f"{flag}={one.kv_dtype!r} beside {one.dtype} is not read by the kernels of device={device!r}; "
                    "allowed: 'auto'"
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
        may_narrow = [  # a GPU's kernels read KV of their arithmetic's dtype alone
            dtype == "auto" and not device.startswith("cuda") for dtype in (kv_cache_dtype, draft_kv_cache_dtype)
        ]
        plain, drafting = layouts(target, draft, layout, context, draft_kv_window, *may_narrow)
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

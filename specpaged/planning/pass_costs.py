"""What passes are taken to cost: as `tune` has measured them, as an engine has left them on disk, or by a roof line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specpaged.planning.model_memory import ModelMemory
from specpaged.planning.roof_line import RoofLine
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.kept_costs import FIRST_GUESS, whose


@dataclass(frozen=True)
class PassCosts:
    """Costs of both models' passes, how likely drafts are to stand, and where both come from."""

    costs: CostModel
    source: str  # in words
    acceptance: Sequence[float]  # [j] of draft j, with all before it standing; the last one serves for all behind it
    acceptance_source: str

    def tokens(self, num_drafts: int) -> float:
        """Of a sequence's round, the target's own one among them."""
        tokens = stands = 1.0
        for j in range(num_drafts):
            stands *= self.acceptance[min(j, len(self.acceptance) - 1)]
            tokens += stands
        return tokens

    @classmethod
    def of(
        cls,
        target: ModelMemory,
        draft: ModelMemory | None,
        device: str,
        threads: int | None,
        acceptance: float,
        roof: RoofLine | None,
        measured: Path | None,
        folder: Path | None,
    ) -> PassCosts:
        """What is known: of `measured`, a tune.json; else of what engines have kept in `folder`; else by a roof line,
        `roof` or the device's.

        Raises:
            ValueError: `measured` is no tune.json.
        """
        rates, of_rates = [acceptance], f"assumed: each draft stands with {acceptance:g}"
        if measured is not None:
            costs, rates = _tuned(measured)
            return cls(costs, f"measured, in {measured.name}", rates, f"measured, in {measured.name}")
        kept = None if roof is not None else find_kept(folder, target, draft, device, threads)
        if kept is not None:
            return cls(kept[0], f"measured by an engine here, with {kept[1]} threads", rates, of_rates)
        named = roof or RoofLine.assumed(device)
        of_draft = None if draft is None else named.pass_seconds(draft)
        source = f"assumed: {named.bytes_per_second / 1e9:g} GB/s and {named.flops / 1e9:g} GFLOP/s"
        return cls(CostModel(named.pass_seconds(target), of_draft, **FIRST_GUESS), source, rates, of_rates)


def find_kept(
    folder: Path | None, target: ModelMemory, draft: ModelMemory | None, device: str, threads: int | None
) -> tuple[CostModel, int] | None:
    """Costs that an engine of this pair has kept on such a device, and its threads: `threads` if that is said.

    Of several the quickest: neighbours on a machine only ever slow passes down.
    """
    if folder is None or not folder.is_dir():
        return None
    models = [model for model in (target, draft) if model is not None]
    wanted = whose(device, [(model.architecture, model.num_parameters, model.dtype) for model in models])
    found: list[tuple[CostModel, int]] = []
    for path in folder.glob("costs-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = dict(json.loads(path.read_text()))
            if wanted.items() <= values.items() and threads in (None, values["threads"]):
                found.append((CostModel.of_dict(values), values["threads"]))
    return min(found, key=lambda kept: _seconds(kept[0]), default=None)


def _seconds(costs: CostModel) -> float:
    """Of a pass of each model, of a few rows and of many."""
    models = [passes for passes in (costs.target, costs.draft) if passes is not None]
    return sum(passes.of_rows(num_rows) for passes in models for num_rows in (1, 8, 64))


def _tuned(path: Path) -> tuple[CostModel, list[float]]:
    try:
        values = json.loads(path.read_text())
        costs, rates = CostModel.of_dict(values["costs"]), [float(p) for p in values["acceptance_by_position"]]
        if not rates or not all(0 <= p <= 1 for p in rates):
            raise ValueError("acceptance_by_position")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"--measured={str(path)!r} cannot be used ({reason}); allowed: a tune.json of `specpaged tune --out DIR`"
        ) from None
    return costs, rates

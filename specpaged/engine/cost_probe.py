"""What passes take on this machine, measured in two seconds at most, and kept on disk for the next time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specpaged.config import EngineConfig
from specpaged.drafting.base import Drafter
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.engine.pass_timer import PassTimer, Shape, sequences
from specpaged.engine.probed_passes import ProbedDrafter, drafted, forward, is_heads, proposal, row_behind, verified
from specpaged.modeling.model_runner import ModelRunner
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.combined import CombinedController
from specpaged.speculation.controller import Controller
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.kept_costs import FIRST_GUESS, VERSION, whose
from specpaged.speculation.lookups import LookupController
from specpaged.speculation.pass_seconds import PassSeconds
from specpaged.speculation.tetris import TetrisController
from specpaged_kernels import limits
from specpaged_kernels.cpu import library
from specpaged_kernels.cpu.build import cache_folder

logger = logging.getLogger("specpaged")

BUDGET = 2.0  # seconds that a probe may take
LONGEST = BUDGET / 8  # that a pass of one row may, for there to be one
_SWEEPS = 40
_BEHIND, _SPARE = 128, 16.0  # rows to catch up with, timed if there is so many times as long as the longest pass takes
_FEW = 8  # sequences, whose proposals take a time that hardly depends on how many they are
_OF_LOOKUP = 0.1  # of what is guessed of a proposal, where no model makes it
_BYTES_PER_SECOND = 1e10  # of weights, where nothing can be measured


def get_planner(
    config: EngineConfig,
    target: ModelRunner,
    draft: ModelRunner | None,
    drafter: Drafter | None,
    may_probe: bool = True,
    rest_seconds: tuple[float, float] | None = None,
) -> DraftPlanner | None:
    """Who decides how much is drafted and verified; None where nothing is drafted, or a configuration says it.

    Costs are measured if they `may_probe`: not where several ranks have to run each pass together. `rest_seconds`
    are what a host takes besides, of a step and of each sequence, where that is not our engine.
    """
    speculative = config.speculative_config
    if speculative is None or drafter is None or not speculative.decides:
        return None
    if speculative.selection == "tetris":
        return DraftPlanner(TetrisController(speculative.num_speculative_tokens, speculative.tetris_extra_proposals))
    most_rows = config.max_num_seqs * (1 + speculative.max_draft_tokens)
    costs = measured_costs(target, draft, most_rows) if may_probe else guessed_costs(target, draft)
    if rest_seconds is not None:
        costs.expect_rest(*rest_seconds)
    by_evidence, follows = speculative.verification != "rejection", drafter.hidden_states is not None
    controller: Controller | None = None
    if draft is not None:
        controller = AdaptiveController(costs, by_evidence, drafter.looks_back, drafter.stops)
    elif len(speculative.methods) == 1:
        controller = LookupController(costs, by_evidence, follows)
    if len(speculative.methods) > 1:
        controller = CombinedController(costs, len(speculative.lookups), controller, follows)
    return DraftPlanner(controller, follows, gives_up=may_probe)


def measured_costs(target: ModelRunner, draft: ModelRunner | None, most_rows: int) -> CostModel:
    """The costs of a pair's passes of up to `most_rows` rows: as they are kept on disk, or measured now.

    The pools of both may hold nothing yet: passes write to them.
    """
    if limits.interpreted() and "triton" in (target.model.backend, draft.model.backend if draft else None):
        return guessed_costs(target, draft)  # Triton's interpreter takes seconds for what takes microseconds
    path = _path(target, draft, most_rows)
    if path is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return _kept(json.loads(path.read_text()), draft is not None)
    one_row = sequences(target, Shape(1, 1))
    seconds = forward(target, one_row)  # there may be something to build, and weights to read
    if seconds > LONGEST and (seconds := forward(target, one_row)) > LONGEST:
        logger.info("a pass takes %.1f s: what others take is guessed, until it has been seen", seconds)
        return guessed_costs(target, draft)
    costs = probe(target, draft, most_rows, BUDGET)
    if path is not None:
        try:
            _write(path, json.dumps(costs.as_dict() | _whose(target, draft)))
        except OSError as error:
            logger.warning("what passes take is not kept for the next time: %s", error)
    return costs


def probe(target: ModelRunner, draft: ModelRunner | None, most_rows: int, budget: float) -> CostModel:
    """The costs of a pair's passes, measured now within `budget` seconds.

    Both models by turns, pass by pass: what is in the way comes in bursts, while what passes take beside each other
    decides. Of its weights the target finds in the caches what a drafter leaves there, as in steps that draft. Its
    passes of a few rows go first, in runs, as they do in steps.
    """
    start = time.perf_counter()

    def left(share: float = 1.0) -> float:
        return share * budget - (time.perf_counter() - start)

    first_seconds: dict[int, list[float]] = {}  # that a proposal for so many takes besides its passes
    first_shares: list[float] = []  # of a pass that heads draft by, that the first one takes
    saved: list[float] = []  # by passes of a row behind others of the target, where no drafter was between them
    drafter = draft and ProbedDrafter(draft, target)
    timers = [PassTimer(target, most_rows, partial(verified, target, drafter, saved))]
    if draft is not None:
        timers.append(
            PassTimer(draft, most_rows, partial(drafted, drafter, first_seconds, first_shares), have_several=False)
        )
        if drafter.reads is not None:
            timers.append(PassTimer(draft, most_rows, partial(proposal, drafter, num_drafts=0)))
    for share, timer in zip((0.4, 0.6, 0.75), timers, strict=False):
        timer.begin(partial(left, share))
    per_row_behind = None
    if drafter is not None and drafter.reads is None and left(0.7) > _SPARE * max(timers[1].seconds.values()):
        per_row_behind = row_behind(drafter, min(_BEHIND, timers[1].context_len), partial(left, 0.7))
    for sweep in range(_SWEEPS):
        by_timer = [timer.quick(budget / (8 + sweep), in_runs=timer is timers[0]) for timer in timers]
        by_timer[0] = timers[0].few_rows(by_timer[0], left)
        for shapes in zip_longest(*by_timer):
            for timer, shape in zip(timers, shapes, strict=True):
                if shape is not None and left() > 0:
                    timer.again(shape)
    passes = [timer.pass_seconds() for timer in timers]
    if draft is None:
        return _of_lookups(passes[0])
    of_num_seqs = {num_seqs: median(seconds) for num_seqs, seconds in first_seconds.items()}
    first = median(seconds for num_seqs, seconds in of_num_seqs.items() if num_seqs <= _FEW)
    others = [(seconds - first) / num_seqs for num_seqs, seconds in of_num_seqs.items() if num_seqs > _FEW]
    besides: dict[str, Any] = dict(FIRST_GUESS)
    besides["seconds_per_proposal"] += first
    besides["seconds_per_drafting"] += max(0.0, median(others or [0.0]))
    besides["per_row_behind"] = per_row_behind
    besides["seconds_saved"] = min(max(0.0, median(saved)), 0.5 * passes[0].seconds[0])
    if drafter.reads is not None:
        besides |= {"following": passes.pop(), "first_share": median(first_shares)}
    return CostModel(*passes, **besides)


def _of_lookups(target: PassSeconds) -> CostModel:
    """What is known of a drafter without a model."""
    of_proposals = ("seconds_per_proposal", "seconds_per_drafting")
    return CostModel(target, None, **FIRST_GUESS | {name: _OF_LOOKUP * FIRST_GUESS[name] for name in of_proposals})


def guessed_costs(target: ModelRunner, draft: ModelRunner | None) -> CostModel:
    """What the bytes of the weights say: a pass is bound by them up to some ten rows, and by arithmetic from there.

    Heads' layers are taken to be half of them, and the output layer the other half.
    """
    passes = []
    for runner in (target, draft):
        seconds = 0.0 if runner is None else runner.model.weight_bytes / _BYTES_PER_SECOND
        passes.append(PassSeconds([1, 10, 20], [seconds, seconds, 2 * seconds]) if seconds else None)
    if draft is None:
        return _of_lookups(passes[0])
    of_heads: dict[str, Any] = {}
    if is_heads(draft):
        of_heads = {"following": PassSeconds([1, 10, 20], [0.5 * s for s in passes[1].seconds]), "first_share": 0.5}
    return CostModel(*passes, **FIRST_GUESS, **of_heads)


def _path(target: ModelRunner, draft: ModelRunner | None, most_rows: int) -> Path | None:
    """Where the costs of this pair on this machine are kept: named by all that they depend on."""
    folder = cache_folder()
    if folder is None:
        return None
    device = target.model.device
    facts: list[object] = [VERSION, most_rows, torch.__version__, torch.get_num_threads(), os.cpu_count()]
    facts.append(torch.cuda.get_device_name(device) if device.type == "cuda" else _processor())
    if "cpp" in (target.model.backend, draft and draft.model.backend):
        facts.append(library.build_name())
    for runner in (target, draft):
        if runner is not None:
            model = runner.model
            facts += [model.architecture, model.num_parameters, model.weight_bytes, str(model.dtype), model.backend]
            facts += [
                str(model.device),
                str(model.kv_dtype),
                model.numerics_scheme,
                runner.graphs is not None,
                runner.kv_cache.block_size,
            ]
    return folder / f"costs-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"


def _whose(target: ModelRunner, draft: ModelRunner | None) -> dict[str, object]:
    models = [runner.model for runner in (target, draft) if runner is not None]
    facts = [(model.architecture, model.num_parameters, str(model.dtype).removeprefix("torch.")) for model in models]
    return whose(str(target.model.device), facts) | {"threads": torch.get_num_threads()}


def _kept(values: dict[str, Any], have_draft: bool) -> CostModel:
    """Costs as they were kept. ValueError, KeyError or TypeError if they are none, or not of such a pair."""
    costs = CostModel.of_dict(values)
    if have_draft != (costs.draft is not None):
        raise ValueError("draft")
    return costs


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".writing", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise

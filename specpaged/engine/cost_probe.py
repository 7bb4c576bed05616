"""What passes take on this machine, measured in two seconds at most, and kept on disk for the next time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from specpaged.config import EngineConfig
from specpaged.drafting.base import Drafter
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedBatch, RaggedRow, pack
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.cost_model import CostModel, PassSeconds
from specpaged_kernels import limits
from specpaged_kernels.cpu.build import cache_folder

logger = logging.getLogger("specpaged")

BUDGET = 2.0  # seconds that a probe may take
# Rows that are timed, in this order while there is time: kernels work in tiles, and what lies between is not linear.
ROWS = (1, 8, 16, 32, 64, 2, 4, 128, 256, 512, *range(3, 32), *range(36, 64, 4), *range(72, 128, 8), 192, 384)
_REPETITIONS = 4  # of which the quickest counts
_SWEEPS = 24
_CONTEXT = 256  # tokens, of the pass that says what reading KV takes
_SEQUENCES = 16  # of the passes that say what sequences and their KV take
_STEP_SECONDS = 3e-4  # besides the passes, until it has been seen
_PROPOSAL_SECONDS = 2e-4
_BYTES_PER_SECOND = 1e10  # of weights, where nothing can be measured
_VERSION = 6  # of what is kept


def get_planner(
    config: EngineConfig, target: ModelRunner, draft: ModelRunner | None, drafter: Drafter | None
) -> DraftPlanner | None:
    """Who decides how much is drafted, with measured costs; None where nothing is, or a configuration says it."""
    speculative = config.speculative_config
    if speculative is None or drafter is None or not speculative.is_adaptive:
        return None
    most_rows = config.max_num_seqs * (1 + speculative.max_draft_tokens)
    costs = measured_costs(target, draft, most_rows)
    by_evidence = speculative.verification != "rejection"
    return DraftPlanner(AdaptiveController(costs, by_evidence, looks_back=drafter.looks_back, stops=False))


def measured_costs(target: ModelRunner, draft: ModelRunner | None, most_rows: int) -> CostModel:
    """The costs of a pair's passes of up to `most_rows` rows: as they are kept on disk, or measured now.

    The pools of both may hold nothing yet: passes write to them.
    """
    if limits.interpreted() and "triton" in (target.model.backend, draft.model.backend if draft else None):
        return guessed_costs(target, draft)  # Triton's interpreter takes seconds for what takes microseconds
    path = _path(target, draft, most_rows)
    if path is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return CostModel.of_dict(json.loads(path.read_text()))
    costs = probe(target, draft, most_rows, BUDGET)
    if path is not None:
        try:
            _write(path, json.dumps(costs.as_dict()))
        except OSError as error:
            logger.warning("what passes take is not kept for the next time: %s", error)
    return costs


def probe(target: ModelRunner, draft: ModelRunner | None, most_rows: int, budget: float) -> CostModel:
    """The costs of a pair's passes, measured now within `budget` seconds, two thirds of them for the target."""
    start = time.perf_counter()
    share = budget if draft is None else budget * 2 / 3
    of_target = _pass_seconds(target, most_rows, share, lambda batch: _forward(target, batch))
    if draft is None:
        return CostModel(of_target, None, _PROPOSAL_SECONDS / 10, _STEP_SECONDS)

    def drafted(batch: RaggedBatch) -> float:
        """A pass of several in one call, as proposals make them."""
        one, four = (_steps(draft, batch, num_passes) for num_passes in (1, 4))
        return max((four - one) / 3, one / 8)

    left = budget - (time.perf_counter() - start)
    of_draft = _pass_seconds(draft, most_rows, left, drafted)
    return CostModel(of_target, of_draft, _PROPOSAL_SECONDS, _STEP_SECONDS)


def guessed_costs(target: ModelRunner, draft: ModelRunner | None) -> CostModel:
    """What the bytes of the weights say: a pass is bound by them up to some ten rows, and by arithmetic from there."""
    passes = []
    for runner in (target, draft):
        seconds = 0.0 if runner is None else runner.model.weight_bytes / _BYTES_PER_SECOND
        passes.append(PassSeconds([1, 10, 20], [seconds, seconds, 2 * seconds]) if seconds else None)
    return CostModel(*passes, _PROPOSAL_SECONDS, _STEP_SECONDS)


def _pass_seconds(
    runner: ModelRunner, most_rows: int, budget: float, run: Callable[[RaggedBatch], float]
) -> PassSeconds:
    """Seconds by rows, of as many row counts as the budget has time for, but two at least."""
    start = time.perf_counter()

    def left() -> float:
        return budget - (time.perf_counter() - start)

    longest = min(_CONTEXT, runner.kv_cache.num_slots, runner.model.max_model_len)  # of a sequence
    batches: dict[int, RaggedBatch] = {}
    seconds: dict[int, float] = {}
    run(_batch(runner, 1, 1, 0))  # there may be something to build
    for rows in dict.fromkeys(n for n in ROWS if n <= max(8, most_rows)):
        if len(seconds) >= 2 and left() < 2 * max(seconds.values()):
            break
        batches[rows] = _batch(runner, 1, rows, 0) if rows <= longest else _batch(runner, rows, 1, 0)
        seconds[rows] = run(batches[rows])
    # Again and again in turn, as what is in the way comes in bursts; of passes that take long, less often.
    for sweep in range(_SWEEPS):
        for rows in sorted(seconds):
            is_quick = (2 + sweep) * seconds[rows] < budget / 16
            if is_quick and left() > budget / 4:
                seconds[rows] = min(seconds[rows], run(batches[rows]))

    def difference(larger: tuple[int, int, int], smaller: tuple[int, int, int]) -> float:
        """Of passes of so many sequences, rows of each and tokens of KV, in turn; 0 where there is no time for them."""
        if left() < 4 * (1 + _REPETITIONS) * seconds[min(seconds, key=lambda rows: abs(rows - larger[0] * larger[1]))]:
            return 0.0
        pair = [_batch(runner, *shape) for shape in (larger, smaller)]
        timed = [[run(batch) for batch in pair] for _ in range(1 + _REPETITIONS)]
        slow, quick = map(min, zip(*timed, strict=True))
        return max(0.0, slow - quick)

    context = longest - _SEQUENCES
    per_sequence = per_kv_token = per_row = 0.0
    if context > 0:
        per_sequence = difference((_SEQUENCES, 1, 0), (1, _SEQUENCES, 0)) / (_SEQUENCES - 1)
        one_row = difference((_SEQUENCES, 1, context), (_SEQUENCES, 1, 0)) / (_SEQUENCES * context)
        four_rows = difference((_SEQUENCES, 4, context), (_SEQUENCES, 4, 0)) / (_SEQUENCES * context)
        per_row = min(one_row, max(0.0, four_rows - one_row) / 3)
        per_kv_token = one_row - per_row
    num_rows, quickest = sorted(seconds), math.inf
    for rows in reversed(num_rows):  # more rows are never quicker: if they seem so, somebody was in the way
        quickest = seconds[rows] = min(quickest, seconds[rows])
    return PassSeconds(num_rows, [seconds[rows] for rows in num_rows], per_sequence, per_kv_token, per_row)


def _batch(runner: ModelRunner, num_seqs: int, num_rows: int, context_len: int) -> RaggedBatch:
    """Sequences of so many rows each, on KV of their own as far as there is some: what it holds is nobody's."""
    cache = runner.kv_cache
    each = -(-(context_len + num_rows) // cache.block_size)
    firsts = [1 + i * each % (cache.num_blocks - each + 1) for i in range(num_seqs)]
    rows = [RaggedRow([1] * num_rows, context_len, range(first, first + each), num_rows) for first in firsts]
    return pack(rows, cache.block_size, runner.model.device, cache.block_stride)


def _forward(runner: ModelRunner, batch: RaggedBatch) -> float:
    start = time.perf_counter()
    runner.forward(batch, argmax_of=runner.model.vocab_size).argmax.token_ids.tolist()  # waits for the device
    return time.perf_counter() - start


def _steps(runner: ModelRunner, batch: RaggedBatch, num_passes: int) -> float:
    start = time.perf_counter()
    drafted = runner.greedy_steps([batch] * num_passes, [None] * num_passes, runner.model.vocab_size)
    drafted[-1].token_ids.tolist()
    return time.perf_counter() - start


def _path(target: ModelRunner, draft: ModelRunner | None, most_rows: int) -> Path | None:
    """Where the costs of this pair on this machine are kept: named by all that they depend on."""
    folder = cache_folder()
    if folder is None:
        return None
    device = target.model.device
    facts: list[object] = [_VERSION, most_rows, torch.__version__, torch.get_num_threads(), os.cpu_count()]
    facts.append(torch.cuda.get_device_name(device) if device.type == "cuda" else _processor())
    for runner in (target, draft):
        if runner is not None:
            model = runner.model
            facts += [model.architecture, model.num_parameters, model.weight_bytes, str(model.dtype), model.backend]
            facts += [model.numerics_scheme, runner.graphs is not None, runner.kv_cache.block_size]
    return folder / f"costs-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".writing", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)

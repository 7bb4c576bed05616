"""The worker's counters, beside vLLM's own: in /metrics where PROMETHEUS_MULTIPROC_DIR is set, and in the log."""

from __future__ import annotations

import functools
import time

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger

from specpaged.metrics import EngineMetrics

logger = init_logger(__name__)

LOG_INTERVAL = 10.0  # seconds, as vLLM's own line
COUNTERS = {
    "rounds": "Steps in which the target scored tokens to sample from.",
    "drafts": "Drafts verified, of one token or more.",
    "draft_tokens": "Draft tokens verified.",
    "accepted_tokens": "Draft tokens accepted, before a stop cuts the run.",
    "rollbacks": "Page tables truncated because drafts were rejected.",
    "rolled_back_tokens": "Tokens whose KV was taken back from the target's pool.",
    "rollback_blocks_freed": "Blocks left without a token by that. They stay with the request.",
}
LABELLED = {  # name -> help, label
    "accepted_tokens_per_position": ("Draft tokens accepted, by place in the draft.", "position"),
    "stage_seconds": ("Wall time of a step's stages, in seconds.", "stage"),
}


class MetricsExport:
    """Tells prometheus what has been counted since the last time, and the log every LOG_INTERVAL seconds of work."""

    def __init__(self, engine: int):
        self.engine = str(engine)
        self._unverified = _unverified().labels(self.engine)
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._seen: dict[tuple[str, ...], float] = {}
        self._last_log = time.monotonic()
        self._logged_rounds = 0

    def update(self, metrics: EngineMetrics) -> None:
        """Export what has been counted since the last call: to be called after each step."""
        for name in COUNTERS:
            self._count((name,), getattr(metrics, name))
        for position, total in enumerate(metrics.accepted_per_position):
            self._count(("accepted_tokens_per_position", str(position)), total)
        for stage, total in metrics.seconds.items():
            self._count(("stage_seconds", stage), total)
        self._unverified.set(metrics.unverified_kv_tokens)
        now = time.monotonic()
        if now - self._last_log >= LOG_INTERVAL and metrics.rounds > self._logged_rounds:
            self._last_log, self._logged_rounds = now, metrics.rounds
            logger.info("specpaged: %s", line(metrics))

    def _count(self, key: tuple[str, ...], total: float) -> None:
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = _counter(key[0]).labels(self.engine, *key[1:])
        new = total - self._seen.get(key, 0)
        if new:
            counter.inc(new)
            self._seen[key] = total


def line(metrics: EngineMetrics) -> str:
    """'120 rounds, 31.2 % of 480 drafts accepted (per position ...), ...': since the start."""
    total = sum(metrics.seconds.values()) or 1.0
    parts = [f"{metrics.rounds} rounds"]
    if metrics.draft_tokens:
        per_position = "/".join(map(str, metrics.accepted_per_position))
        parts.append(
            f"{metrics.acceptance_rate:.1%} of {metrics.draft_tokens} draft tokens accepted "
            f"(by position {per_position}), {metrics.rolled_back_tokens} tokens rolled back"
        )
    parts.append(", ".join(f"{stage} {seconds / total:.0%}" for stage, seconds in metrics.seconds.items()))
    return "; ".join(parts)


@functools.cache
def _counter(name: str) -> Counter:
    help_text, *labels = LABELLED.get(name) or (COUNTERS[name],)
    return Counter(f"specpaged:{name}", help_text, ["engine", *labels])


@functools.cache
def _unverified() -> Gauge:
    help_text = "Tokens of drafts whose KV the last step wrote before they were verified."
    return Gauge("specpaged:unverified_kv_tokens", help_text, ["engine"], multiprocess_mode="mostrecent")

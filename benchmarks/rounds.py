"""Rounds of several contenders, and what is read off them. Ratios are taken within a round, then their median."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.contenders import PLAIN, PLAIN_EXACT, PLAIN_FAST, Contender
from benchmarks.ours import Ours, Run


class Rounds:
    """Every contender once per round, in an order that rotates from round to round.

    A round's prompts are the next `prompts_per_round` of the pool, begun again at its end.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        pool: Sequence[Sequence[int]],
        prompts_per_round: int,
        batch_size: int,
    ):
        self.contenders = list(contenders)
        self.pool = pool
        self.prompts_per_round = prompts_per_round
        self.batch_size = batch_size
        self.rounds: list[dict[str, Run]] = []

    def prompts(self, round_idx: int) -> list[Sequence[int]]:
        first = round_idx * self.prompts_per_round
        return [self.pool[i % len(self.pool)] for i in range(first, first + self.prompts_per_round)]

    def play(self) -> None:
        """One round. The garbage of one contender is not collected in another one's time."""
        runs = {}
        prompts = self.prompts(len(self.rounds))
        first = len(self.rounds) % len(self.contenders)
        for contender in self.contenders[first:] + self.contenders[:first]:
            gc.collect()
            runs[contender.name] = contender.run(prompts, self.batch_size)
        self.rounds.append(runs)

    def check_equal_work(self, output_len: int) -> None:
        """AssertionError unless all outputs have one length and, in every round, all exact ones are identical."""
        for runs in self.rounds:
            expected = runs[PLAIN_EXACT].token_ids
            for contender in self.contenders:
                token_ids = runs[contender.name].token_ids
                lengths = {len(ids) for ids in token_ids}
                assert lengths == {output_len}, f"{contender.name}: outputs of {lengths} tokens, not {output_len}"
                if getattr(contender, "numerics", None) == "exact":
                    wrong = [i for i, ids in enumerate(token_ids) if ids != expected[i]]
                    assert not wrong, f"{contender.name}: outputs {wrong} differ from {PLAIN_EXACT}'s"

    def summary(self, forward: dict[tuple[str, str, int], float]) -> dict[str, Any]:
        """Plain data: medians, spreads, ratios, ceilings, acceptance, stages."""
        return {
            "rounds": len(self.rounds),
            "output_len": len(self.rounds[0][PLAIN_EXACT].token_ids[0]),
            "outputs": len(self.rounds) * self.prompts_per_round,
            "exact_over_fast": self._ratio(lambda runs: _speed(runs, PLAIN_EXACT) / _speed(runs, PLAIN_FAST)),
            "contenders": {c.name: self._contender(c, forward) for c in self.contenders},
            "forward_ms": {f"{n} {model} {rows}": round(s * 1e3, 3) for (n, model, rows), s in forward.items()},
        }

    def _contender(self, contender: Contender, forward: dict[tuple[str, str, int], float]) -> dict[str, Any]:
        name = contender.name
        entry: dict[str, Any] = {
            "tokens_per_second": _spread([runs[name].tokens_per_second for runs in self.rounds]),
            "over_plain": self._ratio(lambda runs: _speed(runs, name) / max(_speed(runs, plain) for plain in PLAIN)),
            "agreeing_outputs": sum(
                ids == expected
                for runs in self.rounds
                for ids, expected in zip(runs[name].token_ids, runs[PLAIN_EXACT].token_ids, strict=True)
            ),
        }
        if isinstance(contender, Ours):
            entry |= self._engine(name)
            k = contender.num_draft_tokens(self.batch_size)
            if k:
                entry |= _ceilings(contender.numerics, k, entry["mean_acceptance_length"], forward)
        return entry

    def _engine(self, name: str) -> dict[str, Any]:
        """Over all rounds: acceptance, and the share of time by stage, the rest being the client and admission."""
        wall = sum(runs[name].seconds for runs in self.rounds)
        metrics = [runs[name].metrics for runs in self.rounds]
        steps = sum(m.steps for m in metrics)
        shares = {stage: sum(m.seconds[stage] for m in metrics) / wall for stage in metrics[0].seconds}
        shares["outside"] = 1 - sum(shares.values())
        entry: dict[str, Any] = {
            "steps": steps,
            "ms_per_step": round(wall / steps * 1e3, 3),
            "stage_shares": {stage: round(share, 4) for stage, share in shares.items()},
        }
        outside = wall - sum(runs[name].forward_seconds for runs in self.rounds)
        entry["outside_forwards"] = {
            "share": round(outside / wall, 4),
            "us_per_sequence_and_step": round(outside / steps / self.batch_size * 1e6, 2),
        }
        drafts = sum(m.drafts for m in metrics)
        if drafts:
            accepted = sum(m.accepted_tokens for m in metrics)
            entry["acceptance_rate"] = round(accepted / sum(m.draft_tokens for m in metrics), 4)
            entry["mean_acceptance_length"] = round(1 + accepted / drafts, 4)
        return entry

    def _ratio(self, of: Callable[[dict[str, Run]], float]) -> dict[str, float]:
        return _spread([of(runs) for runs in self.rounds])


def _ceilings(
    numerics: str, k: int, acceptance_length: float, forward: dict[tuple[str, str, int], float]
) -> dict[str, float]:
    """Mean acceptance length x t(1 row per sequence) / t(K + 1 rows), t being a target pass; and the same with the
    draft's K passes of one row in the denominator. As in the ratio, the quicker numerics' pass is the plain one.
    """
    one_row = min(seconds for (_, model, rows), seconds in forward.items() if model == "target" and rows == 1)
    verify = forward[numerics, "target", k + 1]
    # The draft's numerics are "fast" beside either target.
    draft = min(seconds for (_, model, _), seconds in forward.items() if model == "draft")
    return {
        "num_speculative_tokens": k,
        "ceiling": round(acceptance_length * one_row / verify, 3),
        "ceiling_with_draft": round(acceptance_length * one_row / (verify + k * draft), 3),
    }


def _speed(runs: dict[str, Run], name: str) -> float:
    return runs[name].tokens_per_second


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}

"""An engine on simulated time: passes take what a known cost model says, drafts stand with known probabilities."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specpaged.speculation.acceptance import logit
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import GLANCE, Candidate, Controller, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.pass_seconds import PassSeconds, PassShape

NODES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
PLAIN_SECONDS = 1e-3  # of a target pass that is bound by the weights' bytes


def costs(draft: float | None) -> CostModel:
    """Of a target that is bound by bytes up to ten rows, and a draft that takes `draft` of it; None: prompt lookup."""
    seconds = [PLAIN_SECONDS * max(1.0, 0.4 + 0.06 * n) for n in NODES]
    passes = None if draft is None else PassSeconds(NODES, [draft * s for s in seconds])
    proposal = 0.0 if draft is None else 0.05 * PLAIN_SECONDS
    return CostModel(PassSeconds(NODES, seconds), passes, proposal, 0.1 * PLAIN_SECONDS)


def knowing(controller: AdaptiveController) -> AdaptiveController:
    """It has seen the drafts of many requests, which stood as often as it thought: there is nothing left to hope."""
    acceptance = controller.acceptance
    acceptance.num_seen, acceptance.num_accepted = 500.0, 500.0 * acceptance.mean
    return controller


class Fixed:
    """K drafts for everybody, all of which are verified."""

    def __init__(self, k: int):
        self.k = k

    def plan(self, candidates, num_steps):
        return Plan([self.k] * len(candidates))

    def selects(self):
        return False

    def select(self, candidates, evidence):
        return [len(of_draft) for of_draft in evidence]

    def __getattr__(self, name):
        return lambda *_: None  # it learns nothing


@dataclass
class Simulation:
    """`num_seqs` sequences that never end. `acceptance(i, num_tokens)` is sequence i's mean probability of a draft.

    Drafts differ around that mean, and the drafter knows (`tells`), or all are alike.
    """

    controller: Controller
    num_seqs: int
    acceptance: Callable[[int, int], float]
    draft: float | None = 0.15
    tells: bool = True
    seed: int = 0
    most: int = 8
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    num_rounds: int = 1  # in a call: of all but the first one, a rule selects the drafts, if there is one
    may_glance: bool = True
    finds: float = 1.0  # of proposals of a drafter without a model, those that find anything
    seconds: float = 0.0
    looking: float = 0.0  # seconds that went into looking back
    trying: float = 0.0  # and into rows that were tried
    num_draft_tokens: int = 0
    num_verified: int = 0
    num_steps: int = 0
    num_tokens: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.truth = costs(self.draft)
        self.num_tokens = [0] * self.num_seqs
        self.lag = [1] * self.num_seqs
        self.plan, self.planned = Plan([], num_steps=0), 0

    def tokens_per_second(self, num_steps: int) -> float:
        """Over so many steps more."""
        tokens, seconds = sum(self.num_tokens), self.seconds
        for _ in range(num_steps):
            self.step()
        return (sum(self.num_tokens) - tokens) / (self.seconds - seconds)

    def probability(self, i: int) -> float:
        mean = self.acceptance(i, self.num_tokens[i])
        if not self.tells:
            return mean
        return min(max(self.rng.betavariate(mean * 1.5, (1 - mean) * 1.5), 1e-4), 1 - 1e-4)

    def step(self) -> None:
        controller, rng, num_seqs = self.controller, self.rng, self.num_seqs
        candidates = [
            Candidate(i, self.most, lag, lag - 1, num_tokens, may_glance=self.may_glance and lag > GLANCE)
            for i, (lag, num_tokens) in enumerate(zip(self.lag, self.num_tokens, strict=True))
        ]
        if self.num_steps - self.planned < self.plan.num_steps:  # it is good for some steps, but for its looks
            plan = replace(self.plan, looks_back=())
        else:
            plan = controller.plan(candidates, max(1, self.num_steps - self.planned))
            self.planned = self.num_steps
            self.plan = plan
        self.num_steps += 1
        if plan.tries_rows:
            self.try_rows(plan.num_draft_tokens)
            return
        drafting = [i for i in range(num_seqs) if plan.num_draft_tokens[i]]
        if self.draft is None and rng.random() >= self.finds:
            drafting = []
        probabilities: list[list[float]] = [[] for _ in range(num_seqs)]
        chances = [1.0] * len(drafting)
        rows_of_passes: list[int] = []
        for depth in range(max(plan.num_draft_tokens)):
            rows = [row for row, i in enumerate(drafting) if plan.num_draft_tokens[i] > depth]
            if depth and plan.stop_rule and not plan.stop_rule.goes_on([chances[row] for row in rows], rows):
                break
            for row in rows:
                i = drafting[row]
                probabilities[i].append(self.probability(i))
                if plan.stop_rule is not None:
                    chances[row] = plan.stop_rule.chance(chances[row], depth, logit(probabilities[i][-1]), row)
            rows_of_passes.append(sum(self.lag[i] for i in drafting) if depth == 0 else len(rows))
        evidence = [[logit(p) for p in of_draft] for of_draft in probabilities]
        verified = list(map(len, evidence))
        observe_proposed = getattr(controller, "observe_proposed", None)
        if observe_proposed is not None and any(plan.num_draft_tokens):
            observe_proposed(num_seqs, any(verified))
        if plan.stop_rule is not None and self.num_steps % self.num_rounds:
            for row, i in enumerate(drafting):
                verified[i] = plan.stop_rule.num_worth(evidence[i], row)
        elif any(verified) and controller.selects():
            verified = controller.select(range(num_seqs), evidence)
        self.propose(plan, rows_of_passes)
        num_rows = num_seqs + sum(verified)
        self.spend(
            self.truth.target_seconds(PassShape(num_rows, num_seqs)),
            lambda s: controller.observe_target(PassShape(num_rows, num_seqs), s),
        )
        self.spend(self.truth.seconds_per_step, lambda s: controller.observe_rest(s, num_seqs))
        for i, count in enumerate(verified):
            outcomes = stands(rng, probabilities[i], count)
            controller.observe_drafts(i, sum(outcomes), outcomes.count(False), evidence[i])
            emitted = 1 + sum(outcomes[:count])
            self.num_tokens[i] += emitted
            has_looked = i in plan.looks_back and i not in plan.glances
            self.lag[i] = 1 if i in drafting else 1 + emitted if has_looked else self.lag[i] + emitted
        self.num_draft_tokens += sum(map(len, probabilities))
        self.num_verified += sum(verified)

    def try_rows(self, counts: Sequence[int]) -> None:
        """A plain step with more rows in it."""
        shape = PassShape(self.num_seqs + sum(counts), self.num_seqs)
        before = self.seconds
        self.spend(self.truth.target_seconds(shape, True), lambda s: self.controller.observe_target(shape, s))
        self.trying += self.seconds - before - self.truth.target.of(PassShape(self.num_seqs, self.num_seqs))
        self.spend(self.truth.seconds_per_step, lambda s: self.controller.observe_rest(s, self.num_seqs))
        for i in range(self.num_seqs):
            self.num_tokens[i] += 1
            self.lag[i] += 1

    def propose(self, plan: Plan, rows_of_passes: list[int]) -> None:
        """Who looks back does so in the first pass."""
        looked = sum(GLANCE if i in plan.glances else self.lag[i] - 1 for i in plan.looks_back)
        if not rows_of_passes and not looked:
            return
        truth = self.truth
        seconds = truth.seconds_per_proposal + sum(map(self.draft_seconds, rows_of_passes))
        rows = [looked + sum(rows_of_passes[:1]), *rows_of_passes[1:]]
        with_looks = truth.seconds_per_proposal + sum(map(self.draft_seconds, rows))
        self.looking += with_looks - seconds * bool(rows_of_passes)
        self.spend(
            with_looks, lambda s: self.controller.observe_proposal([PassShape(n, n) for n in rows], s, self.num_seqs, 0)
        )
        for i in plan.looks_back:
            num_looked = GLANCE // 2 if i in plan.glances else self.lag[i] - 1
            num_stood = sum(self.rng.random() < self.acceptance(i, self.num_tokens[i]) for _ in range(num_looked))
            self.controller.observe_outcomes(i, num_stood, num_looked - num_stood)

    def draft_seconds(self, num_rows: int) -> float:
        return 0.0 if self.draft is None else self.truth.draft.of(PassShape(num_rows, num_rows))

    def spend(self, seconds: float, observe: Callable[[float], None]) -> None:
        seconds *= self.noise(self.rng)
        self.seconds += seconds
        observe(seconds)


def stands(rng: random.Random, probabilities: Sequence[float], num_verified: int) -> list[bool]:
    """Outcomes up to the first draft that falls; of what was not verified, the first one's alone."""
    outcomes = []
    for p in probabilities[: num_verified + 1]:
        outcomes.append(rng.random() < p)
        if not outcomes[-1]:
            break
    return outcomes


def noisy(rng: random.Random) -> float:
    """5 %, and one pass in ten three times as slow."""
    return (3.0 if rng.random() < 0.1 else 1.0) * math.exp(rng.gauss(0, 0.05))

"""What a pair's speculation is worth on this machine: measured costs and acceptance, and what follows from both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from specpaged.comparison.job import Job
from specpaged.engine.cost_probe import probe
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.speculation.controller import Candidate, MeasuringController, Plan
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.pass_seconds import PassShape

PROBE_SECONDS = 6.0
DEPTHS = (8, 0, 4, 8, 2, 8, 1, 6)  # one after the other, so that passes of every shape are timed as they really come
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ProfilingController(MeasuringController):
    """Drafts now more and now less, whatever comes of it, and keeps what does."""

    def __init__(self, costs: CostModel):
        self.costs = costs
        self.num_trials: dict[Hashable, list[int]] = {}  # by request id: drafts at each place, with all before them
        self.num_accepted: dict[Hashable, list[int]] = {}  # standing; and those of them that stood as well
        self.num_asked = 0
        self.num_drafted = 0
        self._age = 0

    @override
    def plan(self, candidates: Sequence[Candidate], num_steps: int = 1) -> Plan:
        depth = DEPTHS[self._age % len(DEPTHS)]
        self._age += 1
        self.num_asked += len(candidates) if depth else 0
        return Plan([min(c.most, depth) for c in candidates])

    @override
    def select(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[int]:
        self.num_drafted += sum(map(bool, evidence))
        return list(map(len, evidence))

    @override
    def observe_drafts(
        self, sequence: Hashable, num_accepted: int, num_rejected: int, evidence: Sequence[float] | None = None
    ) -> None:
        request_id = getattr(sequence, "request_id", sequence)
        for counts, num in (
            (self.num_trials.setdefault(request_id, [0] * max(DEPTHS)), num_accepted + num_rejected),
            (self.num_accepted.setdefault(request_id, [0] * max(DEPTHS)), num_accepted),
        ):
            for j in range(num):
                counts[j] += 1


@dataclass(frozen=True)
class PairProfile:
    """Costs, acceptance, and the speed that both promise."""

    costs: CostModel
    acceptance: list[float]  # [j]: that draft j stands, with all before it standing
    by_category: dict[str, list[float]]
    proposed_share: float  # of the rounds in which anything is drafted: below 1 for prompt lookup
    batch_sizes: list[int]
    context_len: float
    speedup: dict[int, list[float]] = field(default_factory=dict)  # over plain decoding: by B, [K], K = 0 first

    @classmethod
    def measure(cls, job: Job, say: Callable[[str], None] = lambda line: None) -> PairProfile:
        """Of a job whose engine drafts: its passes are timed, its prompts decoded at several batch sizes.

        Raises:
            ValueError: nobody drafts.
        """
        engine = job.llm.engine
        step = engine.speculative_step
        if step.planner is None:
            raise ValueError("there is nothing to tune without a draft; allowed: --draft-model, or --method ngram")
        most = job.llm.config.max_num_seqs
        sizes = [size for size in BATCH_SIZES if size <= most]
        say(f"timing passes, {PROBE_SECONDS:.0f} s")
        costs = probe(engine.target, engine.draft, most * (1 + max(DEPTHS)), PROBE_SECONDS)
        controller = ProfilingController(costs)
        planner = step.planner
        categories: dict[str, str] = {}
        contexts: list[int] = []
        try:
            step.planner = DraftPlanner(controller)
            for size in sorted({1, min(8, most), most}):
                say(f"decoding, {size} at once")
                for request_id, category, context in _decode(job, size):
                    categories[request_id] = category
                    contexts.append(context)
        finally:
            step.planner = planner
        share = controller.num_drafted / max(1, controller.num_asked)
        profile = cls(
            costs,
            _rates(controller, categories),
            {
                category: _rates(controller, {i for i, of_id in categories.items() if of_id == category})
                for category in sorted(set(categories.values()))
            },
            share,
            sizes,
            sum(contexts) / len(contexts),
        )
        for size in sizes:
            profile.speedup[size] = [profile.expected(size, k) for k in range(max(DEPTHS) + 1)]
        return profile

    def expected(self, batch_size: int, k: int) -> float:
        """The speed of K drafts for each of B sequences over plain decoding's, by measured costs and acceptance."""
        costs, share, context = self.costs, self.proposed_share, self.context_len

        def seconds(num_drafts: float) -> float:
            rows = batch_size + round(batch_size * num_drafts)
            return costs.rest(batch_size) + costs.target_seconds(PassShape(rows, batch_size, context))

        tokens, chance = 1.0, 1.0
        for j in range(k):
            chance *= self.acceptance[j]
            tokens += share * chance
        drafting = costs.proposal(batch_size) if k else 0.0
        if costs.draft is not None and k:
            # Behind a round in which all stood two tokens are to be run, else one.
            drafting += costs.draft.of(PassShape(batch_size + round(batch_size * chance), batch_size, context))
            drafting += (k - 1) * costs.draft.of(PassShape(batch_size, batch_size, context))
        return tokens * seconds(0) / (seconds(share * k) + drafting)

    def best(self, batch_size: int) -> int:
        """The K that promises most at this B; 0 where none is worth it."""
        speeds = self.speedup[batch_size]
        return max(range(len(speeds)), key=lambda k: (speeds[k], -k))

    @property
    def pays_up_to(self) -> int | None:
        """The largest B at which drafting is worth it; None if it never is."""
        return max((size for size in self.batch_sizes if self.best(size)), default=None)

    def vllm_config(self, method: str, draft_model: str | None) -> dict[str, object] | None:
        """What `vllm serve --speculative-config` takes, the worker deciding how much of it to draft; None: leave it."""
        most = max(map(self.best, self.batch_sizes))
        if most == 0:
            return None
        model = {"model": draft_model} if method == "draft_model" else {}
        return {"method": method, **model, "num_speculative_tokens": most}

    def as_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "costs": self.costs.as_dict(),
            "acceptance_by_position": [round(p, 4) for p in self.acceptance],
            "acceptance_by_category": {name: [round(p, 4) for p in rates] for name, rates in self.by_category.items()},
            "proposed_share": round(self.proposed_share, 4),
            "context_len": round(self.context_len, 1),
            "speedup": {str(size): [round(x, 3) for x in speeds] for size, speeds in self.speedup.items()},
            "best": {str(size): self.best(size) for size in self.batch_sizes},
            "pays_up_to": self.pays_up_to,
        }


def _decode(job: Job, batch_size: int) -> list[tuple[str, str, int]]:
    """Id, category and mean context of each request: all of them in the largest batch, else two full batches."""
    llm = job.llm
    count = len(job.token_ids) if batch_size == llm.config.max_num_seqs else 2 * batch_size
    done = []
    for start in range(0, min(count, len(job.token_ids)), batch_size):
        chosen = range(start, min(start + batch_size, count, len(job.token_ids)))
        prompts = [{"prompt_token_ids": job.token_ids[i]} for i in chosen]
        outputs = llm.generate(prompts, [job.params[i] for i in chosen], use_tqdm=False)
        for i, output in zip(chosen, outputs, strict=True):
            num_tokens = len(output.outputs[0].token_ids) if output.outputs else 0
            done.append((output.request_id, job.records[i].category, len(job.token_ids[i]) + num_tokens // 2))
    return done


def _rates(controller: ProfilingController, request_ids: Sequence[str] | set[str] | dict[str, str]) -> list[float]:
    """[j]: how often draft j stood, of those with all before them standing; what nobody has tried is as the last."""
    rates: list[float] = []
    for j in range(max(DEPTHS)):
        num_trials = sum(controller.num_trials[i][j] for i in request_ids if i in controller.num_trials)
        num_accepted = sum(controller.num_accepted[i][j] for i in request_ids if i in controller.num_accepted)
        rates.append(num_accepted / num_trials if num_trials else (rates[-1] if rates else 0.0))
    return rates

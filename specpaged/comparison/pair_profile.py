"""What a pair's speculation is worth on this machine: measured rounds and acceptance, and what follows from both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specpaged.comparison.job import Job
from specpaged.comparison.profiling_planner import ProfilingController, ProfilingPlanner
from specpaged.comparison.round_timer import MOST_DEPTH, RoundTimer
from specpaged.engine.cost_probe import probe
from specpaged.speculation.cost_model import CostModel

PROBE_SECONDS = 6.0
ROUND_SECONDS = 10.0  # of every batch size, for rounds as the engine runs them, and for single ones
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a round by batch size and K, and the speed that these and some acceptance promise."""

    seconds: dict[int, list[float]]  # by B, [K], K = 0 first
    tokens: list[float]  # [K] of a sequence's round

    def speeds(self, batch_size: int) -> list[float]:
        """[K] the speed over plain decoding's."""
        seconds = self.seconds[batch_size]
        return [tokens * seconds[0] / taken for tokens, taken in zip(self.tokens, seconds, strict=True)]

    def best(self, batch_size: int) -> int:
        """The K that promises most at this B, of equals the smallest; 0 where none is worth it."""
        speeds = self.speeds(batch_size)
        return speeds.index(max(speeds))

    @property
    def pays_up_to(self) -> int | None:
        """The largest B at which drafting is worth it; None if it never is."""
        return max((size for size in self.seconds if self.best(size)), default=None)

    def as_dict(self) -> dict[str, object]:
        """Plain data."""
        sizes = list(self.seconds)
        return {
            "round_ms": {str(size): [round(x * 1e3, 4) for x in self.seconds[size]] for size in sizes},
            "speedup": {str(size): [round(x, 3) for x in self.speeds(size)] for size in sizes},
            "best": {str(size): self.best(size) for size in sizes},
            "pays_up_to": self.pays_up_to,
        }


@dataclass(frozen=True)
class PairProfile:
    """Costs of passes and rounds, acceptance, and the speed that rounds and acceptance promise."""

    costs: CostModel
    acceptance: list[float]  # [j]: that draft j stands, with all before it standing
    by_category: dict[str, list[float]]
    proposed_share: float  # of the rounds in which anything is drafted: below 1 for prompt lookup
    rounds: RoundTimes  # as our engine runs them, several in a call
    single_rounds: RoundTimes  # each a call of its own, as vLLM's worker runs them

    @classmethod
    def measure(cls, job: Job, say: Callable[[str], None] = lambda line: None) -> PairProfile:
        """Of a job whose engine drafts: its passes and rounds are timed, its prompts decoded.

        `say` is told what is done next, in a line. Batch sizes for which there is no KV are left out.

        Raises:
            ValueError: nobody drafts, max_model_len has no room for the rounds of one turn, or there is no KV for any
                batch size.
        """
        engine = job.llm.engine
        step = engine.speculative_step
        if step.planner is None:
            raise ValueError("nothing to tune without a draft; allowed: --draft-model, or a --method that needs none")
        most = job.llm.config.max_num_seqs
        timer = RoundTimer(engine, job.token_ids, job.params[0])
        say(f"timing passes, {PROBE_SECONDS:.0f} s")
        costs = probe(engine.target, engine.draft, most * (1 + MOST_DEPTH), PROBE_SECONDS)
        say(f"decoding {len(job.token_ids)} prompts")
        controller = ProfilingController(costs, step.drafter)
        categories = _decode(job, controller)
        rates = _rates(controller, categories)
        share = controller.num_drafted / max(1, controller.num_asked)
        say(f"decoding them with each K up to {MOST_DEPTH}")
        tokens = [1.0, *(_tokens_per_round(job, k) for k in range(1, MOST_DEPTH + 1))]
        several, single = {}, {}
        for size in [size for size in BATCH_SIZES if size <= most]:
            say(f"timing rounds of {size}, {ROUND_SECONDS:.0f} s")
            of_several = timer.round_seconds(size, job.llm.config.rounds_per_step, ROUND_SECONDS / 2)
            of_single = timer.round_seconds(size, 1, ROUND_SECONDS / 2)
            if of_several is None or of_single is None:
                say(f"there is no KV for {size} at once")
                break
            several[size], single[size] = of_several, of_single
        if not several:
            raise ValueError(
                f"kv_cache_memory_bytes={job.llm.config.kv_cache_memory_bytes} holds no sequence with its drafts; "
                "allowed: more"
            )
        return cls(
            costs,
            rates,
            {
                category: _rates(controller, {i for i, of_id in categories.items() if of_id == category})
                for category in sorted(set(categories.values()))
            },
            share,
            RoundTimes(several, tokens),
            RoundTimes(single, tokens),
        )

    @property
    def most_in_vllm(self) -> int:
        """The largest K that is the best one of single rounds at some batch size; 0 where drafting never pays."""
        return max(map(self.single_rounds.best, self.single_rounds.seconds))

    def as_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "costs": self.costs.as_dict(),
            "acceptance_by_position": [round(p, 4) for p in self.acceptance],
            "acceptance_by_category": {name: [round(p, 4) for p in rates] for name, rates in self.by_category.items()},
            "proposed_share": round(self.proposed_share, 4),
            "tokens_per_round": [round(x, 4) for x in self.rounds.tokens],
            **self.rounds.as_dict(),
            "single_rounds": self.single_rounds.as_dict(),
        }


def _tokens_per_round(job: Job, k: int) -> float:
    """Of a sequence that always drafts k, the target's own token among them, behind the round of its prompt.

    Acceptance by position does not say it: where a short draft stood, the next one is the likelier to stand.
    """
    step = job.llm.engine.speculative_step
    planner, step.planner = step.planner, None
    try:
        params = [replace(of_prompt, extra_args={"num_speculative_tokens": k}) for of_prompt in job.params]
        outputs = job.llm.generate(_prompts(job), params, use_tqdm=False)
    finally:
        step.planner = planner
    num_accepted = sum(output.metrics.accepted_tokens for output in outputs)
    return 1.0 + num_accepted / max(1, sum(max(0, output.metrics.rounds - 1) for output in outputs))


def _prompts(job: Job) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": token_ids} for token_ids in job.token_ids]


def _decode(job: Job, controller: ProfilingController) -> dict[str, str]:
    """Decode all prompts with drafts of which the controller hears; the category of each request, by its id."""
    step = job.llm.engine.speculative_step
    planner = step.planner
    step.planner = ProfilingPlanner(controller)
    try:
        outputs = job.llm.generate(_prompts(job), job.params)
    finally:
        step.planner = planner
    return {output.request_id: record.category for output, record in zip(outputs, job.records, strict=True)}


def _rates(controller: ProfilingController, request_ids: Sequence[str] | set[str] | dict[str, str]) -> list[float]:
    """[j]: how often draft j stood, of those with all before them standing; what nobody has tried is as the last."""
    rates: list[float] = []
    for j in range(MOST_DEPTH):
        num_trials = sum(controller.num_trials[i][j] for i in request_ids if i in controller.num_trials)
        num_accepted = sum(controller.num_accepted[i][j] for i in request_ids if i in controller.num_accepted)
        rates.append(num_accepted / num_trials if num_trials else (rates[-1] if rates else 0.0))
    return rates

"""An engine that drafts by a drafter which is watched: what comes of it is compared with plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from specpaged.drafting.base import Drafter
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.engine.sequence import Sequence as DecodedSequence
from specpaged.llm import LLM
from specpaged.outputs import RequestOutput
from specpaged.sampling_params import SamplingParams
from specpaged.speculation.controller import Candidate, Controller, Plan
from specpaged.testing.drafter_witness import ContractError, DrafterWitness

_MANY = 9  # requests at once: more of them than run, so that some wait


@dataclass(frozen=True)
class Case:
    """A request, and what plain decoding puts out."""

    prompt: list[int]
    params: SamplingParams
    expected: list[list[int]]  # one for each of its `n` sequences


class DrafterRun:
    """An engine that drafts by a drafter which is watched."""

    def __init__(
        self,
        target: str,
        drafter: str | Callable[..., Drafter],
        options: Mapping[str, Any] | None,
        cases: Sequence[Case],
        k: int | str,
        arguments: Mapping[str, Any],
    ):
        self.cases = cases
        self.name = ", ".join([f"K {k}", *(f"{name}={value}" for name, value in arguments.items())])
        self.num_requests = self.num_aborts = 0
        self._sequences: list[DecodedSequence] = []
        self.verification = arguments.get("verification", "coupled")
        of_engine = {name: value for name, value in arguments.items() if name != "verification"}
        of_k = {"num_speculative_tokens": 7 if k == "chance" else k}
        of_k |= {"max_num_speculative_tokens": 7} if k == "auto" else {}
        config = {"method": "custom", "drafter": drafter, "drafter_options": options, "verification": self.verification}
        try:
            self.llm = LLM(target, speculative_config=config | of_k, **of_engine)
        except ValueError as error:
            raise ContractError("construction", str(error)) from error
        checked = self.llm.engine.speculative_step.drafter
        gives_probs = bool(getattr(checked.drafter, "gives_probs", False))
        self.witness = DrafterWitness(checked.drafter, self.llm.engine.vocabulary.size, gives_probs)
        checked.drafter = self.witness
        if k == "chance":
            planner = DraftPlanner(_Chance(random.Random(0)), checked.hidden_states is not None)
            self.llm.engine.speculative_step.planner = planner

    def through(self, rng: random.Random, num_steps: int) -> DrafterRun:
        """A history of requests that come and go."""
        engine = self.llm.engine
        step = 0
        while step < num_steps or engine.has_unfinished_requests:
            while step < num_steps and len(engine.requests) < _MANY and rng.random() < 0.4:
                self._add(rng.randrange(len(self.cases)))
            if engine.requests and rng.random() < 0.05:
                self.num_aborts += 1
                self._compare(engine.abort_request(rng.choice(list(engine.requests))), is_whole=False)
            for output in self._step():
                self._compare(output)
            step += 1
        self._check_end()
        return self

    def compared(self, learns_from_others: bool) -> DrafterRun:
        """Each request alone, and then all of them together, with the same proposals if none `learns_from_others`."""
        for i in range(len(self.cases)):
            self._add(i, is_again=True)
            self._to_the_end()
        alone, self.witness.proposals = self.witness.proposals, {}
        for i in range(len(self.cases)):
            self._add(i, is_again=True)
        self._to_the_end()
        together = self.witness.proposals
        for key in sorted(alone.keys() & together.keys()) if not learns_from_others else ():
            if alone[key] != together[key]:
                request_id, _, num_tokens, _ = key
                raise ContractError(
                    "batch mates",
                    f"request {request_id!r} of {num_tokens} known tokens was proposed {alone[key]} alone, and "
                    f"{together[key]} beside others; allowed: the same, unless learns_from_others=True",
                )
        self._check_end()
        return self

    def _add(self, case_idx: int, is_again: bool = False) -> None:
        """Queue a request whose id begins with its case; with `is_again`, it is the id that it had before."""
        case, engine = self.cases[case_idx], self.llm.engine
        request_id = f"{case_idx}" if is_again else f"{case_idx}/{self.num_requests}"
        engine.add_request(request_id, case.prompt, case.params)
        self.num_requests += 1
        self._sequences += engine.requests[request_id].sequences

    def _to_the_end(self) -> None:
        while self.llm.engine.has_unfinished_requests:
            for output in self._step():
                self._compare(output)

    def _step(self) -> list[RequestOutput]:
        try:
            return self.llm.engine.step()
        finally:  # what a drafter has done to a sequence may end a step in any error
            self.witness.raise_if_broken()

    def _compare(self, output: RequestOutput, is_whole: bool = True) -> None:
        case = self.cases[int(output.request_id.split("/")[0])]
        self.witness.raise_if_broken()
        if output.error is not None:
            raise ContractError("outputs", f"{self.name}: request {output.request_id!r} ended: {output.error}")
        if self.verification == "rejection" and not case.params.greedy:
            return  # it keeps the distribution alone
        for completion, expected in zip(output.outputs, case.expected, strict=True):
            wanted = expected if is_whole else expected[: len(completion.token_ids)]
            if completion.token_ids != wanted:
                raise ContractError(
                    "outputs",
                    f"{self.name}: request {output.request_id!r} put out {completion.token_ids}; plain decoding: "
                    f"{wanted}",
                )

    def _check_end(self) -> None:
        """Nobody runs: everybody has been forgotten."""
        self.witness.raise_if_broken()
        self.llm.engine.check_integrity()
        num_failed = self.llm.metrics.failed_proposals
        if num_failed:
            raise ContractError("raises", f"{self.name}: {num_failed} proposals failed")
        for sequence in self._sequences:
            num_forgotten, wanted = self.witness.num_forgotten[sequence], 1 + sequence.metrics.preemptions
            if num_forgotten != wanted:
                raise ContractError("forget", f"{self.name}: {sequence!r} was to go {wanted}x, went {num_forgotten}x")
        num_kept = getattr(self.witness.drafter, "num_sequences", 0)
        if num_kept:
            raise ContractError("memory", f"{self.name}: num_sequences={num_kept!r} where all have ended; allowed: 0")


class _Chance(Controller):
    """Decides by chance."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    @override
    def plan(self, candidates: Sequence[Candidate], num_steps: int) -> Plan:
        drafts = self.rng.random() < 0.7
        counts = [self.rng.randint(0, candidate.most) if drafts else 0 for candidate in candidates]
        return Plan(counts, num_steps=self.rng.randint(1, 3))

    @override
    def select(self, sequences: Sequence[Any], evidence: Sequence[Sequence[float]]) -> list[int]:
        return [self.rng.randint(0, len(of_draft)) for of_draft in evidence]

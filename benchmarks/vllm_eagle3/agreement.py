"""Proposals beside a dense reference's, and beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.vllm_eagle3.proposal import AS_IS, K, Proposal

TIE = 1e-3  # of two logits whose standard deviation is 4, in fp32


@dataclass
class Agreement:
    """Proposals compared, and how they came out."""

    steps: int = 0
    drafts: int = 0
    equal: int = 0  # steps
    near_ties: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)  # where, and which tokens; near-ties, too

    @property
    def faults(self) -> int:
        return self.steps - self.equal - self.near_ties

    def summary(self) -> dict[str, Any]:
        """As JSON has it: at most the first three that differ."""
        return asdict(self) | {"faults": self.faults, "differing": self.differing[:3]}

    def add(self, drafts: Sequence[int], others: Sequence[int], margins: Sequence[float], where: str) -> None:
        """Count a step: `margins` say of each draft how far it was above the second most likely token."""
        pairs = list(zip(drafts, others, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        self.steps += 1
        self.drafts += len(pairs)
        if at is None:
            self.equal += 1
            return
        self.near_ties += margins[at] < TIE
        self.differing.append({"where": where, "draft": at, "tokens": pairs[at], "margin": margins[at]})


def judge(target: str, head: str, theirs: Sequence[Proposal], ours: Sequence[Proposal]) -> dict[str, Agreement]:
    """vLLM with the reference, vLLM as it is with a reference that pairs as it does, ours with either."""
    from transformers import AutoModelForCausalLM

    from tests.drafting.heads_reference import Eagle3Reference, ReferenceDrafts, residual_streams

    model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    reference = Eagle3Reference(head, model)
    all_known = {proposal.known for proposal in (*theirs, *ours)}
    longest = [known for known in all_known if not any(known == k[: len(known)] and known != k for k in all_known)]
    streams = {known: residual_streams(model, known) for known in longest}
    expected: dict[tuple[Any, ...], ReferenceDrafts] = {}

    def drafts_of(known: tuple[int, ...], paired: tuple[tuple[int, int], ...] = ()) -> ReferenceDrafts:
        if (known, paired) not in expected:
            states = next(states for tokens, states in streams.items() if tokens[: len(known)] == known)
            expected[known, paired] = reference.drafts(states, known, K, dict(paired))
        return expected[known, paired]

    names = ("vLLM", "vLLM, chunks as they are", "unlike without the fault", "ours", "ours and vLLM")
    found = {name: Agreement() for name in names}
    of_vllm = {}
    for proposal in theirs:
        where = f"{proposal.phase}, {len(proposal.known)} known"
        is_as_is = proposal.phase == AS_IS
        of_reference = drafts_of(proposal.known, proposal.paired)
        name = "vLLM, chunks as they are" if is_as_is else "vLLM"
        found[name].add(of_reference.token_ids, proposal.drafts, of_reference.margins, where)
        if is_as_is:
            right = drafts_of(proposal.known)
            found["unlike without the fault"].add(right.token_ids, proposal.drafts, right.margins, where)
        else:
            of_vllm[proposal.phase, proposal.known] = proposal.drafts
    for proposal in ours:
        where = f"{proposal.phase}, {len(proposal.known)} known"
        of_reference = drafts_of(proposal.known)
        found["ours"].add(of_reference.token_ids, proposal.drafts, of_reference.margins, where)
        others = of_vllm.get((proposal.phase, proposal.known))
        if others is not None:
            found["ours and vLLM"].add(proposal.drafts, others, of_reference.margins, where)
    return found


def accepted_and_rejected(proposals: Sequence[Proposal]) -> tuple[int, int]:
    """How many steps were behind one in which drafts were accepted, and behind one in which one was rejected."""
    steps = {proposal.known: proposal.drafts for proposal in proposals if proposal.phase != AS_IS}
    num_accepted = num_rejected = 0
    for known in steps:
        for count in range(1, K + 2):  # tokens of the step before
            drafts = steps.get(known[:-count])
            if drafts is not None and drafts[: count - 1] == known[-count:-1]:
                num_accepted += count > 1
                num_rejected += count <= len(drafts)
                break
    return num_accepted, num_rejected

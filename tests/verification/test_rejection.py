import pytest
import torch

from specpaged.drafting.base import DraftOutput
from specpaged.drafting.draft import NO_DRAFT
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged.speculation.acceptance import logits_of
from specpaged.speculation.adaptive import AdaptiveController
from specpaged.speculation.controller import Candidate
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.pass_seconds import PassSeconds
from specpaged.verification import get_verifier
from specpaged.verification.rejection import recover

V = 4
SEEDS = 2000
# Language models that are tables: logits after token a are row a. The draft likes what the target does not.
TARGET = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 1.5, -1.0, 0.5], [-1.0, 0.0, 0.0, 2.0], [1.0, 1.0, 0.0, -2.0]])
DRAFT = torch.tensor([[-1.0, 1.0, 0.5, 2.0], [1.0, -1.0, 2.0, 0.0], [1.5, 0.0, 0.0, -1.0], [0.0, 0.5, 2.0, 1.0]])
NOWHERE_NEAR = torch.tensor([[-3.0, -3.0, -3.0, 3.0]]).expand(4, 4)


def propose(table, outputs, num_drafts, batch, with_probs):
    """The draft model samples with the batch's noise, as DraftModelDrafter does."""
    n = len(outputs)
    drafts, probs = [[] for _ in range(n)], [[] for _ in range(n)]
    for j in range(num_drafts):
        context = [(out + d)[-1] for out, d in zip(outputs, drafts, strict=True)]
        processed = batch.process(table[context], range(n), [j] * n, drafts)
        ids = batch.sample(processed, range(n), [j] * n)[0].tolist()
        for i, row in enumerate(batch.probs(processed)):
            probs[i].append(row)
            drafts[i].append(ids[i])
    return DraftOutput(drafts, [torch.stack(p) if with_probs else None for p in probs])


def decided(controller, active, draft):
    """As much of each draft as a controller plans, and then selects."""
    counts = controller.plan([Candidate(i, len(of_draft)) for i, of_draft in zip(active, draft.token_ids, strict=True)])
    token_ids = [ids[:n] for ids, n in zip(draft.token_ids, counts.num_draft_tokens, strict=True)]
    probs = [rows[: len(ids)] for rows, ids in zip(draft.probs, token_ids, strict=True)]
    evidence = [
        logits_of(rows[range(len(ids)), ids].log().tolist()) for rows, ids in zip(probs, token_ids, strict=True)
    ]
    if controller.selects():
        kept = controller.select(active, evidence)
        token_ids, probs = ([of[:n] for of, n in zip(ofs, kept, strict=True)] for ofs in (token_ids, probs))
    return DraftOutput(token_ids, probs), evidence


def decode(params, draft_table, num_drafts, num_tokens, with_probs=True, controller=None):
    """Decode `num_tokens` tokens speculatively for every seed: [SEEDS, num_tokens]."""
    outputs = [[0] for _ in range(SEEDS)]
    verifier, active = get_verifier("rejection"), list(range(SEEDS))
    while active:
        requests = [SamplingRequest(params, i, [0], outputs[i][1:]) for i in active]
        batch = SamplingBatch(requests, V, "cpu")
        histories = [outputs[i] for i in active]
        draft = propose(draft_table, histories, num_drafts, batch, with_probs)
        if controller is not None:
            draft, evidence = decided(controller, active, draft)
        context = [tok for out, d in zip(histories, draft.token_ids, strict=True) for tok in (out[-1], *d)]
        verified = verifier.verify(TARGET[context], draft, batch)
        assert not any(verified.failed)
        for i, ids in zip(active, verified.token_ids, strict=True):
            outputs[i] += ids
        if controller is not None:
            of_drafts = zip(active, verified.num_accepted, map(len, draft.token_ids), evidence, strict=True)
            for i, num_accepted, num_drafts_of, x in of_drafts:
                controller.observe_drafts(i, num_accepted, int(num_accepted < num_drafts_of), x)
        active = [i for i in active if len(outputs[i]) <= num_tokens]
    return torch.tensor([out[1 : num_tokens + 1] for out in outputs])


@pytest.mark.parametrize(
    ("draft_table", "num_drafts", "with_probs"),
    [(DRAFT, 2, True), (NOWHERE_NEAR, 2, True), (DRAFT, 1, False), (TARGET, 3, True)],
    ids=["far", "very far", "certain draft", "draft is target"],
)
def test_two_tokens_follow_the_targets_joint_distribution(draft_table, num_drafts, with_probs):
    # Pairs, so that draws reused from a rejected round would show.
    tokens = decode(SamplingParams(temperature=0.8), draft_table, num_drafts, 2, with_probs)
    probs = (TARGET / 0.8).softmax(-1)
    expected = (probs[0].unsqueeze(1) * probs).flatten() * SEEDS
    counts = torch.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V)
    assert ((counts - expected) ** 2 / expected).sum() < 44.3  # 15 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("by_evidence", [False, True])
def test_what_is_decided_without_looking_at_drafts_leaves_the_distribution_as_it_is(by_evidence):
    """Drafts that are kept because they are likely would come too often: hence rejection has its own rule."""
    passes = PassSeconds([1, 2], [0.25, 0.5], per_sequence=0.75)  # a row more pays from a chance of a quarter on
    controller = AdaptiveController(CostModel(passes, PassSeconds([1, 2], [1e-4, 2e-4])), by_evidence, stops=False)
    draft_table = torch.tensor([[2.0, 0.0, -2.5, 1.2]]).expand(4, 4)  # likes 3 now and then, in place of 2
    tokens = decode(SamplingParams(temperature=0.8), draft_table, 2, 2, controller=controller)
    probs = (TARGET / 0.8).softmax(-1)
    expected = (probs[0].unsqueeze(1) * probs).flatten() * SEEDS
    counts = torch.bincount(tokens[:, 0] * V + tokens[:, 1], minlength=V * V)
    assert controller.acceptance.num_outcomes > SEEDS // 2  # it has drafted, and learned
    assert (((counts - expected) ** 2 / expected).sum() < 44.3) == (not by_evidence)


def test_processing_applies_to_both_distributions():
    tokens = decode(SamplingParams(top_k=2), DRAFT, 1, 1)[:, 0]
    expected = TARGET[0, [0, 2]].softmax(-1) * SEEDS
    counts = torch.bincount(tokens, minlength=V)
    assert counts[[1, 3]].tolist() == [0, 0]
    assert ((counts[[0, 2]] - expected) ** 2 / expected).sum() < 15.1  # 1 degree, p = 1e-4


def test_a_draft_that_is_the_target_is_always_accepted():
    batch = SamplingBatch([SamplingRequest(SamplingParams(), i, [0], []) for i in range(200)], V, "cpu")
    draft = propose(TARGET, [[0]] * 200, 3, batch, True)
    context = [tok for d in draft.token_ids for tok in (0, *d)]
    assert get_verifier("rejection").verify(TARGET[context], draft, batch).num_accepted == [3] * 200


def test_acceptance_is_one_minus_the_distance_of_the_distributions():
    # Coupled verification would accept 0.237 of these instead of 0.286.
    count = 2 * SEEDS
    batch = SamplingBatch([SamplingRequest(SamplingParams(), i, [0], []) for i in range(count)], V, "cpu")
    draft = propose(DRAFT, [[0]] * count, 1, batch, True)
    context = [tok for d in draft.token_ids for tok in (0, *d)]
    accepted = sum(get_verifier("rejection").verify(TARGET[context], draft, batch).num_accepted)
    rate = torch.minimum(TARGET[0].softmax(-1), DRAFT[0].softmax(-1)).sum().item()
    assert abs(accepted / count - rate) < 3 * (rate * (1 - rate) / count) ** 0.5


def test_without_drafts_the_output_is_plain_samplings():
    logits = torch.randn(20, V, generator=torch.Generator().manual_seed(0))
    batch = SamplingBatch([SamplingRequest(SamplingParams(), i, [0], []) for i in range(20)], V, "cpu")
    nothing = DraftOutput.of([NO_DRAFT] * 20)
    assert get_verifier("rejection").verify(logits, nothing, batch).token_ids == (
        get_verifier("coupled").verify(logits, nothing, batch).token_ids
    )


def test_greedy_requests_are_matched_exactly_beside_sampled_ones():
    # Flat logits: by chance, second-best drafts of a timid draft model would mostly stand.
    logits = torch.randn(80, V, generator=torch.Generator().manual_seed(0)) * 0.1
    best, second = logits.topk(2, dim=-1).indices.T.tolist()
    requests = [SamplingRequest(SamplingParams(temperature=i % 2), i, [0], []) for i in range(40)]
    drafts = [[second[2 * i] if i % 4 == 0 else best[2 * i]] for i in range(40)]
    draft = DraftOutput(drafts, [torch.full((1, V), 0.25)] * 40)
    verified = get_verifier("rejection").verify(logits, draft, SamplingBatch(requests, V, "cpu"))
    for i in range(0, 40, 2):
        assert verified.token_ids[i] == ([best[2 * i]] if i % 4 == 0 else best[2 * i : 2 * i + 2])


def test_a_run_can_be_repeated_and_mates_do_not_matter():
    params = SamplingParams(temperature=0.9)
    requests = [SamplingRequest(params, i, [0], []) for i in range(30)]
    batch = SamplingBatch(requests, V, "cpu")
    draft = propose(DRAFT, [[0]] * 30, 2, batch, True)
    context = [tok for d in draft.token_ids for tok in (0, *d)]
    together = get_verifier("rejection").verify(TARGET[context], draft, batch).token_ids
    for i in (0, 13, 29):
        alone = DraftOutput([draft.token_ids[i]], [draft.probs[i]])
        batch = SamplingBatch([requests[i]], V, "cpu")
        assert get_verifier("rejection").verify(TARGET[context[3 * i : 3 * i + 3]], alone, batch).token_ids == [
            together[i]
        ]


def test_recovery_never_picks_what_the_draft_covers():
    target, draft = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.6, 0.1, 0.1, 0.2])
    seeds, zeros = range(1500), [0] * 1500
    picks = recover(target.expand(1500, 4), draft.expand(1500, 4), seeds, zeros)
    counts = torch.bincount(picks, minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    expected = torch.tensor([1000.0, 500.0])
    assert ((counts[[1, 2]] - expected) ** 2 / expected).sum() < 15.1
    equal = target.expand(1500, 4)
    assert set(recover(equal, equal, seeds, zeros).tolist()) == {0, 1, 2}

"""The verifiers by the kernels decide what they decide in torch."""

import pytest
import torch

from specpaged.drafting.base import DraftOutput
from specpaged.sampling import get_sampling_batch
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged.verification import get_verifier
from specpaged_kernels.limits import MAX_ROWS

V = 40
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.0, top_k=7, logprobs=1),
    SamplingParams(temperature=0.7, min_tokens=3, presence_penalty=0.5),
]


def draws(seed: int, longest: int) -> tuple[torch.Tensor, DraftOutput, list[SamplingRequest]]:
    """Logits, drafts that are likely under them, and their requests."""
    generator = torch.Generator().manual_seed(seed)
    requests = [SamplingRequest(params, 50 + i, [1], [3] * i, (0,)) for i, params in enumerate(PARAMS)]
    counts = [longest, 3, 2, 0]
    logits = torch.randn(sum(counts) + 4, V, generator=generator) * 2
    drafts, probs, row = [], [], 0
    for k in counts:
        rows = logits[row : row + k]
        drafts.append(rows.topk(2).indices[:, int(row % 3 == 2)].tolist() if k else [])
        probs.append((rows + torch.randn(k, V, generator=generator)).softmax(-1) if k else None)
        row += k + 1
    return logits, DraftOutput(drafts, probs), requests


@pytest.mark.parametrize("name", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("spoiled", [None, 1, 4])
def test_verifiers_decide_alike_on_both_backends(name, spoiled):
    accepted = failed = 0
    for seed in range(4):
        logits, draft, requests = draws(seed, 3)
        if spoiled is not None:
            logits[spoiled] = float("nan")
        torch_side, triton_side = (
            get_verifier(name, backend).verify(logits, draft, get_sampling_batch(backend)(requests, V, "cpu"))
            for backend in ("torch", "triton")
        )
        assert triton_side == torch_side
        accepted += sum(torch_side.num_accepted)
        failed += sum(torch_side.failed)
    assert accepted > 4
    assert (failed > 0) == (spoiled is not None)


def test_more_drafts_than_the_kernel_has_room_for_are_verified_all_the_same():
    logits, draft, requests = draws(0, MAX_ROWS + 3)
    for name in ("coupled", "rejection"):
        results = [
            get_verifier(name, backend).verify(logits, draft, get_sampling_batch(backend)(requests, V, "cpu"))
            for backend in ("torch", "triton")
        ]
        assert results[0] == results[1]


def test_a_draft_without_probabilities_beside_one_that_has_them():
    logits, draft, requests = draws(2, 3)
    mixed = DraftOutput(draft.token_ids, [draft.probs[0], None, draft.probs[2], None])
    results = [
        get_verifier("rejection", backend).verify(logits, mixed, get_sampling_batch(backend)(requests, V, "cpu"))
        for backend in ("torch", "triton")
    ]
    assert results[0] == results[1]


def test_a_step_without_rows_to_verify():
    batch = get_sampling_batch("triton")([], V, "cpu")
    verified = get_verifier("coupled", "triton").verify(torch.empty(0, V), DraftOutput([], []), batch)
    assert verified.token_ids == []

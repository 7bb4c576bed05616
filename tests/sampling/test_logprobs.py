import torch

from specpaged.sampling.logprobs import token_logprobs


def test_logprobs_are_of_the_raw_logits_and_ranks_are_vllms():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    expected = logits.double().log_softmax(-1)
    chosen = token_logprobs(logits, [2, 3], 2)
    assert [row.token_id for row in chosen] == [2, 3]
    assert [row.rank for row in chosen] == [3, 4]  # tokens at least as likely
    for r, row in enumerate(chosen):
        assert abs(row.logprob - expected[r, row.token_id].item()) < 1e-6
        for token_id, logprob in row.top:
            assert abs(logprob - expected[r, token_id].item()) < 1e-6
    assert [i for i, _ in chosen[0].top] == [1, 3]


def test_top_breaks_ties_by_the_lowest_id():
    logits = torch.zeros(1, 500)
    logits[0, 400:] = 1.0
    assert [i for i, _ in token_logprobs(logits, [0], 5)[0].top] == [400, 401, 402, 403, 404]
    assert [i for i, _ in token_logprobs(logits, [0], 102)[0].top] == [*range(400, 500), 0, 1]


def test_zero_means_the_chosen_token_only_and_minus_one_the_whole_vocabulary():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    assert token_logprobs(logits, [3], 0)[0].top == []
    everything = token_logprobs(logits, [3], -1)[0].top
    assert [i for i, _ in everything] == logits[0].sort(descending=True, stable=True).indices.tolist()
    assert token_logprobs(logits, [3], 1000)[0].top == everything


def test_rows_are_the_same_alone_and_together():
    # More rows than one chunk holds.
    logits = torch.randn(12, 151_936, generator=torch.Generator().manual_seed(0)) * 4
    ids = list(range(12))
    together = token_logprobs(logits, ids, 3)
    for r in (0, 6, 11):
        assert token_logprobs(logits[r : r + 1], [r], 3)[0] == together[r]


def test_no_rows_give_no_logprobs():
    assert token_logprobs(torch.empty(0, 10), [], 3) == []

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.drafting.base import DraftOutput
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.logprobs import token_logprobs
from specpaged.sampling.request import SamplingRequest
from specpaged.sampling_params import SamplingParams
from specpaged.verification import get_verifier
from specpaged.verification.base import verify_rows

V = 40
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4, "min_tokens": 3},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.7, "top_k": 12, "presence_penalty": 0.9, "frequency_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.05, "min_tokens": 5, "logit_bias": {3: 5.0}, "allowed_token_ids": range(30)},
    {"temperature": 1.0},
]


def make_request(i, outputs=(1, 2)):
    params = SamplingParams(**KINDS[i % len(KINDS)])
    words = ((3, 4), (7,)) if i % 2 else ()
    return SamplingRequest(params, 100 + i, [5, 6, 7], list(outputs), stop_ids=(0, 9), bad_words_ids=words)


def drafts_of(ids):
    return DraftOutput(ids, [None] * len(ids))


def test_an_unknown_verifier_is_refused_with_the_names_that_there_are():
    with pytest.raises(ValueError, match=r"'typical'.*'greedy', 'coupled', 'rejection'"):
        get_verifier("typical")
    assert [get_verifier(name).name for name in ("greedy", "coupled", "rejection")] == [
        "greedy",
        "coupled",
        "rejection",
    ]


def test_rows_are_listed_as_in_the_docstring():
    assert verify_rows([[5, 6], [], [7]]) == ([0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1])


@pytest.mark.parametrize("vocab_size", [40, 2048, 50_257])
def test_verify_rows_equal_one_row_calls_bitwise(vocab_size):
    # The one-row call is plain decoding: the drafts are committed outputs by then.
    generator = torch.Generator().manual_seed(0)
    drafts = [torch.randint(0, 40, (k,), generator=generator).tolist() for k in (5, 0, 3, 5, 4, 5, 1, 2)]
    requests = [make_request(i) for i in range(len(drafts))]
    request_idx, seen = verify_rows(drafts)
    logits = torch.randn(len(seen), vocab_size, generator=generator) * 3
    batch = SamplingBatch(requests, vocab_size, "cpu")
    processed = batch.process(logits, request_idx, seen, drafts)
    sampled, _ = batch.sample(processed, request_idx, seen)
    for r, (i, j) in enumerate(zip(request_idx, seen, strict=True)):
        alone = SamplingBatch([make_request(i, [1, 2, *drafts[i][:j]])], vocab_size, "cpu")
        row = alone.process(logits[r : r + 1], [0], [0], [[]])
        assert torch.equal(row[0], processed[r])
        assert alone.sample(row, [0], [0])[0].item() == sampled[r].item()


def decode_plainly(i, table, num_tokens):
    """A language model that is a table: the logits after token a are table[a]."""
    outputs = [1, 2]
    for _ in range(num_tokens):
        batch = SamplingBatch([make_request(i, outputs)], V, "cpu")
        processed = batch.process(table[outputs[-1]].unsqueeze(0), [0], [0], [[]])
        outputs.append(batch.sample(processed, [0], [0])[0].item())
    return outputs


@settings(max_examples=10)
@given(st.integers(0, 1000), st.lists(st.integers(0, 6), min_size=3, max_size=6), st.booleans())
def test_output_is_plain_decodings_whatever_is_drafted(seed, draft_lens, good_drafts):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(V, V, generator=generator) * 2
    plain = [decode_plainly(i, table, 30) for i in range(len(KINDS))]
    outputs = [[1, 2] for _ in KINDS]
    verifier = get_verifier("coupled")
    for num_drafts in draft_lens:
        batch = SamplingBatch([make_request(i, out) for i, out in enumerate(outputs)], V, "cpu")
        drafts = []
        for i, out in enumerate(outputs):
            k = (num_drafts + i) % 6
            drafts.append(torch.randint(0, V, (k,), generator=generator).tolist())
            if good_drafts:  # right, but for one token in three
                right = plain[i][len(out) : len(out) + k]
                drafts[-1] = [t if d % 3 else d for t, d in zip(right, drafts[-1], strict=False)]
        context = [tok for out, d in zip(outputs, drafts, strict=True) for tok in (out[-1], *d)]
        verified = verifier.verify(table[context], drafts_of(drafts), batch)
        for out, ids in zip(outputs, verified.token_ids, strict=True):
            out += ids
    for i, out in enumerate(outputs):
        assert out[: len(plain[i])] == plain[i][: len(out)]


def test_batch_mates_do_not_matter():
    logits = torch.randn(24, V, generator=torch.Generator().manual_seed(3)) * 2
    requests = [make_request(i) for i in range(6)]
    drafts = [[i, i + 1, i + 2] for i in range(6)]
    verifier = get_verifier("coupled")
    together = verifier.verify(logits, drafts_of(drafts), SamplingBatch(requests, V, "cpu"))
    order = [4, 0, 5, 2]
    rows = [4 * i + j for i in order for j in range(4)]
    some = verifier.verify(
        logits[rows],
        drafts_of([drafts[i] for i in order]),
        SamplingBatch([requests[i] for i in order], V, "cpu"),
    )
    assert some.token_ids == [together.token_ids[i] for i in order]


@pytest.mark.parametrize("name", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0, 1.0, 0.7])
def test_nan_fails_its_request_only_and_only_in_rows_that_count(name, temperature):
    logits = torch.zeros(8, 5)
    logits[torch.arange(8), [1, 2, 1, 2, 1, 2, 1, 2]] = 60.0  # sharp: every row's token is known
    logits[2, 0] = float("nan")  # sequence 1, first row
    logits[5, 0] = float("nan")  # sequence 2, behind a mismatch
    logits[7, 0] = float("nan")  # sequence 3, bonus row
    drafts = [[1], [1], [3], [1]]
    requests = [SamplingRequest(SamplingParams(temperature=temperature, logprobs=1), i, [0], []) for i in range(4)]
    verified = get_verifier(name).verify(logits, drafts_of(drafts), SamplingBatch(requests, 5, "cpu"))
    assert verified.failed == [False, True, False, True]
    assert verified.token_ids == [[1, 2], [], [1], [1]]  # what was accepted before it stands
    assert verified.num_accepted == [1, 0, 0, 1]
    assert [len(rows) for rows in verified.logprobs] == [2, 0, 1, 1]


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_a_request_without_an_allowed_token_fails_alone(name):
    mask = torch.tensor([[True] * 5, [False] * 5])
    requests = [
        SamplingRequest(SamplingParams(), 0, [0], [], token_mask=mask),
        SamplingRequest(SamplingParams(), 1, [0], []),
    ]
    logits = torch.zeros(4, 5)
    logits[:, 1] = 60.0
    verified = get_verifier(name).verify(logits, drafts_of([[1], [1]]), SamplingBatch(requests, 5, "cpu"))
    assert verified.failed == [True, False]
    assert verified.token_ids == [[1], [1, 1]]


def test_logprobs_are_of_raw_logits_at_the_emitted_rows():
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(1))
    greedy = logits.argmax(-1).tolist()
    requests = [
        SamplingRequest(SamplingParams(temperature=0, logprobs=k, logit_bias=b), 0, [0], [])
        for k, b in ((None, None), (2, None), (0, {11: 100.0}))
    ]
    drafts = [[greedy[0]], [greedy[2], greedy[3] ^ 1], [11]]
    verified = get_verifier("greedy").verify(logits, drafts_of(drafts), SamplingBatch(requests, V, "cpu"))
    assert verified.token_ids == [[greedy[0], greedy[1]], [greedy[2], greedy[3]], [11, 11]]
    assert verified.logprobs[0] is None
    assert verified.logprobs[1] == token_logprobs(logits[2:4], [greedy[2], greedy[3]], 2)
    assert verified.logprobs[2] == token_logprobs(logits[5:7], [11, 11], 0)


def test_an_empty_batch_verifies_to_nothing():
    verified = get_verifier("coupled").verify(torch.empty(0, V), drafts_of([]), SamplingBatch([], V, "cpu"))
    assert verified.token_ids == []

"""Ways to roll back on Triton's kernels, in the interpreter; products and norms, which know of no KV, by references."""

import pytest

from tests.kernels import references
from tests.research.engines import check_attention_reads_the_tensor_that_is_realigned, make_llm, run


@pytest.fixture(autouse=True)
def _references(monkeypatch):
    references.put_row_wise_ones_in_place(monkeypatch)


SHORT = {"num_requests": 2, "max_tokens": 7}  # the interpreter takes seconds for every round


@pytest.fixture(scope="module")
def expected(toy_pair):
    """Of plain decoding in the C++ kernels, one sequence at a time."""
    llm = make_llm(toy_pair, "continuous", "truncate", k=0, max_num_seqs=1)
    return [token_ids for token_ids, _ in run(llm, **SHORT)]


@pytest.mark.parametrize(
    ("schedule", "rollback"),
    [("eqspec", "compact"), ("continuous", "compact"), ("exspec", "group")],
)
def test_outputs_are_those_of_plain_decoding(toy_pair, expected, schedule, rollback):
    llm = make_llm(toy_pair, schedule, rollback, attention_backend="triton")
    assert [token_ids for token_ids, _ in run(llm, **SHORT)] == expected
    assert llm.metrics.accepted_tokens > 0
    assert (llm.metrics.rollback_bytes > 0) == (rollback == "compact")


def test_attention_reads_the_tensor_that_was_realigned(toy_pair):
    llm = make_llm(toy_pair, "eqspec", "group", attention_backend="triton")
    check_attention_reads_the_tensor_that_is_realigned(llm)

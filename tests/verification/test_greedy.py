from hypothesis import given
from hypothesis import strategies as st

from specpaged.verification.greedy import accept_matching


def test_the_worked_example_of_the_docstring():
    drafts = [[5, 6, 7], [], [8, 9]]
    sampled = [5, 6, 2, 1, 4, 3, 9, 0]
    token_ids, num_accepted, failed = accept_matching(drafts, sampled, [True] * 8)
    assert token_ids == [[5, 6, 2], [4], [3]]
    assert num_accepted == [2, 0, 0]
    assert failed == [False] * 3


def test_a_row_that_is_not_ok_fails_its_sequence_only_where_it_counts():
    drafts = [[5, 6, 7], [8], [9], [4]]
    sampled = [5, 2, 0, 0, 8, 1, 9, 1, 4, 3]
    ok = [True, True, False, False, False, True, True, False, True, True]
    token_ids, num_accepted, failed = accept_matching(drafts, sampled, ok)
    assert failed == [False, True, True, False]  # behind a mismatch; the first row; the bonus row; none
    assert token_ids == [[5, 2], [], [9], [4, 3]]
    assert num_accepted == [1, 0, 1, 1]


token = st.integers(0, 2)


@given(st.lists(st.lists(st.tuples(token, token), max_size=5), max_size=5), st.lists(token, min_size=5, max_size=5))
def test_output_is_the_targets_samples_up_to_the_first_mismatch(pairs, bonus):
    drafts = [[d for d, _ in sequence] for sequence in pairs]
    samples = [[*(s for _, s in sequence), last] for sequence, last in zip(pairs, bonus, strict=False)]
    flat = [s for row in samples for s in row]
    token_ids, num_accepted, _ = accept_matching(drafts, flat, [True] * len(flat))
    for draft, sampled, output, accepted in zip(drafts, samples, token_ids, num_accepted, strict=True):
        assert output == sampled[: accepted + 1]
        assert output[:-1] == draft[:accepted]
        assert accepted == len(draft) or draft[accepted] != sampled[accepted]

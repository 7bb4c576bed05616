"""The worked example of RaggedBatch's docstring, and which rows of a pass are wanted."""

import torch

from specpaged.modeling.ragged_batch import RaggedRow, pack

A, B, C, D, E = range(11, 16)


def test_the_worked_example():
    batch = pack([RaggedRow([A, B, C], 5, [2, 7], 2), RaggedRow([D, E], 0, [1], 1, num_hidden=2)], 4)
    assert batch.token_ids.tolist() == [A, B, C, D, E]
    assert batch.positions.tolist() == [5, 6, 7, 0, 1]
    assert batch.slot_mapping.tolist() == [29, 30, 31, 4, 5]
    assert batch.logits_idx.tolist() == [1, 2, 4]
    assert batch.hidden_idx.tolist() == [3, 4]
    assert batch.hidden_idx.dtype == torch.int64
    assert batch.output_idx().tolist() == [1, 2, 3, 4]
    assert batch.cu_query_lens.tolist() == [0, 3, 5]
    assert batch.context_lens.tolist() == [5, 0]
    assert batch.page_table.tolist() == [[2, 7], [1, 0]]
    assert (batch.query_lens, batch.num_logits, batch.num_hidden) == ((3, 2), (2, 1), (0, 2))


def test_where_no_row_asks_for_hidden_states_there_are_no_indices_of_them():
    batch = pack([RaggedRow([A, B, C], 5, [2, 7], 2), RaggedRow([D], 0, [1], 0)], 4)
    assert batch.hidden_idx is None
    assert batch.num_hidden == ()
    assert batch.output_idx().tolist() == [1, 2]


def test_rows_wanted_twice_are_output_once():
    rows = [RaggedRow([A, B, C], 0, [1], 1, 3), RaggedRow([D, E], 0, [2], 2, 1), RaggedRow([A], 0, [3], 0, 0)]
    assert pack(rows, 4).output_idx().tolist() == [0, 1, 2, 3, 4]
    alike = [RaggedRow([A, B, C], 0, [1], 2, 2), RaggedRow([D], 0, [2], 0, 0)]
    assert pack(alike, 4).output_idx().tolist() == [1, 2]

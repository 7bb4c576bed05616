"""The running batch on the device against the host's record of it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpaged.modeling.copies import Copies
from specpaged.modeling.device_state import DeviceState, RowState, state_bytes
from specpaged.paging.block_allocator import IntegrityError

NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE = 3, 40, 8


class CountedCopies(Copies):
    def __init__(self):
        self.num_uploads = 0

    def upload(self, values):
        self.num_uploads += 1
        return super().upload(values)


def make() -> DeviceState:
    return DeviceState(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cpu"), CountedCopies())


def row_state(num_tokens: int = 9, **changes) -> RowState:
    blocks = changes.pop("blocks", [4, 2])
    return replace(RowState(num_tokens, num_tokens - 1, 30, 3, True, 5, 2**63 + 7, 0.7), blocks=blocks, **changes)


def test_a_sequence_is_where_it_was_put_and_rows_of_nobody_do_not_run():
    state, row = make(), row_state()
    state.put(1, row, list(range(100, 109)))
    assert state.num_changes
    state.flush()
    rows = state.rows(2)
    assert rows.token_ids[1, :9].tolist() == list(range(100, 109))
    assert rows.num_tokens.tolist() == [0, 9]
    assert rows.limits.tolist() == [0, 30]
    assert state.fields["page_table"][1, :2].tolist() == [4, 2]
    assert state.temperatures(2)[1] == torch.tensor(0.7)
    low, high = state.fields["seeds"][1].tolist()
    assert (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32 == 2**63 + 7
    assert not any(values[[0, 2]].any() for values in state.fields.values())
    state.check_integrity({1: (row, list(range(100, 109)))}, is_ahead=False)
    state.clear(1)
    state.flush()
    assert state.rows(2).limits.tolist() == [0, 0]
    state.check_integrity({}, is_ahead=False)


@settings(max_examples=30)
@given(data=st.data())
def test_updates_leave_what_putting_anew_would(data):
    """Tokens are appended, blocks come and go at the end, a sequence takes another's row, or moves; one upload for all
    of it."""
    state, known = make(), {}
    for _ in range(data.draw(st.integers(1, 6))):
        for row in range(NUM_ROWS):
            action = data.draw(st.sampled_from(["none", "put", "grow", "clear", "move"]))
            if action == "put":
                length = data.draw(st.integers(1, 20))
                known[row] = row_state(length, blocks=data.draw(st.lists(st.integers(1, 99), max_size=5))), [7] * length
                state.put(row, *known[row])
            elif action == "grow" and row in known:
                before, tokens = known[row]
                tokens = tokens + data.draw(st.lists(st.integers(0, 9), max_size=4))
                kept = before.blocks[: data.draw(st.integers(0, 5))]
                now = replace(
                    before, num_tokens=len(tokens), draft_context_len=len(tokens) - 1,
                    max_drafts=data.draw(st.integers(0, 3)),
                    blocks=(kept + data.draw(st.lists(st.integers(1, 99), max_size=2)))[:5],
                )  # fmt: skip
                state.update(row, before, now, tokens)
                known[row] = now, tokens
            elif action == "clear" and row in known:
                state.clear(row)
                del known[row]
            elif action == "move" and row in known:
                free = [to for to in range(NUM_ROWS) if to not in known]
                if free:
                    state.move(row, to := data.draw(st.sampled_from(free)))
                    known[to] = known.pop(row)
        before = state._copies.num_uploads
        changed = state.num_changes > 0
        state.flush()
        assert state._copies.num_uploads - before == changed
        state.flush()
        assert state._copies.num_uploads - before == changed
        state.check_integrity(known, is_ahead=False)
    for row, (of_row, tokens) in known.items():
        state.put(row, of_row, tokens)
    anew = state._values.clone()
    state.flush()
    assert torch.equal(state._values, anew)


def test_a_row_moves_with_what_a_round_in_flight_has_left_in_it():
    """The host has noted a block, and knows neither of two tokens nor of the length."""
    state, before = make(), row_state()
    state.put(2, before, [3] * 9)
    state.flush()
    state.fields["token_ids"][2, 9:11] = torch.tensor([8, 9])
    state.fields["num_tokens"][2] = 11
    now = replace(before, blocks=[4, 2, 6])
    state.update(2, before, now, [3] * 9)
    state.move(2, 0)
    state.flush()
    assert state._copies.num_uploads == 2
    assert state.fields["token_ids"][0, :11].tolist() == [3] * 9 + [8, 9]
    assert state.fields["num_tokens"].tolist() == [11, 0, 0]
    state.check_integrity({0: (now, [3] * 9)}, is_ahead=True)
    state.move(0, 2)
    state.move(2, 1)  # before it is there
    state.put(0, now, [5] * 9)
    state.flush()
    assert state.fields["num_tokens"].tolist() == [9, 11, 0]
    state.check_integrity({0: (now, [5] * 9), 1: (now, [3] * 9)}, is_ahead=True)


def test_rows_that_move_and_others_that_take_their_places_are_told_apart():
    """All before one flush: one goes from where another has moved, and who was put into its place moves as well."""
    state = make()
    a, b, c = row_state(4, blocks=[1]), row_state(5, blocks=[2]), row_state(6, blocks=[3])
    state.put(0, a, [7] * 4)
    state.put(2, b, [8] * 5)
    state.flush()
    state.move(0, 1)
    state.clear(1)
    state.move(2, 1)
    state.put(2, c, [9] * 6)
    state.move(2, 0)
    state.flush()
    state.check_integrity({0: (c, [9] * 6), 1: (b, [8] * 5)}, is_ahead=False)


def test_a_row_moves_to_where_another_one_has_just_gone():
    """What was noted of that one is not the newcomer's."""
    state, gone, stays = make(), row_state(), row_state(5, blocks=[9])
    state.put(0, gone, [3] * 9)
    state.put(2, stays, [6] * 5)
    state.flush()
    state.clear(0)
    state.move(2, 0)
    state.flush()
    state.check_integrity({0: (stays, [6] * 5)}, is_ahead=False)


def test_what_a_state_takes_is_known_before_it_is_made():
    assert state_bytes(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE) == make().num_bytes > 4 * NUM_ROWS * MAX_MODEL_LEN


def test_what_goes_up_is_what_has_changed():
    """A block, a K and a token are an int each; who has gone is the six by which a round would run it."""
    state, before = make(), row_state()
    state.put(0, before, [3] * 9)
    state.flush()
    now = replace(before, blocks=[4, 2, 6], max_drafts=1)
    state.update(0, before, now, [3] * 9)
    assert state.num_changes == 2
    state.flush()
    state.update(0, now, replace(now, num_tokens=10), [3] * 10)
    assert state.num_changes == 2  # the token, and how many there are
    state.flush()
    state.clear(0)
    assert state.num_changes == 6


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("num_tokens", 1, "num_tokens"), ("max_drafts", 1, "max_drafts"), ("seeds", 1, "seed"),
        ("page_table", 1, "blocks"), ("token_ids", 1, "tokens"), ("temperatures", 1, "temperatures"),
        ("limits", 0, "is nobody's"), ("has_draft", 2, "is nobody's"),
    ],
)  # fmt: skip
def test_what_differs_on_the_device_is_found(name, row, said):
    state, of_row = make(), row_state()
    state.put(1, of_row, [3] * 9)
    state.flush()
    state.fields[name][row] += 1
    with pytest.raises(IntegrityError, match=said):
        state.check_integrity({1: (of_row, [3] * 9)}, is_ahead=False)


def test_a_round_in_flight_may_have_brought_tokens_and_taken_none():
    state, of_row = make(), row_state()
    state.put(1, of_row, [3] * 9)
    state.flush()
    state.fields["num_tokens"][1] = 11
    state.check_integrity({1: (of_row, [3] * 9)}, is_ahead=True)
    state.fields["num_tokens"][1] = 8
    with pytest.raises(IntegrityError, match="fewer tokens"):
        state.check_integrity({1: (of_row, [3] * 9)}, is_ahead=True)

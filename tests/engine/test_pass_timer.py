"""Passes of known cost are timed, and what they take is found, by shape."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from specpaged.engine import pass_timer
from specpaged.engine.pass_timer import PassTimer, Shape, _rising
from specpaged.speculation.pass_seconds import PassSeconds, PassShape

BLOCK_SIZE, NUM_BLOCKS = 16, 600
FEW = 8 * 252  # KV tokens of the smaller batch that is timed


def runner_of(bytes_per_token=64, max_model_len=512):
    shape = ((NUM_BLOCKS + 1) * BLOCK_SIZE, 2)
    cache = SimpleNamespace(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_slots=NUM_BLOCKS * BLOCK_SIZE,
        bytes_per_token=bytes_per_token,
        layers=[torch.full(shape, float("nan")) for _ in range(2)],
    )
    return SimpleNamespace(kv_cache=cache, model=SimpleNamespace(max_model_len=max_model_len))


def timed(truth, have_several=True, most_rows=256, left=1e9, **of_runner):
    """What passes of a known cost came to."""

    def run(rows):
        num_rows = sum(len(row.token_ids) for row in rows)
        own = sum(len(row.token_ids) * (len(row.token_ids) - 1) / 2 for row in rows)  # rows attend to those before
        own_seconds = own * truth.per_row_and_kv_token
        return truth.of(PassShape(num_rows, len(rows), rows[0].context_len)) + own_seconds

    timer = PassTimer(runner_of(**of_runner), most_rows, run, have_several)
    timer.begin(lambda: left)
    return timer.pass_seconds()


@pytest.mark.parametrize("further", [0.0, 3e-7])
def test_what_rows_sequences_and_kv_take_is_told_apart(further):
    nodes, seconds = [1, 8, 32, 128, 256], [1e-3, 1.5e-3, 5e-3, 2e-2, 4e-2]
    truth = PassSeconds(nodes, seconds, 2e-5, 2e-7, 1e-7, further, FEW)
    found = timed(truth)
    for shape in [(1, 1, 0), (8, 8, 100), (24, 8, 200), (32, 32, 250), (96, 32, 250), (128, 32, 50), (200, 100, 0)]:
        assert found.of(PassShape(*shape)) == pytest.approx(truth.of(PassShape(*shape)), rel=0.03), shape
    assert found.per_further_kv_token == pytest.approx(further)


def test_sequences_of_one_row_each_are_enough():
    truth = PassSeconds([1, 256], [1e-3, 4e-3], 0.0, 2e-7)
    found = timed(truth, have_several=False)
    assert found.of(PassShape(16, 16, 200)) == pytest.approx(truth.of(PassShape(16, 16, 200)), rel=0.03)
    assert found.per_row_and_kv_token == 0


@pytest.mark.parametrize(
    ("left", "of_runner"), [(0.0, {}), (1e9, {"max_model_len": 4}), (1e9, {"bytes_per_token": 1 << 26})]
)
def test_without_time_or_room_it_is_still_a_table(left, of_runner):
    truth = PassSeconds([1, 256], [1e-3, 4e-3])
    found = timed(truth, left=left, **of_runner)
    assert found.of(PassShape(1, 1)) == pytest.approx(1e-3, rel=0.1)
    assert found.num_rows[:2] == [1, 8] if left == 0 else len(found.num_rows) > 2


def test_a_row_beyond_a_tile_of_the_kernels_is_told_from_the_last_one_in_it():
    def run(rows):
        return 1e-3 * -(-sum(len(row.token_ids) for row in rows) // 6)  # tiles of six rows

    timer = PassTimer(runner_of(), 256, run)
    timer.begin(lambda: 1e9)
    found = timer.pass_seconds()
    for num_rows in (1, 6, 7, 12, 13, 18, 19, 24, 25, 31, 36):
        assert found.of_rows(num_rows) == pytest.approx(1e-3 * -(-num_rows // 6)), num_rows


@pytest.mark.parametrize(("budget", "many"), [(1.6, []), (6.0, [256])])
def test_passes_of_many_rows_are_timed_where_that_leaves_most_of_the_time(monkeypatch, budget, many):
    now = 0.0

    def run(rows):
        nonlocal now
        seconds = 1e-3 * sum(len(row.token_ids) for row in rows)
        now += seconds
        return seconds

    monkeypatch.setattr(pass_timer, "time", SimpleNamespace(perf_counter=lambda: now))
    timer = PassTimer(runner_of(), 256, run)
    timer.begin(lambda: budget - now)
    found = timer.pass_seconds()
    assert [n for n in found.num_rows if n > 48] == [64, 128, *many]
    assert found.of_rows(256) == pytest.approx(0.256)


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_is_now_quick_now_slow_does_not_change_what_passes_take_beside_others(seed):
    """Every turn has a pace of its own, and now and then a pass is disturbed."""
    rng, pace = random.Random(seed), 1.0

    def run(rows):
        num_rows = sum(len(row.token_ids) for row in rows)
        return pace * 1e-3 * (1.0 + 0.4 * num_rows) * rng.lognormvariate(0.0, 0.02) * rng.choice([1.0] * 9 + [3.0])

    timer = PassTimer(runner_of(max_model_len=4), 64, run)
    timer.begin(lambda: 1e9)
    for _ in range(12):
        pace = rng.choice((1.0, 1.0, 1.5, 2.0))
        for shape in timer.few_rows(timer.quick(1e9), lambda: 1.0):
            timer.again(shape)
    found = timer.pass_seconds()
    for num_rows in (2, 3, 4, 6, 8, 12, 24):
        expected = (1.0 + 0.4 * num_rows) / 1.4
        assert found.of_rows(num_rows) / found.of_rows(1) == pytest.approx(expected, rel=0.04), num_rows


def test_of_a_slow_model_one_turn_at_another_pace_changes_nothing():
    pace = 1.0

    def run(rows):
        return pace * 1e-2 * (1.0 + 0.4 * sum(len(row.token_ids) for row in rows))

    timer = PassTimer(runner_of(max_model_len=4), 64, run)
    timer.begin(lambda: 1e9)
    pace = 2.0
    assert timer.few_rows(timer.quick(1e9)[:4], lambda: 1.0) == []
    found = timer.pass_seconds()
    for num_rows in (2, 4, 12, 24):
        assert found.of_rows(num_rows) / found.of_rows(1) == pytest.approx((1.0 + 0.4 * num_rows) / 1.4)


def test_passes_of_a_few_rows_are_measured_in_a_run_of_such():
    """The first one behind one of many rows takes ten times as long."""
    last, num_runs = 64, Counter()

    def run(rows):
        nonlocal last
        num_rows, before = sum(len(row.token_ids) for row in rows), last
        last = num_rows
        num_runs[num_rows] += 1
        return 1e-3 * (1.0 + 0.4 * num_rows) * (10.0 if num_rows <= 8 < before else 1.0)

    timer = PassTimer(runner_of(max_model_len=4), 64, run)
    timer.begin(lambda: 1e9)
    begun = num_runs.copy()
    for _ in range(4):
        shapes = timer.few_rows(timer.quick(1e9), lambda: 1.0)
        assert min(shape.num_seqs * shape.num_rows for shape in shapes) > 8
        for shape in shapes:
            timer.again(shape)
    assert (num_runs - begun)[4] == 4 * (1 + 3)
    slowest = {shape: max(seconds for _, seconds in of_shape[1:]) for shape, of_shape in timer._measured.items()}
    assert all(seconds < 6e-3 for shape, seconds in slowest.items() if shape.num_seqs * shape.num_rows <= 8)


def test_what_goes_in_runs_is_charged_for_all_of_them(measured):
    timer = measured()
    assert {shape.num_rows for shape in timer.quick(0.25, in_runs=True) if shape.num_seqs == 1} == {1, 2, 3, 4}


@pytest.fixture
def measured(monkeypatch):
    """Every shape has been once. A row takes 1 ms, and 6 to measure it; `slowly` what else that takes of shapes."""

    def measure(slowly=lambda num_rows: 0.0):
        now = 0.0

        def run(rows):
            nonlocal now
            num_rows = sum(len(row.token_ids) for row in rows)
            now += 6e-3 * num_rows + slowly(num_rows)
            return 1e-3 * num_rows

        monkeypatch.setattr(pass_timer, "time", SimpleNamespace(perf_counter=lambda: now))
        timer = PassTimer(runner_of(), 256, run)
        timer.begin(lambda: 1e9)
        return timer

    return measure


def test_what_takes_long_to_measure_is_measured_less_often(measured):
    assert {shape.num_rows for shape in measured().quick(0.25) if shape.num_seqs == 1} == {1, 2, 3, 4, 5, 6, 7}


def test_a_row_alone_is_measured_before_others_whatever_that_takes(measured):
    timer = measured(lambda num_rows: 0.02 * (num_rows == 1))
    assert timer.quick(0.03) == [Shape(1, 1)]


def test_who_was_in_the_way_once_is_not_what_it_takes(measured):
    slow = [0.5]
    timer = measured(lambda num_rows: slow.pop() if num_rows == 3 and slow else 0.0)
    timer.again(Shape(1, 3))
    assert Shape(1, 3) in timer.quick(0.25)


@pytest.mark.parametrize("times_in_the_way", [0, 1, 2])
@pytest.mark.parametrize("num_rows", [64, 128, 256])
def test_a_pass_of_many_rows_that_takes_longer_than_many_of_a_few_is_timed_again(num_rows, times_in_the_way):
    """Once: who takes as long then does so."""
    in_the_way, num_runs = times_in_the_way, Counter()

    def run(rows):
        nonlocal in_the_way
        of_pass = sum(len(row.token_ids) for row in rows)
        num_runs[of_pass] += rows[0].context_len == 0
        is_slow = of_pass == num_rows and rows[0].context_len == 0 and in_the_way > 0
        in_the_way -= is_slow
        return 1e-3 * (1.0 + 0.05 * of_pass) * (25.0 if is_slow else 1.0)

    timer = PassTimer(runner_of(), 256, run)
    timer.begin(lambda: 1e9)
    usual = 1e-3 * (1.0 + 0.05 * num_rows)
    assert timer.seconds[Shape(1, num_rows)] == pytest.approx(usual * (25.0 if times_in_the_way == 2 else 1.0))
    assert num_runs[num_rows] == 1 + (times_in_the_way > 0)


def test_passes_of_very_many_rows_are_timed_once(measured):
    assert max(shape.num_rows for shape in measured().quick(1e9)) == 128


def test_kv_that_is_read_has_been_written_to_and_the_null_block_has_not():
    runner = runner_of()
    read = set()

    def run(rows):
        for row in rows:
            read.update(row.blocks)
        return 1e-3

    PassTimer(runner, 256, run).begin(lambda: 1e9)
    for layer in runner.kv_cache.layers:
        blocks = layer.view(NUM_BLOCKS + 1, -1)
        assert not blocks[sorted(read)].isnan().any()
        assert blocks[0].isnan().all()


def test_what_noise_has_turned_round_is_levelled_and_the_rest_stays():
    assert _rising([1.0, 4.0, 2.0, 3.0, 5.0]) == [1.0, 3.0, 3.0, 3.0, 5.0]

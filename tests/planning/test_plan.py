"""Plans: bounds below which drafting does not pay, and where their figures come from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpaged.planning.layouts import layouts
from specpaged.planning.memory_model import MemoryModel
from specpaged.planning.model_memory import ModelMemory
from specpaged.planning.pass_costs import PassCosts, find_kept
from specpaged.planning.plan import Planner, closed_bound
from specpaged.planning.roof_line import RoofLine
from specpaged.planning.speed import Speed
from specpaged.planning.units import human_bytes, parse_bytes
from specpaged.speculation.cost_model import CostModel
from specpaged.speculation.kept_costs import whose
from specpaged.speculation.pass_seconds import PassSeconds

MIB = 1 << 20
CONTEXT = 1024


def make_model(weight_bytes: int, kv_bytes_per_token: int) -> ModelMemory:
    return ModelMemory(
        "", "LlamaForCausalLM", weight_bytes // 2, "float32", "float32", 4096, 1000, weight_bytes, kv_bytes_per_token,
        row_bytes=0, logits_bytes=0, file_bytes=weight_bytes,
    )  # fmt: skip


def flat_costs(draft_share: float, acceptance: float) -> PassCosts:
    """Passes take as long for any number of rows, and nothing else takes any time."""
    passes = [PassSeconds([1, 2], [seconds, seconds]) for seconds in (1.0, draft_share)]
    return PassCosts(CostModel(*passes), "", [acceptance], "")


TARGET, DRAFT = make_model(400 * MIB, 8192), make_model(60 * MIB, 2048)


@pytest.mark.parametrize("kind", ["shared", "window", "half"])
def test_the_closed_form_is_where_drafting_begins_to_pay(kind):
    costs = flat_costs(0.05, 0.7)
    layout = {"shared": {}, "window": {"window": 128}, "half": {"drafting_share": 0.5}}[kind]
    model = MemoryModel(TARGET, DRAFT, **layout)
    planner = Planner(costs, {"plain": MemoryModel(TARGET)}, {"draft": model}, CONTEXT)
    gain = Speed(costs, 0.5 * CONTEXT, layout.get("window")).best(1, 8)
    if kind == "half":  # of which the rounds of all take the draft's passes
        gain = max(planner.ways(8000 * MIB), key=lambda way: way.tokens_per_second).tokens_per_second
        gain /= planner.ways(8000 * MIB)[1].batch
    closed = closed_bound(model, gain, CONTEXT)
    found = planner.bound(2000 * MIB)
    of_sequence = model.of_target(CONTEXT).total
    assert abs(found - closed) < 3 * of_sequence * max(1.0, gain)  # batches are whole


def test_a_draft_whose_kv_costs_more_batch_than_it_brings_speed_never_pays():
    heavy = make_model(60 * MIB, 8192)  # twice the KV of plain decoding
    costs = flat_costs(0.5, 0.7)  # 1.4 times as fast at most
    planner = Planner(costs, {"plain": MemoryModel(TARGET)}, {"draft": MemoryModel(TARGET, heavy)}, CONTEXT)
    assert Speed(costs, 512).best(1, 8) < 2
    assert planner.bound(2000 * MIB) is None
    assert closed_bound(MemoryModel(TARGET, heavy), 1.4, CONTEXT) is None
    windowed = Planner(costs, {"plain": MemoryModel(TARGET)}, {"draft": MemoryModel(TARGET, heavy, window=64)}, CONTEXT)
    assert windowed.bound(2000 * MIB) is not None  # of a window it pays


def test_where_few_sequences_are_to_run_drafting_pays_as_soon_as_they_fit():
    model = MemoryModel(TARGET, DRAFT)
    planner = Planner(flat_costs(0.05, 0.7), {"plain": MemoryModel(TARGET)}, {"draft": model}, CONTEXT, batch=4)
    bound = planner.bound(2000 * MIB)
    assert bound <= model.num_bytes(4, CONTEXT) + MIB
    assert not planner.pays(bound - 2 * MIB)
    assert planner.pays(bound)


@given(
    memory=st.integers(100 * MIB, 4000 * MIB),
    window=st.sampled_from([None, 64, 512]),
    block_size=st.sampled_from([1, 16, 64]),
    share=st.sampled_from([1.0, 0.5]),
)
def test_the_largest_batch_fits_and_one_more_does_not(memory, window, block_size, share):
    model = MemoryModel(TARGET, DRAFT, block_size=block_size, window=window, drafting_share=share)
    batch = model.largest_batch(memory, CONTEXT - 4, 4)
    if batch:
        assert model.num_bytes(batch, CONTEXT - 4, 4) <= memory
    assert model.num_bytes(batch + 1, CONTEXT - 4, 4) > memory


def test_costs_that_an_engine_has_kept_are_found_by_pair_and_threads(tmp_path):
    costs = CostModel(PassSeconds([1, 2], [0.5, 0.6]), PassSeconds([1, 2], [0.1, 0.1]))
    of_pair = whose("cpu", [(m.architecture, m.num_parameters, m.dtype) for m in (TARGET, DRAFT)]) | {"threads": 2}
    (tmp_path / "costs-a.json").write_text(json.dumps(costs.as_dict() | of_pair))
    slower = CostModel(PassSeconds([1, 2], [0.7, 0.8]), PassSeconds([1, 2], [0.1, 0.1]))  # a neighbour was in the way
    (tmp_path / "costs-d.json").write_text(json.dumps(slower.as_dict() | of_pair))
    (tmp_path / "costs-b.json").write_text("{")
    (tmp_path / "costs-c.json").write_text(json.dumps(costs.as_dict()))  # of nobody knows whom
    (tmp_path / "costs-e.json").write_text("[]")
    quicker = CostModel(PassSeconds([1, 2], [0.1, 0.1]), PassSeconds([1, 2], [0.1, 0.1]))
    names = [f"{name.rpartition(' ')[0]} bfloat16" for name in of_pair["models"]]
    for i, other in enumerate(({"version": 1}, {"device": "cuda"}, {"models": names})):  # of nobody who is asked for
        (tmp_path / f"costs-{i}.json").write_text(json.dumps(quicker.as_dict() | of_pair | other))
    found, threads = find_kept(tmp_path, TARGET, DRAFT, "cpu", None)
    assert (found.target.seconds, threads) == ([0.5, 0.6], 2)
    assert find_kept(tmp_path, TARGET, DRAFT, "cuda:0", None)[0].target.seconds == [0.1, 0.1]
    assert find_kept(tmp_path, TARGET, DRAFT, "cpu", 1) is None
    assert find_kept(tmp_path, DRAFT, TARGET, "cpu", None) is None
    arguments = (TARGET, DRAFT, "cpu", None, 0.6)
    assert "with 2 threads" in PassCosts.of(*arguments, None, None, tmp_path).source
    assert PassCosts.of(*arguments, RoofLine(1e9, 1e9), None, tmp_path).source == "assumed: 1 GB/s and 1 GFLOP/s"
    assert PassCosts.of(*arguments, None, None, tmp_path / "none").source.startswith("assumed: 30 GB/s")


def test_what_tune_has_measured_is_taken_for_both(tmp_path):
    path = tmp_path / "tune.json"
    costs = CostModel(PassSeconds([1, 2], [0.5, 0.6]), PassSeconds([1, 2], [0.1, 0.1]))
    path.write_text(json.dumps({"costs": costs.as_dict(), "acceptance_by_position": [0.5, 0.25]}))
    known = PassCosts.of(TARGET, DRAFT, "cpu", None, 0.9, None, path, None)
    assert known.tokens(3) == 1 + 0.5 + 0.125 + 0.03125
    assert known.costs.target.seconds == [0.5, 0.6]
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"--measured=.* cannot be used \(KeyError: 'costs'\); allowed: a tune.json"):
        PassCosts.of(TARGET, DRAFT, "cpu", None, 0.9, None, path, None)


def test_a_window_that_slides_costs_rows_and_saves_reading():
    roof = RoofLine(1e9, 1e13)
    costs = PassCosts(CostModel(*map(roof.pass_seconds, (TARGET, DRAFT))), "", [0.7], "")
    whole, windowed = Speed(costs, 100_000), Speed(costs, 100_000, window=256)
    assert windowed.tokens_per_second(8, 3) > whole.tokens_per_second(8, 3)
    assert Speed(costs, 100, window=256).round_seconds(8, 3) == Speed(costs, 100).round_seconds(8, 3)
    assert whole.tokens_per_second(8, 3, num_drafting=0) == whole.tokens_per_second(8, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("6GiB", 6 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("10kib", 10240), (" 2 MB ", 2_000_000)],
)
def test_bytes_are_read_in_the_usual_units(text, expected):
    assert parse_bytes("--memory", text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "6 giraffes", "0", "1e9"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match=r"--memory=.* must be a number of bytes; allowed: 6GiB"):
        parse_bytes("--memory", text)


def test_bytes_are_said_in_the_largest_unit():
    assert [human_bytes(n) for n in (0, 12, 1536, 6 << 30)] == ["0 B", "12 B", "1.50 KiB", "6.00 GiB"]


def test_narrower_kv_makes_room_for_more():
    narrow = replace(TARGET, kv_bytes_per_token=TARGET.kv_bytes_per_token // 2)
    batches = [MemoryModel(model).largest_batch(1000 * MIB, CONTEXT) for model in (TARGET, narrow)]
    assert batches[1] in (2 * batches[0], 2 * batches[0] + 1)


@pytest.mark.parametrize(
    ("may_narrow", "kv"),
    [
        ((True, True), {"": ("bfloat16", 1024), " of 8-bit KV": ("fp8_e4m3", 512)}),
        ((False, False), {"": ("float32", 2048)}),
    ],
)
def test_kv_is_narrowed_where_nobody_has_said_what_it_is_to_be(may_narrow, kv):
    """The draft's, whatever the target's is: 16 bits, or 8."""
    plain, drafting = layouts(TARGET, DRAFT, {}, CONTEXT, None, *may_narrow)
    targets = {"": ("float32", 8192)} | ({", 16-bit KV": ("bfloat16", 4096)} if may_narrow[0] else {})
    assert {name: (m.target.kv_dtype, m.target.kv_bytes_per_token) for name, m in plain.items()} == {
        f"plain{of_target}": stored for of_target, stored in targets.items()
    }
    shared = {name: model for name, model in drafting.items() if model.shares_blocks}
    assert {name: (m.draft.kv_dtype, m.draft.kv_bytes_per_token) for name, m in shared.items()} == {
        f"draft{of_draft}{of_target}": stored for of_target in targets for of_draft, stored in kv.items()
    }

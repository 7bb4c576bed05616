"""Passes beside their roofs, on made-up figures: what has to be read and multiplied, and what lies above that."""

from dataclasses import replace

import pytest

from benchmarks.roofline import Roof, Work, beside_roofs, work_of
from specpaged.modeling.flat.config import FlatConfig, LayerConfig

# Of a layer: query, key and value 8 x (4 + 2 + 2) = 64, o 4 x 8 = 32, gate, up and down 3 x 8 x 16 = 384.
OF_LAYER, OUTPUT = 480, 10 * 8
CONFIG = FlatConfig(
    architecture="Toy", layers=(LayerConfig(None, None),) * 3, vocab_size=10, hidden_size=8, intermediate_size=16,
    num_heads=2, num_kv_heads=1, head_dim=2, norm_eps=1e-6, tied=False, qk_norm=True,
)  # fmt: skip


def test_a_matrix_is_read_once_and_multiplied_by_every_row():
    work = work_of(CONFIG, 99, 4, [0], [1]), work_of(CONFIG, 99, 4, [0, 0, 0], [1, 1, 1])
    assert work[0].weight_bytes == work[1].weight_bytes == 99
    of_attention = 3 * 4 * 2 * 2
    assert work[0].flops == 2 * (3 * OF_LAYER + OUTPUT) + of_attention
    assert work[1].flops == 3 * work[0].flops


def test_a_tied_output_layer_is_multiplied_as_any_other():
    assert work_of(replace(CONFIG, tied=True), 99, 4, [5], [2]) == work_of(CONFIG, 99, 4, [5], [2])


def test_a_sequences_kv_is_read_once_for_all_of_its_rows():
    """Contexts 5 and 0, 2 and 3 rows: 7 and 3 tokens' KV; rows that read 6, 7, 1, 2 and 3 of them."""
    work = work_of(CONFIG, 99, 4, [5, 0], [2, 3])
    assert work.kv_bytes == 3 * 4 * (2 * 1 * 2) * (7 + 3)
    assert work.flops == 5 * 2 * (3 * OF_LAYER + OUTPUT) + 3 * (4 * 2 * 2) * (6 + 7 + 1 + 2 + 3)
    assert work.num_bytes == 99 + work.kv_bytes


def test_a_window_bounds_what_a_row_reads():
    """Of two rows behind 9 tokens a window of 4 reads positions 6 to 9 and 7 to 10: five tokens, in one layer."""
    layers = (LayerConfig(4, None), *CONFIG.layers[1:])
    windowed, whole = (work_of(config, 99, 4, [9], [2]) for config in (replace(CONFIG, layers=layers), CONFIG))
    assert whole.kv_bytes - windowed.kv_bytes == 4 * 4 * (11 - 5)
    assert whole.flops - windowed.flops == 4 * 2 * 2 * ((10 - 4) + (11 - 4))


@pytest.mark.parametrize(("flops", "roof", "over"), [(4_000_000, "bytes", 1.5), (12_000_000, "flops", 1.25)])
def test_a_pass_is_held_against_the_larger_of_its_two_roofs(flops, roof, over):
    """10 MB at 1 GB/s are 10 ms; 4 and 12 Mflop at 1 Gflop/s are 4 and 12 ms. The pass takes 15."""
    found = beside_roofs(Work(6_000_000, 4_000_000, flops), [0.015], [Roof(1e9, 1e9)])
    assert found["roof"] == roof
    assert found["over_roof"] == {"median": over, "min": over, "max": over}
    assert (found["ms"], found["ms_of_bytes"], found["ms_of_flops"]) == (15, 10, flops / 1e6)
    assert (found["megabytes"], found["megaflops"]) == (10, flops / 1e6)


def test_a_pass_is_held_against_what_the_machine_did_beside_it():
    """A machine that is half as fast in the second of three turns, with pass and loops alike."""
    roofs = [Roof(1e9, 1e12), Roof(0.5e9, 1e12), Roof(1e9, 1e12)]
    found = beside_roofs(Work(10_000_000, 0, 1), [0.012, 0.026, 0.011], roofs)
    assert found["over_roof"] == {"median": 1.2, "min": 1.1, "max": 1.3}
    assert found["ms"] == 12

"""From counts to laws: what is held out is predicted by the others alone."""

import math

import numpy as np
import pytest

from specpaged.studies.scaling import fits
from specpaged.studies.scaling.counts import MOST_DRAFTS, Counts
from specpaged.studies.scaling.drafts import DraftPoint

SIZES = {"a": 2**15, "b": 2**16, "c": 2**17, "d": 2**18}
TOKENS = (2**16, 2**17, 2**18, 2**19)


def counts_of(size, tokens, bonus=0.0):
    """Counts of a draft whose rounds follow a known law, one output exactly as another."""
    known = 0.1 * (math.log2(SIZES[size]) + (0 if tokens is None else math.log2(tokens)) - 29) + bonus
    rounds = np.full((MOST_DRAFTS, 6), 10_000)
    return Counts(DraftPoint(size, size, SIZES[size], tokens), rounds, (rounds * known).round().astype(int))


def grid(bonus=0.0):
    return [counts_of(size, tokens, bonus if size == "d" else 0.0) for size in SIZES for tokens in TOKENS]


def test_roles_hold_out_one_size_and_the_last_checkpoint():
    roles = fits.roles(grid(), "d")
    assert roles == [*["fit", "fit", "fit", "training"] * 3, "size", "size", "size", "both"]


def test_what_is_held_out_is_predicted_by_the_others_alone():
    rows, errors = fits.predictions(grid(), "d", 5)
    assert max(abs(row["error"]) for row in rows) < 0.05
    assert errors["both"]["size"]["mean_error"] < 0.05
    # Other values of what is held out change what is measured, and nothing of what is predicted.
    others, errors = fits.predictions(grid(bonus=0.5), "d", 5)
    assert [row["predicted"] for row in others] == [row["predicted"] for row in rows]
    assert errors["both"]["fit"]["mean_error"] < 0.05
    assert errors["both"]["size"]["mean_error"] > 20
    assert errors["both"]["size"]["within"] == 0


def test_laws_are_of_training_of_size_and_of_both():
    laws = {law["law"]: law for law in fits.laws_of_acceptance(grid(), 5)}
    assert laws["training, a"]["coefficients"]["tokens"][0] == pytest.approx(0.1, abs=1e-3)
    assert laws["size, 65536 tokens"]["coefficients"]["parameters"][0] == pytest.approx(0.1, abs=1e-3)
    assert laws["both"]["r_squared"] == pytest.approx(1, abs=1e-4)
    assert len(laws) == 4 + 4 + 2


def test_drafts_of_unknown_training_have_a_law_of_size_alone():
    counts = [counts_of(size, None) for size in SIZES]
    assert [law["law"] for law in fits.laws_of_acceptance(counts, 5)] == ["size"]
    rows, errors = fits.predictions(counts, "d", 5)
    assert [row["role"] for row in rows] == ["fit", "fit", "fit", "size"]
    assert list(errors) == ["size"]


def test_optima_move_to_smaller_drafts_where_these_cost_more():
    def best(ms_per_million):
        rounds = [
            {
                "B": 8,
                "parameters": n,
                "seconds": [1e-3 * (1 + 0.1 * k + k * ms_per_million * n / 1e6) for k in range(9)],
            }
            for n in SIZES.values()
        ]
        return fits.optima(grid(), rounds)[0]

    assert best(8.0)["parameters"][0] < best(1.0)["parameters"][0]
    assert best(1.0)["plain_ms"] == pytest.approx(1)


def test_speed_and_acceptance_by_batch_size_are_laws_of_their_own():
    rows = [
        {
            "B": b,
            "tokens_per_round": 2.5,
            "draft_speed": {"median": 500 + 100 * n},
            "plain_speed": {"median": 400 + 120 * n},
        }
        for n, b in enumerate((1, 2, 4, 8))
    ]
    laws = fits.laws_of_batch(rows)
    slopes = [law["coefficients"]["B"][0] for law in laws]
    assert slopes == pytest.approx([0, 100, 120])
    assert fits.laws_of_batch(rows[:2]) == []

"""A run's loss and acceptance over its steps, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specpaged.training.heads.acceptance import Acceptance


def draw_curve(curve: list[dict[str, Any]], lookup: Acceptance, title: str, path: Path) -> str:
    """Write a PNG of the points that a Trainer took. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    losses = [(point["step"], point["loss"]) for point in curve if point["loss"] is not None]
    left.plot(*zip(*losses, strict=True) if losses else ((), ()), marker="o", color="black")
    left.set_ylabel("loss, mean since the point before")
    steps = [point["step"] for point in curve]
    measured = [Acceptance(**point["acceptance"]) for point in curve]
    middle.plot(steps, [acceptance.mean_length for acceptance in measured], marker="o", color="black", label="heads")
    middle.axhline(lookup.mean_length, color="grey", linestyle="--", label="prompt lookup")
    middle.set_ylabel("mean acceptance length, held-out text")
    positions = len(lookup.accepted)
    for position in range(positions):
        shares = [acceptance.by_position[position] for acceptance in measured]
        right.plot(steps, shares, color=f"C{position}", label=f"position {position + 1}")
        right.axhline(lookup.by_position[position], color=f"C{position}", linestyle="--", linewidth=0.8)
    right.set_ylim(0, 1)
    right.set_ylabel("accepted up to there (dashed: prompt lookup)")
    for axis in (left, middle, right):
        axis.set_xlabel("step")
    middle.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"picture: {path.name}"

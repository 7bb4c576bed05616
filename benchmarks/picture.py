"""Tokens per second by B, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], path: Path) -> str:
    """Write a PNG: bars are medians, whiskers minimum and maximum. Returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    throughput = results["throughput"]
    names = list(dict.fromkeys(name for result in throughput.values() for name in result["contenders"]))
    colors = plt.get_cmap("tab10").colors
    width = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    for group, result in enumerate(throughput.values()):
        present = [name for name in names if name in result["contenders"]]
        for offset, name in enumerate(present):
            speed = result["contenders"][name]["tokens_per_second"]
            axes.bar(
                group + (offset - (len(present) - 1) / 2) * width,
                speed["median"],
                width,
                yerr=[[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]],
                capsize=2,
                color=colors[names.index(name) % len(colors)],
            )
    legend = [Patch(color=colors[i % len(colors)], label=name) for i, name in enumerate(names)]
    axes.set_xticks(range(len(throughput)), [f"B = {batch_size}" for batch_size in throughput])
    axes.set_yscale("log")
    axes.set_ylabel("tokens/s (log)")
    lengths = sorted({result["output_len"] for result in throughput.values()})
    of = f"{results['threads']} thread(s), fp32, greedy, {', '.join(map(str, lengths))} tokens"
    axes.set_title(f"{results['cpu']}, {of}", fontsize=10)
    figure.legend(handles=legend, fontsize=8, ncols=5, loc="outside lower center")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"picture: {path.name}"

"""What rows come to: a table, and whether all is as it is to be."""

from __future__ import annotations

from typing import Any


def is_as_wanted(row: dict[str, Any]) -> bool:
    """No draft differs but at near-ties, and what the row is to show has happened."""
    compared = ("vLLM", "vLLM, chunks as they are", "ours", "ours and vLLM")
    agree = all(row[name]["faults"] == 0 < row[name]["steps"] for name in compared)
    happened = all(row["cached_tokens"].values()) and row["behind_rejected"] > 0
    return agree and happened and (row["behind_accepted"] > 0 or row["variant"] != "accepted at times")


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line for each variant."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="EAGLE-3 drafts: ours, vLLM's own CPU runner's, and a dense reference's",
        caption="proposals that are equal / compared (near-ties); chunks as they are: vLLM's, with the reference that "
        "pairs as it does, and those unlike the reference that does not",
    )
    names = ("variant", "spelling", "target", "ours = vLLM", "vLLM = ref.", "ours = ref.", "chunks as they are")
    for name in (*names, "unlike", "cached", "accepted", "rejected"):
        table.add_column(name, justify="left" if name in names[:3] else "right")
    for row in rows:
        compared = ("ours and vLLM", "vLLM", "ours", "vLLM, chunks as they are")
        unlike = row["unlike without the fault"]
        table.add_row(
            row["variant"], row["spelling"], row["target"],
            *(f"{row[name]['equal']}/{row[name]['steps']} ({row[name]['near_ties']})" for name in compared),
            str(unlike["steps"] - unlike["equal"]), str(row["cached_tokens"]["vllm"]),
            str(row["behind_accepted"]), str(row["behind_rejected"]),
        )  # fmt: skip
    Console(width=150).print(table)

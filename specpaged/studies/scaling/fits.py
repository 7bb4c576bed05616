"""From counts and clocked rounds to laws, predictions of what was held out, and optima. numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specpaged.studies.result import Row
from specpaged.studies.scaling.counts import MOST_DRAFTS, Counts
from specpaged.studies.scaling.drafts import DraftPoint, final
from specpaged.studies.scaling.laws import Law, Point, fit, least_points
from specpaged.studies.scaling.optimum import RoundLine, Speeds

FIT, SIZE, TRAINING, BOTH = "fit", "size", "training", "both"  # what a draft is to the law: fitted to, or held out by


def has_training(counts: Sequence[Counts]) -> bool:
    """Whether training is a variable: known of all drafts, and of at least three amounts."""
    tokens = {of.draft.tokens for of in counts}
    return None not in tokens and len(tokens) >= 3


def roles(counts: Sequence[Counts], held_out_size: str | None) -> list[str]:
    """Of each draft: held out are one size, and where training is a variable its last amount."""
    last = max(of.draft.tokens or 0 for of in counts) if has_training(counts) else None
    of_held = {(False, False): FIT, (True, False): SIZE, (False, True): TRAINING, (True, True): BOTH}
    return [of_held[of.draft.size == held_out_size, of.draft.tokens == last and last is not None] for of in counts]


def point(draft: DraftPoint) -> Point:
    """A draft's variables by name."""
    return {"parameters": draft.parameters} | ({} if draft.tokens is None else {"tokens": draft.tokens})


def fit_counts(counts: Sequence[Counts], terms: Sequence[str], num_drafts: int) -> Law:
    """Tokens of a round at one K, by a law of these terms."""
    replicates = np.stack([of.replicates(num_drafts) for of in counts], 1)
    values = [of.tokens(num_drafts) for of in counts]
    return fit([point(of.draft) for of in counts], values, terms, replicates)


def laws_of_acceptance(counts: Sequence[Counts], num_drafts: int) -> list[Row]:
    """Every law that the drafts allow: of training for each size, of size for each amount of training, and of both."""
    rows = []
    groups: list[tuple[str, list[Counts], tuple[str, ...]]] = []
    if has_training(counts):
        for size in dict.fromkeys(of.draft.size for of in counts):
            groups.append((f"training, {size}", [of for of in counts if of.draft.size == size], ("tokens",)))
        for tokens in sorted({of.draft.tokens or 0 for of in counts}):
            of_tokens = [of for of in counts if of.draft.tokens == tokens]
            groups.append((f"size, {tokens} tokens", of_tokens, ("parameters",)))
        groups.append(("both", list(counts), ("parameters", "tokens")))
        groups.append(("both and their product", list(counts), ("parameters", "tokens", "parameters*tokens")))
    else:
        groups.append(("size", _final(counts), ("parameters",)))
    for name, group, terms in groups:
        if len({of.draft.name for of in group}) >= least_points(terms):
            rows.append({"law": name, **fit_counts(group, terms, num_drafts).as_dict()})
    return rows


def predictions(counts: Sequence[Counts], held_out_size: str | None, num_drafts: int) -> tuple[list[Row], Row]:
    """A row for each draft, with what a law fitted without those held out says of it; and what errors it makes."""
    of_role = roles(counts, held_out_size)
    training = has_training(counts)
    if not training:
        kept_finals = {of.draft for of in _final(counts)}
        pairs = [(of, role) for of, role in zip(counts, of_role, strict=True) if of.draft in kept_finals]
        counts, of_role = [of for of, _ in pairs], [role for _, role in pairs]
    kept = [of for of, role in zip(counts, of_role, strict=True) if role == FIT]
    forms = {"size": ("parameters",)}
    if training:
        forms = {
            "both": ("parameters", "tokens"),
            "both and their product": ("parameters", "tokens", "parameters*tokens"),
        }
    laws = {name: fit_counts(kept, terms, num_drafts) for name, terms in forms.items()}
    law = next(iter(laws.values()))
    rows = []
    for of, role in zip(counts, of_role, strict=True):
        low, high = np.percentile(of.replicates(num_drafts), [2.5, 97.5])
        predicted, value = law.predict(point(of.draft)), of.tokens(num_drafts)
        rows.append(
            of.draft.as_dict()
            | {
                "role": role,
                "tokens_per_round": round(value, 4),
                "low": round(float(low), 4),
                "high": round(float(high), 4),
                "predicted": round(predicted.value, 4),
                "predicted_low": round(predicted.low, 4),
                "predicted_high": round(predicted.high, 4),
                "error": round(100 * (predicted.value / value - 1), 2),
            }
        )
    return rows, {name: _errors(law, counts, of_role, num_drafts) for name, law in laws.items()}


def _errors(law: Law, counts: Sequence[Counts], of_role: Sequence[str], num_drafts: int) -> Row:
    """A law's own figures, and by role the mean and largest relative error in percent, and how many lie within."""
    figures: Row = law.as_dict()
    for role in dict.fromkeys(of_role):
        errors, inside = [], 0
        for of, own in zip(counts, of_role, strict=True):
            if own == role:
                predicted, value = law.predict(point(of.draft)), of.tokens(num_drafts)
                errors.append(100 * abs(predicted.value / value - 1))
                inside += predicted.low <= value <= predicted.high
        mean, most = round(float(np.mean(errors)), 2), round(max(errors), 2)
        figures[role] = {"mean_error": mean, "largest_error": most, "within": inside, "drafts": len(errors)}
    return figures


def laws_of_batch(rows: Sequence[Row]) -> list[Row]:
    """Of one draft at one K: tokens of a round, and tokens a second, by batch size."""
    if len(rows) < least_points(("B",)):
        return []
    points = [{"B": row["B"]} for row in rows]
    of_name = {
        "tokens of a round by B": [row["tokens_per_round"] for row in rows],
        "tokens a second by B, with the draft": [row["draft_speed"]["median"] for row in rows],
        "tokens a second by B, plain": [row["plain_speed"]["median"] for row in rows],
    }
    return [{"law": name, **fit(points, values, ("B",)).as_dict()} for name, values in of_name.items()]


def optima(counts: Sequence[Counts], rounds: Sequence[Row]) -> list[Row]:
    """At each clocked batch size the size and K that laws and costs promise most of, and the promise at every size.

    Laws are of size, of the drafts that were trained longest.
    """
    finals = _final(counts)
    laws = {k: fit_counts(finals, ("parameters",), k) for k in range(1, MOST_DRAFTS + 1)}
    found = []
    for batch_size in sorted({row["B"] for row in rounds}):
        of_batch = [row for row in rounds if row["B"] == batch_size]
        sizes = [row["parameters"] for row in of_batch]
        lines = {k: RoundLine.fit(sizes, [row["seconds"][k] for row in of_batch]) for k in laws}
        plain = float(np.median([row["seconds"][0] for row in of_batch]))
        speeds = Speeds(laws, lines, plain, sizes)
        best = speeds.optimum(batch_size)
        shown = slice(None, None, 4)
        curve = zip(speeds.sizes[shown].tolist(), speeds.envelope()[shown].tolist(), strict=True)
        found.append(
            best.as_dict()
            | {
                "plain_ms": round(1e3 * plain, 4),
                "rounds": {
                    str(k): {
                        "base_ms": round(1e3 * line.base, 4),
                        "ms_per_million": round(1e9 * line.slope, 4),
                        "r_squared": round(line.r_squared, 4),
                    }
                    for k, line in lines.items()
                },
                "curve": [[round(size), round(speed, 4)] for size, speed in curve],
            }
        )
    return found


def _final(counts: Iterable[Counts]) -> list[Counts]:
    by_draft = {of.draft: of for of in counts}
    return [by_draft[draft] for draft in final(list(by_draft))]

"""A 5-gram model with interpolated Kneser-Ney smoothing, counted on the same training tokens as the target.

Every order uses its own single discount D = n1 / (n1 + 2 n2) (Ney, Essen and Kneser 1994); orders below the
highest use continuation counts, the number of distinct tokens seen before the n-gram.
"""

import numpy as np

ORDER = 5


def _keys(stream: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """uint64 [len - order + 1]: the n-gram starting at each position, as a number in base `vocab_size`."""
    keys = np.zeros(len(stream) - order + 1, np.uint64)
    for i in range(order):
        keys = keys * np.uint64(vocab_size) + stream[i : len(stream) - order + 1 + i].astype(np.uint64)
    return keys


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values[i] where keys[i] == wanted, zero where absent; `keys` sorted."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)


def kneser_ney_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int, order: int = ORDER) -> float:
    """Mean nat per held-out token from position `order - 1` on; counts come from `train` only."""
    if vocab_size**order >= 2**64:
        raise ValueError(f"vocab_size {vocab_size} to the power {order} does not fit 64 bits")
    base = np.uint64(vocab_size)
    probability = np.full(len(held_out) - order + 1, 1 / vocab_size)
    for n in range(1, order + 1):
        if n == order:
            keys, counts = np.unique(_keys(train, n, vocab_size), return_counts=True)
        else:  # distinct left neighbours of each n-gram: drop the leading token of the distinct (n + 1)-grams
            longer = np.unique(_keys(train, n + 1, vocab_size))
            keys, counts = np.unique(longer % base ** np.uint64(n), return_counts=True)
        ones, twos = (counts == 1).sum(), (counts == 2).sum()
        discount = ones / max(1, ones + 2 * twos)
        contexts, first = np.unique(keys // base, return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(keys)))
        wanted = _keys(held_out[order - n :], n, vocab_size)
        total = _lookup(contexts, totals, wanted // base)
        count = _lookup(keys, counts, wanted)
        seen = total > 0
        backed_off = discount * _lookup(contexts, kinds, wanted // base) * probability
        interpolated = (np.maximum(count - discount, 0) + backed_off) / np.maximum(total, 1)
        probability = np.where(seen, interpolated, probability)
    return float(-np.log(probability).mean())

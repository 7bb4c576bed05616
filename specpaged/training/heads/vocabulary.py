"""The draft vocabulary of EAGLE-3: the tokens that the target writes most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specpaged.training.heads.continuations import Continuation


def draft_vocabulary(continuations: Sequence[Continuation], vocab_size: int, size: int) -> Tensor:
    """[size] int64, ascending: the token ids that occur most in continuations; of equals the lowest ids."""
    counts = np.zeros(vocab_size, np.int64)
    for continuation in continuations:
        np.add.at(counts, continuation.token_ids, 1)
    most = np.lexsort((np.arange(vocab_size), -counts))[:size]
    return torch.from_numpy(np.sort(most))

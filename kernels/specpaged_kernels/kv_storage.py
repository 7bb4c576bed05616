"""What keys and values become when they are stored in pages of another dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a pool of this dtype has them: to nearest, ties to even. What is larger than the largest that
    8 bits have becomes that: a drafter whose keys are large is to be coarse, not blind.
    """
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(dtype)

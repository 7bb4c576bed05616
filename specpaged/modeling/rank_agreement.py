"""Ranks that capture passes with gathers in them: the same passes, and either all of them or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor


class RankAgreement:
    """What ranks tell each other before and behind the capture of a pass that gathers.

    A gather is of as many rows on every rank, and a graph has its bucket's rows, an eager pass those of its batch. So
    where one rank could not capture a pass, none replays it:

        rank 0   the bucket is (8, 4, 4)   -> same?   captures          -> all have it?   no: eager
        rank 1   the bucket is (8, 4, 4)   -> same?   has no memory     -> all have it?   no: eager

    `gather` is [n] int64 of each rank -> [ranks * n] of all, on the host; every rank has to be asked as often.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]):
        self._gather = gather

    def check_same(self, bucket: object) -> None:
        """RuntimeError, on every rank, unless all of them are about this bucket: their batches are not the same."""
        digest = hashlib.blake2b(repr(bucket).encode(), digest_size=6).digest()
        fingerprint = int.from_bytes(digest, "little")
        of_ranks = self._gather(torch.tensor([fingerprint])).tolist()
        if any(other != fingerprint for other in of_ranks):
            raise RankError(f"ranks are to capture different passes; this one's is of {bucket}")

    def all_have(self, captured: bool) -> bool:
        """Whether every rank has captured what it was about."""
        return bool(self._gather(torch.tensor([int(captured)])).all())


class RankError(RuntimeError):
    """Ranks have gone apart: nothing that they gather means anything any more."""

"""The shape of one model's KV, as said on the command line."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specpaged.config import DTYPES


@dataclass(frozen=True)
class KVShape:
    """The KV of one model, as far as it says what a token takes."""

    num_layers: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> KVShape:
        """The shape that 'L,Hkv,D' or 'L,Hkv,D,dtype' names. ValueError for any other text."""
        numbers, dtype = text.split(","), "float32"
        if len(numbers) == 4:
            dtype = numbers.pop()
        if len(numbers) != 3 or not all(n.isdecimal() and int(n) > 0 for n in numbers) or dtype not in DTYPES[1:]:
            raise ValueError(
                f"--kv-shape={text!r} must be L,Hkv,D or L,Hkv,D,dtype, as in 8,4,32,float32; dtypes: "
                f"{', '.join(DTYPES[1:])}"
            )
        return cls(*map(int, numbers), dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"L {self.num_layers}, Hkv {self.num_kv_heads}, D {self.head_dim}, {self.dtype}"

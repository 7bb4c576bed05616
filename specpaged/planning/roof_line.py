"""What passes cost on a machine of which two figures are known."""

from __future__ import annotations

from dataclasses import dataclass

from specpaged.planning.model_memory import ModelMemory
from specpaged.speculation.pass_seconds import PassSeconds

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class RoofLine:
    """Bytes that a machine reads in a second, and floating-point operations that it makes."""

    bytes_per_second: float
    flops: float

    @classmethod
    def assumed(cls, device: str) -> RoofLine:
        """One core or two of a server's CPU with AVX2, or a GPU such as an H100 at half of what it is sold for."""
        return cls(1.7e12, 4e14) if device.startswith("cuda") else cls(3e10, 2e11)

    def pass_seconds(self, model: ModelMemory) -> PassSeconds:
        """Of a pass that reads all weights once, and multiplies each row with all of them."""
        seconds = [
            max(model.weight_bytes / self.bytes_per_second, 2.0 * num_rows * model.num_parameters / self.flops)
            for num_rows in _ROWS
        ]
        return PassSeconds(_ROWS, seconds, per_kv_token=model.kv_bytes_per_token / self.bytes_per_second)

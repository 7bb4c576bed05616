"""One run on a machine with a GPU: kernels against references, bandwidth, rollback, exactness.

From the working tree alone: an installed copy of the kernels is not needed.
"""

import sys
from pathlib import Path

_KERNELS = str(Path(__file__).parents[2] / "kernels")
if _KERNELS not in sys.path:
    sys.path.insert(0, _KERNELS)

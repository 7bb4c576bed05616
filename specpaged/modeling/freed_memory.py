"""Memory that has been freed, and that the C library keeps."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Hand it to the operating system, where the C library has a call for that (glibc); elsewhere nothing happens.

    Loading a checkpoint frees as much as the weights that it converts. Of the embedded pair that is 15 MB in small
    pieces, which would stay resident beside weights and KV for as long as the process lives, and no plan counts them.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))

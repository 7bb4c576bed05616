"""What has been freed is the operating system's again."""

import ctypes
import os
import subprocess
import sys

import pytest

from specpaged import LLM
from specpaged.modeling import freed_memory, pair

FREES = """
import ctypes, runpy, sys
from pathlib import Path

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(40 << 10) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 40 << 10)
before = resident_bytes()
for block in blocks:
    libc.free(block)
if sys.argv[2] == "gives back":
    runpy.run_path(sys.argv[1])["give_back"]()
sys.exit(resident_bytes() > before - (40 << 20))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
@pytest.mark.parametrize(("does", "keeps"), [("gives back", False), ("nothing", True)])
def test_what_the_c_library_would_keep_is_given_back(does, keeps):
    """In a process whose C library gives nothing back by itself."""
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
    command = [sys.executable, "-c", FREES, freed_memory.__file__, does]
    assert subprocess.run(command, env=environment, check=False).returncode == keeps


def test_where_there_is_no_call_for_it_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    freed_memory.give_back()


def test_an_engines_models_are_loaded_and_what_that_has_freed_is_given_back(toy_pair, monkeypatch):
    given = []
    monkeypatch.setattr(pair.freed_memory, "give_back", lambda: given.append(0))
    LLM(toy_pair.target, speculative_config={"model": toy_pair.draft, "num_speculative_tokens": 2}, max_model_len=40)
    assert given

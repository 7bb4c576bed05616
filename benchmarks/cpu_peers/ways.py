"""In which ways each library takes part: where it has two, and neither is the quickest everywhere, both do.

**OpenVINO GenAI** keeps float32 weights as it is used most, and reads twice the bytes of the checkpoint's float16 for
them: where they do not fit into the caches it is up to twice as quick at B = 1 with weights converted to float16,
which hold the same numbers. At B = 8 and 32 float32 is quicker. KV is u8, its default, in both: with f16 or f32 it is
not quicker by more than runs differ.

**llama.cpp** built for AVX-512 multiplies float16 in steps of 64, and one by one what is left: all of a head of 32, as
the embedded target has. Built for AVX2 it takes steps of 32, and decodes such a model twice as fast on the same CPU.
Heads of 64 and more have no such rest. Both builds with llama.cpp's defaults, float16 KV and flash attention.

**Ours** keeps KV in float32, as its arithmetic is, and has the outputs of transformers in float32. With float16 KV
it keeps as many bits as llama.cpp, and twice those of OpenVINO: exact as ever, within that configuration.

Each is loaded for the B at hand, with as many threads as ours. Tokens are chosen by the library where it chooses for a
whole batch: by OpenVINO's own sampler, and of llama.cpp's logits by one argmax over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """A library, and what is not its default."""

    library: str  # one of worker.MODULES
    weights: str = ""  # OpenVINO's format of them
    kv: str = "auto"  # what ours stores keys and values as
    build: str = ""  # a folder of the environment that has another build of the package


OURS = "ours"
WAYS = {
    OURS: Way("ours"),
    f"{OURS}, fp16 KV": Way("ours", kv="float16"),
    "OpenVINO GenAI": Way("OpenVINO GenAI", weights="fp32"),
    "OpenVINO GenAI, fp16 weights": Way("OpenVINO GenAI", weights="fp16"),
    "llama.cpp": Way("llama.cpp"),
    "llama.cpp, AVX2": Way("llama.cpp", build="avx2"),
}

"""Everything that can be launched, compiled ahead of time: `python -m specpaged_kernels.variants`.

No GPU is needed. Registers, stack (which spilling needs) and shared memory are those of ptxas.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specpaged_kernels import (
    accept,
    decoding_round,
    limits,
    linear,
    lm_head,
    pack,
    paged_attention,
    realign,
    rejection,
    res_attention,
    rms_norm,
    select_drafts,
    store_kv,
)
from specpaged_kernels.jit import OPTIONS, Variant

OPERATIONS = (paged_attention, store_kv, pack, accept, rejection, linear, lm_head, rms_norm, res_attention, realign,
              decoding_round, select_drafts)  # fmt: skip
ARCHS = (80, 90)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def all_variants() -> Iterator[Variant]:
    """The variants of every operation."""
    for operation in OPERATIONS:
        yield from operation.variants()


def name(variant: Variant) -> str:
    """The operation, its kernel, dtypes and constants."""
    constants = " ".join(f"{key}={value}" for key, value in variant.constants.items() if key not in OPTIONS)
    return f"{kind(variant)} {constants}"


def kind(variant: Variant) -> str:
    """The operation, its kernel and dtypes."""
    function = variant.kernel.fn
    dtypes = sorted({dtype for dtype in variant.types.values() if dtype[1:] in ("fp16", "bf16", "fp32")})
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__} {' '.join(dtypes)}"


def archs_of(kind: str, archs: Sequence[int]) -> list[int]:
    """Where some variants of a kind are compiled: of half precision, which compiles alike, float16 for the first
    architecture and bfloat16 for the last; all else for each.
    """
    of_halves = {"*fp16": archs[0], "*bf16": archs[-1]}
    return sorted({of_halves[word] for word in kind.split() if word in of_halves}) or list(archs)


def some_variants(archs: Sequence[int]) -> Iterator[tuple[Variant, int]]:
    """One of each kind for its architectures (`archs_of`): the smallest for the first, the largest for the last."""
    kinds: dict[str, list[Variant]] = {}
    for variant in all_variants():
        kinds.setdefault(kind(variant), []).append(variant)
    for of_kind, variants in kinds.items():
        yield from ((variants[0 if arch == archs[0] else -1], arch) for arch in archs_of(of_kind, archs))


@dataclass(frozen=True)
class Compiled:
    """What a variant takes of one kind of device."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile for sm_`arch`, with what `jit.kernel` lets Triton assume of the arguments."""
    kernel = variant.kernel
    options = {key: value for key, value in variant.constants.items() if key in OPTIONS}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[i,] = variant.constants[parameter.name]
            continue
        signature[parameter.name] = variant.types.get(parameter.name, "i32")
        if not parameter.do_not_specialize:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, _RESOURCES.search(usage).groups())
    return Compiled(name(variant), arch, registers, stack, compiled.metadata.shared)


def _compile_named(named: tuple[str, int]) -> Compiled:
    """In another process, to which a kernel cannot be sent."""
    wanted, arch = named
    return compile_variant(next(variant for variant in all_variants() if name(variant) == wanted), arch)


def compile_all(variants: Iterable[tuple[Variant, int]], jobs: int) -> Iterator[Compiled]:
    """Each variant for its architecture, in `jobs` processes, as they are ready; for one job, in this one."""
    if jobs == 1:
        yield from (compile_variant(variant, arch) for variant, arch in variants)
        return
    named = [(name(variant), arch) for variant, arch in variants]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_compile_named, named)


def main() -> None:
    """Print a table, and end in one line of JSON with --json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", type=int, action="append", help=f"sm_ARCH; default: {', '.join(map(str, ARCHS))}")
    parser.add_argument("--only", default="", help="variants whose name holds this")
    parser.add_argument("--some", action="store_true", help="one variant of each kernel and dtype")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", action="store_true", help="one line instead of the table")
    arguments = parser.parse_args()
    if limits.interpreted():
        parser.error("TRITON_INTERPRET=1 is set; allowed: unset, as the interpreter compiles nothing")
    archs = arguments.arch or ARCHS
    chosen = some_variants(archs) if arguments.some else itertools.product(all_variants(), archs)
    variants = [(variant, arch) for variant, arch in chosen if arguments.only in name(variant)]
    progress = tqdm(compile_all(variants, arguments.jobs), total=len(variants), unit="variant")
    compiled = sorted(progress, key=lambda entry: (entry.name, entry.arch))
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in compiled]))
        return
    print(f"{'sm':>3} {'registers':>9} {'stack':>6} {'shared':>7}  variant")
    for entry in compiled:
        print(f"{entry.arch:>3} {entry.registers:>9} {entry.stack_bytes:>6} {entry.shared_bytes:>7}  {entry.name}")


if __name__ == "__main__":
    main()

"""Ahead-of-time compilation: the table of variants builds, fits into registers, and is all that the engine launches.

One variant of each kernel and dtype is compiled; with SPECPAGED_ALL_VARIANTS set (`make variants`), all are.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from specpaged import LLM, SamplingParams
from specpaged_kernels import limits
from specpaged_kernels.accept import Written, accept, sample
from specpaged_kernels.decoding_round import Rows, noise_keys, plan_round, settle_round, store_drafts
from specpaged_kernels.jit import TYPES
from specpaged_kernels.linear import linear
from specpaged_kernels.lm_head import lm_head
from specpaged_kernels.pack import pack
from specpaged_kernels.paged_attention import choose_tiles, paged_attention, work_list_ref
from specpaged_kernels.realign import realign
from specpaged_kernels.rejection import reject
from specpaged_kernels.res_attention import res_attention
from specpaged_kernels.rms_norm import rms_norm
from specpaged_kernels.select_drafts import select_drafts
from specpaged_kernels.store_kv import store_kv
from specpaged_kernels.variants import ARCHS, all_variants, archs_of, kind, name
from tests import toys
from tests.kernels.world import make_world

KERNELS = Path(__file__).parents[2] / "kernels"
ALIGNED = 16
ALL = "SPECPAGED_ALL_VARIANTS" in os.environ


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Variants, in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(KERNELS), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    few = () if ALL else ("--some", "--jobs", "1")  # another process would take longer to start than it spares
    command = [sys.executable, "-m", "specpaged_kernels.variants", "--json", *few]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_kernel_compiles_for_every_architecture(compiled):
    table = {(name(variant), arch): kind(variant) for variant in all_variants() for arch in ARCHS}
    done = [(entry["name"], entry["arch"]) for entry in compiled]
    assert len(set(done)) == len(done)
    assert {(table[of], of[1]) for of in done} == {
        (kind(variant), arch)
        for variant in all_variants()
        for arch in (ARCHS if ALL else archs_of(kind(variant), ARCHS))
    }
    assert not ALL or set(done) == table.keys()


def test_nothing_spills_but_products_in_float32(compiled):
    """Where every number takes a whole register, tiles that are right for half precision may not fit: these are listed
    by the command, and run all the same."""

    def is_float32_product(name: str) -> bool:
        operation = name.partition(".")[0]
        return operation in ("paged_attention", "linear", "lm_head") and not {"*fp16", "*bf16"} & set(name.split())

    others = [entry for entry in compiled if not is_float32_product(entry["name"])]
    assert len(others) > 0.7 * len(compiled)
    # Older compilers than the one that the tiles were chosen with keep a few bytes on the stack.
    allowed = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 40
    assert [entry for entry in others if entry["stack_bytes"] > allowed] == []


def test_shared_memory_fits_the_device(compiled):
    most = {80: 163 * 1024, 90: 227 * 1024}  # of a block: CUDA C++ Programming Guide, compute capabilities
    assert [entry for entry in compiled if entry["shared_bytes"] > most[entry["arch"]]] == []


def key(function, types: dict[str, str], constants: dict) -> tuple:
    return f"{function.__module__}.{function.__name__}", tuple(sorted(types.items())), tuple(sorted(constants.items()))


class Launches:
    """Notes what each launch would be compiled for, and runs it or not."""

    def __init__(self, monkeypatch, execute: bool = True):
        self.keys: set[tuple] = set()
        self.unaligned: set[tuple] = set()
        run = InterpretedFunction.run

        def recording(kernel, *args, grid, warmup, **kwargs):
            self.record(kernel, args, kwargs)
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs) if execute else None

        monkeypatch.setattr(InterpretedFunction, "run", recording)

    def record(self, kernel, args: tuple, constants: dict) -> None:
        types = {}
        not_special = kernel.kwargs.get("do_not_specialize") or []
        for argument, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor):
                types[argument] = f"*{TYPES[value.dtype]}"
            elif isinstance(value, float):
                types[argument] = "fp32"
            address = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if argument not in not_special and address % ALIGNED:
                self.unaligned.add((kernel.fn.__name__, argument))
        self.keys.add(key(kernel.fn, types, constants))


def table_keys() -> set[tuple]:
    return {key(variant.kernel.fn, variant.types, variant.constants) for variant in all_variants()}


@pytest.mark.parametrize("rounds", ["host's", "device's", "device's, selected"])
def test_the_engine_launches_nothing_that_is_not_in_the_table(tmp_path, monkeypatch, rounds):
    """A pair with head_dim 32, as no smaller one is compiled; with speculation, sampling, a prefill and splits."""
    for role, seed in (("target", 0), ("draft", 1)):
        toys.model(seed, head_dim=32, num_hidden_layers=1).save_pretrained(tmp_path / role)
    launches = Launches(monkeypatch)
    llm = LLM(
        str(tmp_path / "target"),
        speculative_config={"model": str(tmp_path / "draft"), "num_speculative_tokens": 2, "numerics": "exact"}
        | ({"num_speculative_tokens": 1, "selection": "tetris"} if "selected" in rounds else {}),
        attention_backend="triton",
        max_model_len=64,
        max_num_seqs=2,
        device_round="device" in rounds,
    )
    params = [SamplingParams(temperature=t, max_tokens=3, seed=1, ignore_eos=True) for t in (0.0, 1.0)]
    llm.generate(toys.prompts(2), params, use_tqdm=False)
    assert launches.keys <= table_keys()
    assert launches.unaligned == set()
    launched = {k[0].rpartition(".")[2] for k in launches.keys}
    assert launched >= {"_attend_kernel", "_merge_kernel", "_store_kernel", "_linear_kernel", "_rms_norm_kernel",
                        "_argmax_kernel", "_sample_kernel"}  # fmt: skip
    of_rounds = {"_pack_kernel", "_plan_kernel", "_store_drafts_kernel", "_noise_keys_kernel", "_settle_kernel"}
    assert launched >= ({"_accept_kernel"} if rounds == "host's" else of_rounds)
    assert ("_select_kernel" in launched) == ("selected" in rounds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_operations_launch_nothing_that_is_not_in_the_table(dtype, monkeypatch):
    """What the toy engine does not: half precision, large and small blocks, biases, residuals, rejection."""
    launches = Launches(monkeypatch, execute=False)
    for head_dim, group, block_size, options in (
        (64, 2, 64, {}), (128, 8, 16, {"softcap": 20.0}), (128, 4, 128, {"sinks": torch.zeros(8)}),
        (256, 2, 128, {"window": 9}), (32, 8, 32, {}),
    ):  # fmt: skip
        if not limits.fits(head_dim, dtype):
            continue
        world = make_world(
            [3, 1], [20, 5], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        tiles = choose_tiles(head_dim, group, dtype)
        items = work_list_ref(world.cu_query_lens, world.context_lens, tiles.tokens(group), tiles.split_len)
        paged_attention(*world.arguments, items, **options)
        new = torch.zeros(4, 2, head_dim, dtype=dtype)
        store_kv(new, new, world.kv_pool, torch.arange(4), world.cu_query_lens[-1:])
        realign(world.kv_pool[None], torch.zeros(1, dtype=torch.int64), *torch.ones(2, 1, dtype=torch.int32))
    for rows, out_features, in_features in ((3, 64, 2048), (3, 4096, 64), (70, 64, 64)):
        x, weight = torch.zeros(rows, in_features, dtype=dtype), torch.zeros(out_features, in_features, dtype=dtype)
        for bias in (None, torch.zeros(out_features, dtype=dtype)):
            linear(x, weight, bias)
            lm_head(x, weight, bias)
    for size in (32, 1024, 2560, 8192):
        x, weight = torch.zeros(2, size, dtype=dtype), torch.zeros(size, dtype=dtype)
        rms_norm(x, weight, 1e-6)
        rms_norm(x, weight, 1e-6, residual=x.clone())
    for head_size in (64, 96, 256, 704):
        x, key_value = torch.zeros(2, 2 * head_size, dtype=dtype), torch.zeros(2, 4 * head_size, dtype=dtype)
        for embedded in (None, x):
            res_attention(x, x, key_value, 2, 1e-6, embedded)
    drafts, cu_rows = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 4, 5], dtype=torch.int32)
    logits, keys, ints = torch.zeros(5, 9000), torch.zeros(5, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    sample(logits)
    sample(logits, keys)
    accept(logits, drafts, cu_rows, keys, Written(ints, ints, torch.zeros(2, 4, dtype=torch.int32), 16))
    for probs in (None, torch.zeros(3, 9000)):
        reject(logits, drafts, cu_rows, probs, torch.zeros(5, dtype=torch.float64), keys, keys)
    table = torch.zeros(2, 4, dtype=torch.int32)
    pack(torch.zeros(2, 64, dtype=torch.int32), ints, ints, ints, table, 16, 8, 4, 4, 8, 1024)
    rows = Rows(torch.zeros(2, 64, dtype=torch.int32), *(ints.clone() for _ in range(5)))
    plan, chances = plan_round(rows, 3), torch.zeros(2, 3)
    store_drafts(rows, torch.zeros(5, dtype=torch.int64), cu_rows, 1)
    store_drafts(rows, torch.zeros(5, dtype=torch.int64), cu_rows, 1, torch.zeros(5), chances)
    select_drafts(plan, chances, 1)
    noise_keys(rows, torch.zeros(2, 2, dtype=torch.int32), ints, ints, cu_rows, 5, 0)
    for end_ids in (None, ints):
        settle_round(
            rows, torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool), cu_rows, ints,
            torch.zeros(2, 9, dtype=torch.int32), end_ids,
        )  # fmt: skip
    assert launches.keys <= table_keys()
    assert launches.unaligned == set()
    assert {k[0] for k in launches.keys} == {k[0] for k in table_keys()}

"""What the tests of the worker have in common: prompts, outputs, and a look into vLLM's engine."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from specpaged.prompts import load_prompts

PROMPTS = [record.text for record in load_prompts(None)[:12]]


def token_ids(outputs):
    """Of every completion, in order."""
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def core(llm):
    """vLLM's engine core, which runs in this process."""
    return llm.llm_engine.engine_core.engine_core


def model_runner(llm):
    """Our worker's."""
    return core(llm).model_executor.driver_worker.worker.model_runner


def check_nothing_is_held(llm):
    """All of vLLM's blocks but the null block are free, and what the worker keeps is sound."""
    model_runner(llm).check_integrity()
    pool = core(llm).scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@cache
def calls_by_name():
    """The names of all methods that vLLM's source has its workers called by, and of those that its own GPU worker has.

    Without what Ray's wrapper of a worker does by itself, and what a worker calls on itself.
    """
    root = Path(importlib.util.find_spec("vllm").origin).parent
    names = set()
    for path in root.rglob("*.py"):
        text = path.read_text(errors="replace")
        if "collective_rpc(" in text and not path.name.startswith("ray_"):
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args)
            names |= {call.args[0].value for call in calls if _is_named_call(call)}
    (worker,) = (
        node
        for node in ast.parse((root / "v1" / "worker" / "gpu_worker.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Worker"
    )
    methods = (node for node in worker.body if isinstance(node, ast.FunctionDef) and not node.decorator_list)
    names |= {method.name for method in methods if not method.name.startswith("_")}
    return sorted(names - {"annotate_profile", "get_compilation_match_table", "get_draft_model", "get_model"})


def _is_named_call(call):
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    return called in ("collective_rpc", "_collective_rpc") and isinstance(call.args[0], ast.Constant)


# Of those the worker refuses, once it has started.
REFUSED = frozenset(
    [
        "add_lora",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "determine_available_memory",
        "elastic_ep_execute",
        "finish_weight_update",
        "get_kv_cache_spec",
        "handle_ft_command",
        "init_device",
        "init_weight_transfer_engine",
        "initialize_from_config",
        "load_model",
        "pin_lora",
        "profile",
        "reinitialize_distributed",
        "remove_lora",
        "reset_weights",
        "save_sharded_state",
        "save_tensorized_model",
        "start_draft_weight_update",
        "start_weight_update",
        "update_config",
        "update_max_model_len",
        "update_weights",
    ]
)

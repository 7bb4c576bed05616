"""vLLM's engine arguments: those that mean under our worker what they mean under vLLM's own. The others are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vllm.engine.arg_utils import EngineArgs

from specpaged.speculative_config import SUFFIX_DECODING

# What the worker does, or refuses by value when it starts.
_THE_WORKERS = """
    additional_config block_size device_ids dtype enable_prefix_caching enforce_eager gpu_memory_utilization
    kv_cache_memory_bytes load_format max_model_len max_num_batched_tokens max_num_seqs model runner seed
    speculative_config spec_method spec_model spec_tokens tensor_parallel_size trust_remote_code worker_cls
"""
# What vLLM's front end, scheduler and executors do, whatever the worker.
_VLLMS = """
    _api_process_count _api_process_rank aggregate_engine_logging async_scheduling collect_detailed_traces
    cpu_distributed_timeout_seconds custom_histogram_buckets data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
    data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds dp_sync_interval
    enable_chunked_prefill enable_logging_iteration_details fail_on_environ_validation generation_config
    kv_cache_metrics kv_cache_metrics_sample kv_events_config log_config_file log_level logging_config
    long_prefill_token_threshold long_prefill_token_threshold_adaptive master_addr master_port max_logprobs
    max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens nnodes node_rank
    num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes otlp_traces_endpoint override_generation_config
    per_request_spec_decode_metrics prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers
    scheduler_cls scheduler_reserve_full_isl scheduling_policy served_model_name show_hidden_metrics_for_version
    shutdown_timeout skip_tokenizer_init stream_interval structured_outputs_config tokenizer_mode tokens_only
    use_tqdm_on_load watermark worker_extension_cls
"""
SERVED = frozenset(_THE_WORKERS.split() + _VLLMS.split())
SPECULATIVE = (
    "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "prompt_lookup_min",
    "prompt_lookup_max", *SUFFIX_DECODING,
)  # fmt: skip


def check_arguments(given: EngineArgs) -> None:
    """Raises ValueError, naming an argument, its value and what is allowed, for what the worker would not heed."""
    defaults = type(given)(model=given.model)
    for field in dataclasses.fields(given):
        value, default = getattr(given, field.name), getattr(defaults, field.name)
        if field.name not in SERVED and value is not None and value != default:
            name = f"--{field.name.replace('_', '-')}"
            raise ValueError(f"{name}={value!r} is not supported under specpaged's worker (allowed: {default!r})")
    speculative = given.speculative_config
    for key in speculative if isinstance(speculative, Mapping) else ():
        if key not in SPECULATIVE:
            raise ValueError(
                f"--speculative-config {key}={speculative[key]!r} is not supported under specpaged's worker (allowed: "
                f"{', '.join(SPECULATIVE)})"
            )

"""The worker that vLLM makes: its interface, call by call. What a step does is SpecPagedModelRunner's."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import torch
import vllm
from typing_extensions import override
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from specpaged.drafting import get_drafter
from specpaged.engine.cost_probe import get_planner
from specpaged.engine.report import StartupReport
from specpaged.engine.step import SpeculativeStep
from specpaged.metrics import EngineMetrics
from specpaged.modeling.device_state import state_bytes
from specpaged.modeling.pair import ModelPair
from specpaged.paging.kv_cache import PagedKVCache
from specpaged.vllm_plugin import admission
from specpaged.vllm_plugin.compat import check_version
from specpaged.vllm_plugin.config import REST_SECONDS, engine_config
from specpaged.vllm_plugin.memory import run_largest_step
from specpaged.vllm_plugin.metrics import MetricsExport
from specpaged.vllm_plugin.model_runner import SpecPagedModelRunner
from specpaged.vllm_plugin.ranks import get_captures, get_shard
from specpaged.vllm_plugin.refusals import Refusals, while_starting
from specpaged.vllm_plugin.round_choice import get_rounds
from specpaged.vllm_plugin.sequences import Sequences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from specpaged.drafting.base import Drafter
    from specpaged.modeling.model_runner import ModelRunner

logger = init_logger(__name__)


class SpecPagedWorker(Refusals, WorkerBase):
    """`--worker-cls specpaged.vllm_plugin.worker.SpecPagedWorker`.

    Whatever vLLM calls on a worker by name is here, or among the `Refusals`.

    Raises:
        RuntimeError: under a version of vLLM that is not supported, or where requests are not checked at admission.
        ValueError: for a configuration that is not supported; the message names it and says what is.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ):
        check_version(vllm.__version__)
        admission.check_is_in(vllm_config)
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self.pair: ModelPair | None = None
        self.model_runner: SpecPagedModelRunner | None = None

    @override
    @while_starting
    def init_device(self) -> None:
        kind = self.current_platform.device_type
        if kind == "cuda":
            self.device = torch.device("cuda", self._device_index())
            torch.cuda.set_device(self.device)
            self.free_bytes = torch.cuda.mem_get_info(self.device)[0]
        else:
            self.device = torch.device(kind)
        self.engine_config = engine_config(self.vllm_config, str(self.device))
        self.shard = get_shard(
            self.vllm_config.parallel_config, self.rank, self.local_rank, self.distributed_init_method,
            self.current_platform.dist_backend, self.device,
        )  # fmt: skip

    def _device_index(self) -> int:
        """The index that vLLM's own worker would take: engines side by side share a machine's devices.

        `--device-ids` names some of them.
        """
        parallel = self.vllm_config.parallel_config
        rank = self.local_rank
        if (
            parallel.distributed_executor_backend not in ("ray", "external_launcher")
            and parallel.data_parallel_backend != "ray"
            and parallel.nnodes_within_dp == 1
        ):
            engine = parallel.data_parallel_rank_local
            engine = parallel.data_parallel_index if engine is None else engine
            rank += engine * parallel.tensor_parallel_size
        if parallel.assigned_physical_gpu_ids is not None:
            set_assigned_physical_gpu_ids(parallel.assigned_physical_gpu_ids)
        return self.current_platform.logical_device_id_to_visible_device_id(rank)

    @override
    @while_starting
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise ValueError("dummy weights are not supported under specpaged's worker")
        self.pair = ModelPair.load(self.engine_config, self.shard)

    @while_starting
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Target's and draft's layers alike, so that one block table serves both pools.

        Not once it serves: asked over HTTP, vLLM would fail to send the dtype in it, and hang.
        """
        return {
            f"{role}.layers.{i}": FullAttentionSpec(
                block_size=self.engine_config.block_size,
                num_kv_heads=num_kv_heads,
                head_size=head_dim,
                dtype=model.kv_dtype,
            )
            for role, model in zip(("target", "draft"), self.pair.models, strict=False)
            for i, (num_kv_heads, head_dim) in enumerate(model.kv_spec.layers)
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """vLLM's names do not matter: the pools are ours."""
        return ["LBNHC"]

    @while_starting
    def determine_available_memory(self) -> int:
        """Bytes for both pools."""
        asked = self.cache_config.kv_cache_memory_bytes
        if asked is not None:
            return asked
        fraction = self.cache_config.gpu_memory_utilization
        if self.device.type == "cuda":
            return self._free_device_memory(fraction)
        memory = psutil.virtual_memory()
        budget = int(memory.total * fraction) - psutil.Process(os.getpid()).memory_info().rss
        return max(0, min(budget, memory.available))

    def _free_device_memory(self, fraction: float) -> int:
        """What is left of the fraction beside our models and their largest step; captured passes keep theirs.

        As vLLM counts: the fraction is this engine's, whatever else is on the device.
        """
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run_largest_step(self.pair, self.engine_config)
        step = torch.cuda.max_memory_allocated(self.device) - before
        config = self.engine_config
        if not config.enforce_eager:  # as much for the passes that are captured, and for rounds
            step *= 3 if config.device_round else 2
        if config.device_round:
            step += state_bytes(config.max_num_seqs, config.max_model_len, config.block_size)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        asked = int(total * fraction)
        if asked > self.free_bytes:
            raise ValueError(
                f"gpu_memory_utilization={fraction} asks for {asked} bytes; allowed: what was free, {self.free_bytes}"
            )
        return max(0, asked - (self.free_bytes - free) - step)

    @override
    @while_starting
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        block_size = group.kv_cache_spec.block_size
        num_blocks = kv_cache_config.num_blocks - 1  # without the null block
        config, pair, parallel = self.engine_config, self.pair, self.vllm_config.parallel_config
        self.caches = [PagedKVCache(m.kv_spec, num_blocks, block_size, m.kv_dtype, m.device) for m in pair.models]
        target, drafter = self._runners(pair, self.caches)
        speculative = config.speculative_config
        draft = drafter.runner if pair.draft is not None else None
        # vLLM shares blocks by their tokens, and hidden states do not come again: all KV of heads has to be there.
        follows = config.enable_prefix_caching and draft is not None and drafter.hidden_states is not None
        sequences = Sequences(
            num_blocks=num_blocks, block_size=block_size, num_pools=len(self.caches),
            max_model_len=config.max_model_len, max_draft_tokens=speculative.max_draft_tokens if speculative else 0,
            vocab_size=pair.vocab_size, seed=config.seed, engine=parallel.data_parallel_index, drafts_follow=follows,
        )  # fmt: skip
        planner = get_planner(config, target, draft, drafter, self.shard is None, REST_SECONDS)
        speculative_step = SpeculativeStep(
            target,
            drafter,
            "coupled",
            pair.vocab_size,
            EngineMetrics(),
            max_num_batched_tokens=config.max_num_batched_tokens,
            planner=planner,
            reserve_rounds=sequences.reserve_rounds,
            follows_target=follows,
            # Each rank runs the whole draft, and quick kernels may differ in a bit.
            agree=get_tp_group().broadcast_object if self.shard is not None else None,
        )
        metrics_export = MetricsExport(parallel.data_parallel_index) if self.is_driver_worker else None
        asynchronous = self.vllm_config.scheduler_config.async_scheduling
        self.model_runner = SpecPagedModelRunner(speculative_step, sequences, metrics_export, asynchronous)
        self.model_runner.rounds = get_rounds(config, speculative_step, sequences)
        logger.info("%s", StartupReport.of(config, target, draft, self.model_runner.costs))

    def _runners(self, pair: ModelPair, caches: Sequence[PagedKVCache]) -> tuple[ModelRunner, Drafter | None]:
        """The target's runner, and the drafter, on these pools."""
        config = self.engine_config
        of_ranks = () if self.shard is None or config.enforce_eager else get_captures(self.device)
        target, *drafts = pair.runners(caches, config.max_model_len, config.enforce_eager, *of_ranks)
        draft = drafts[0] if drafts else None
        return target, get_drafter(config, target, draft, pair.vocab_size, config.max_num_batched_tokens)

    @while_starting
    def update_max_model_len(self, max_model_len: int) -> None:
        """Fewer tokens than were asked for, where the KV memory holds no more."""
        self.engine_config = replace(self.engine_config, max_model_len=max_model_len)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to compile: kernels were built, and checked, in loading."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    @override
    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs the step; where a grammar is yet to be heeded, what it puts out comes from `sample_tokens`."""
        return self.model_runner.execute(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Verifies and commits the step, and proposes for the next one; or says where its tokens will be."""
        if not self.model_runner.has_step:
            return self.refuse("sample_tokens", "there is no step to sample from, execute_model comes before it")
        return self.model_runner.sample(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the scheduler may have verified."""
        return self.model_runner.take_drafts()

    def get_model(self) -> torch.nn.Module:
        """The target's decoder."""
        return self.pair.target.decoder

    def draft_costs(self) -> str:
        """What passes take, as decisions of how much to draft have it now; for /collective_rpc."""
        return str(self.model_runner.costs)

    @override
    def synchronize_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reload_weights(
        self, weights_iterator: None = None, weights_path: str | None = None, is_checkpoint_format: bool = True
    ) -> None:
        """Both models anew from their checkpoints, the target from weights_path if that is given.

        Beside the old ones, which stay if this fails. As under vLLM's own worker KV that was computed before stays as
        well, so requests are to be ended, and the prefix cache to be reset.

        Raises:
            ValueError: for weights that do not come from a checkpoint, or for models of another shape.
        """
        if self.shard is not None:
            # A rank that fails to load would leave the others waiting.
            return self.refuse("reload_weights", "the target is spread over ranks")
        if weights_iterator is not None or not is_checkpoint_format:
            raise ValueError("reload_weights takes no weights_iterator, and is_checkpoint_format=True alone")
        config = self.engine_config if weights_path is None else replace(self.engine_config, model=weights_path)
        pair = ModelPair.load(config)
        shapes, served = ([(m.kv_spec, m.kv_dtype, m.dtype, p.vocab_size) for m in p.models] for p in (pair, self.pair))
        if shapes != served:
            raise ValueError(f"weights_path={weights_path!r} has models of another shape than those that are served")
        runner, step = self.model_runner, self.model_runner.speculative_step
        step.target, step.drafter = self._runners(pair, self.caches)
        self.pair, self.engine_config = pair, config
        runner.rounds = get_rounds(config, step, runner.sequences, runner.rounds)
        logger.info("weights were loaded again from %s", config.model)

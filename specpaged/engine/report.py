"""The start-up report: what was loaded, what it costs, and which numerics hold."""

from __future__ import annotations

from dataclasses import dataclass

from specpaged.config import EngineConfig
from specpaged.drafting.custom import name_of
from specpaged.modeling.cuda_graphs import CudaGraphs
from specpaged.modeling.model_runner import ModelRunner
from specpaged.speculation.cost_model import CostModel
from specpaged.speculative_config import SpeculativeConfig


def human_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def _drafting(config: SpeculativeConfig | None) -> str | None:
    """'5', or '4 for 1-2 running sequences, 2 for 3-12, else 0', by what if by no model; None without drafts."""
    if config is None or config.max_draft_tokens == 0:
        return None
    if config.method == "custom":
        return f"{_num_draft_tokens(config)}, by {name_of(config.drafter)}"
    by = [_lookup(config, method) for method in config.lookups]
    if by and config.model_method is not None:
        by.append(f"else method {config.model_method}")
    return ", by ".join([_num_draft_tokens(config), "; ".join(by)] if by else [_num_draft_tokens(config)])


def _lookup(config: SpeculativeConfig, method: str) -> str:
    if method == "ngram":
        return f"prompt lookup of {config.prompt_lookup_min} to {config.prompt_lookup_max} tokens"
    others = f"outputs of {config.suffix_decoding_max_cached_requests} requests"
    suffixes = f"suffixes of up to {config.suffix_decoding_max_tree_depth} tokens"
    return f"{suffixes} in a sequence's own text and {others}"


def _num_draft_tokens(config: SpeculativeConfig) -> str:
    if config.is_adaptive:
        return f"up to {config.max_draft_tokens}, decided in every step"
    ranges = config.num_speculative_tokens_per_batch_size
    if ranges is None:
        return str(config.num_speculative_tokens)
    (first, last, k), *others = ranges
    parts = [f"{k} for {first}-{last} running sequences", *(f"{k} for {first}-{last}" for first, last, k in others)]
    return ", ".join([*parts, "else 0"])


def _with_reason(choice: str, reason: str | None) -> str:
    return f"{choice} ({reason})" if reason else choice


@dataclass(frozen=True)
class ModelReport:
    """One model's share of memory and its numerics."""

    role: str
    architecture: str
    decoder: str  # which implementation, in which kernels, and why not in others
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    dtype: str  # of the arithmetic
    storage: str  # of weights that are stored in another one
    kv_dtype: str
    numerics: str

    @classmethod
    def of(cls, role: str, runner: ModelRunner, enforce_eager: bool) -> ModelReport:
        """The report of a loaded model."""
        model = runner.model
        decoder = _with_reason(model.implementation, model.not_flat)
        decoder += f", kernels {_with_reason(model.backend, model.not_ours)}"
        if model.device.type == "cuda":
            why_not = CudaGraphs.why_not(model, enforce_eager)
            decoder += ", CUDA graphs" if why_not is None else f", eager ({why_not})"
        return cls(
            role,
            model.architecture,
            decoder,
            model.num_parameters,
            model.weight_bytes,
            runner.kv_cache.bytes_per_token,
            str(model.dtype).removeprefix("torch."),
            model.storage,
            str(model.kv_dtype).removeprefix("torch."),
            model.numerics_scheme,
        )

    def __str__(self) -> str:
        storage = f" (stored as {self.storage})" if self.storage else ""
        kv_dtype = f" (stored as {self.kv_dtype})" if self.kv_dtype != self.dtype else ""
        return (
            f"{self.role:<7}{self.architecture}, {self.num_parameters / 1e6:.2f} M parameters, {self.dtype}, "
            f"weights {human_bytes(self.weight_bytes)}{storage}, "
            f"KV {human_bytes(self.kv_bytes_per_token)} per token{kv_dtype}\n"
            f"       decoder {self.decoder}\n"
            f"       numerics {self.numerics}"
        )


@dataclass(frozen=True)
class StartupReport:
    """What an engine starts with."""

    models: tuple[ModelReport, ...]
    kv: str
    num_full_sequences: int  # of max_model_len that the KV memory holds at once
    max_model_len: int
    model_positions: int  # that the target itself has
    drafting: str | None  # how many tokens are drafted, and by whom if not by a model; None where none are
    schedule: str
    costs: str | None = None  # of passes, where they decide how many tokens are drafted

    @classmethod
    def of(
        cls, config: EngineConfig, target: ModelRunner, draft: ModelRunner | None, costs: CostModel | None = None
    ) -> StartupReport:
        """The report of an engine's parts."""
        models = [ModelReport.of("target", target, config.enforce_eager)]
        if draft is not None:
            models.append(ModelReport.of("draft", draft, config.enforce_eager))
        cache = target.kv_cache
        if config.rollback == "truncate":
            kv = f"{cache.num_blocks} blocks of {cache.block_size} tokens"
            num_full_sequences = cache.num_blocks // -(-config.max_model_len // cache.block_size)
        else:
            caches = f" and {cache.num_blocks} caches" if config.rollback == "group" else ""
            kv = f"rollback {config.rollback}: {cache.num_rows} rows{caches} of {cache.num_columns} tokens"
            num_full_sequences = cache.num_blocks
        pools = [runner.kv_cache for runner in (target, draft) if runner is not None]
        num_bytes = sum(pool.num_bytes for pool in pools)
        if draft is not None and draft.kv_cache.num_blocks != cache.num_blocks:
            kv += f", {draft.kv_cache.num_blocks} of the draft's own"
        return cls(
            tuple(models),
            f"{kv}, {human_bytes(num_bytes)}",
            num_full_sequences,
            config.max_model_len,
            target.model.max_model_len,
            _drafting(config.speculative_config),
            config.schedule,
            None if costs is None else str(costs),
        )

    def __str__(self) -> str:
        pool = f"KV     {self.kv}: {self.num_full_sequences} sequences of {self.max_model_len} tokens"
        if self.max_model_len < self.model_positions:
            pool += f" (max_model_len; the model has {self.model_positions} positions)"
        drafting = [f"K      {self.drafting}"] if self.drafting else []
        costs = [f"costs  {self.costs}"] if self.costs else []
        schedule = [] if self.schedule == "continuous" else [f"runs   by schedule {self.schedule}"]
        return "\n".join([*map(str, self.models), pool, *drafting, *costs, *schedule])

"""LLM: prompts or conversations in, completions out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from specpaged.chat import ChatRenderer, Conversation, conversations
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET, EngineConfig, is_for_studies
from specpaged.drafting import get_drafter, require_drafter
from specpaged.engine import kv_memory
from specpaged.engine.build import engine_class
from specpaged.engine.cost_probe import get_planner
from specpaged.engine.kv_layout import KVLayout
from specpaged.engine.report import StartupReport
from specpaged.engine.split_kv_layout import SplitKVLayout
from specpaged.engine.vocabulary import Vocabulary
from specpaged.metrics import RequestMetrics
from specpaged.modeling.loaded_model import LoadedModel
from specpaged.modeling.pair import ModelPair
from specpaged.outputs import RequestOutput
from specpaged.paging.kv_cache import KVCache
from specpaged.research import kv_memory as dense_kv_memory
from specpaged.research.build import dense_layout, scheduler_of
from specpaged.sampling_params import SamplingParams
from specpaged.speculation.cost_model import CostModel
from specpaged.speculative_config import SpeculativeConfig

logger = logging.getLogger("specpaged")

Prompt = str | Mapping[str, Any]

GPU_BLOCK_SIZE = 64
_TOKENS_FORM = "{'prompt_token_ids': [...]}"


class LLM:
    """A model, its draft if it has one, and the engine that runs them.

    Without `model` the embedded pair is loaded, and drafts unless `speculative_config` says otherwise.
    `model` and `speculative_config["model"]` are local paths or hub ids. See EngineConfig and
    SpeculativeConfig for the rest.

    Raises:
        ValueError: a bad argument, a checkpoint that cannot be loaded or served, a pair whose vocabularies
            differ; the message names the argument, its value and what is allowed.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        **engine_arguments: Any,
    ):
        config = _engine_config(model, speculative_config, engine_arguments)
        require_drafter(config.speculative_config)
        pair = ModelPair.load(config)
        config = replace(config, max_model_len=kv_memory.max_model_len(config, pair.models))
        caches = _kv_caches(config, pair.models)
        target, *drafts = pair.runners(caches, config.max_model_len, config.enforce_eager)
        draft = drafts[0] if drafts else None
        drafter = get_drafter(config, target, draft, pair.vocab_size, config.max_num_batched_tokens)
        self.config = config
        self.tokenizer = pair.tokenizer
        vocabulary = Vocabulary(pair.vocab_size, pair.eos_token_ids, pair.tokenizer)
        planner = get_planner(config, target, draft, drafter)
        self.engine = engine_class(config, pair.models)(
            config,
            vocabulary,
            target,
            draft,
            drafter,
            scheduler_of(config),
            _kv_layout(config, pair.models, caches),
            planner,
        )
        self.report = StartupReport.of(config, target, draft, self.costs)
        logger.info("%s", self.report)
        self._num_requests = 0

    @property
    def costs(self) -> CostModel | None:
        """What passes take on this machine, as decisions of how much to draft have it now; None where none are made."""
        planner = self.engine.speculative_step.planner
        return None if planner is None else planner.costs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts: strings or {"prompt_token_ids": [...]}; outputs come in their order.

        One SamplingParams serves all prompts; a list needs one for each. A request that is refused or fails
        among several comes back with `error` set and no tokens, and the others complete; alone, it raises.

        Raises:
            ValueError: as said, or lists of different lengths.
            RuntimeError: if requests that were added to the engine itself still run: their outputs are its caller's.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise ValueError(f"prompts={_shown(prompts)} must be a string, {_TOKENS_FORM}, or a list of these")
        return self._complete(prompts, sampling_params, use_tqdm, self._encode)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, a list of {"role": ..., "content": ...}, or each of a list of conversations.

        They are rendered with the tokenizer's chat template, or with `chat_template`; the rest is as in `generate`,
        and a conversation that cannot be rendered is a request that is refused.

        Raises:
            ValueError: as `generate`, or for a tokenizer without a chat template where none is given.
        """
        renderer = ChatRenderer(
            self.tokenizer,
            self.config.model,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            {} if chat_template_kwargs is None else chat_template_kwargs,
        )
        return self._complete(conversations(messages), sampling_params, use_tqdm, renderer.render)

    @property
    def metrics(self) -> Any:
        """The engine's counters (EngineMetrics)."""
        return self.engine.metrics

    def _complete(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        encode: Callable[[Any], tuple[str | None, Sequence[int]]],
    ) -> list[RequestOutput]:
        """Run all prompts to their end: what `generate` and `chat` share.

        `encode` makes text, if there is any, and token ids of a prompt, or raises ValueError.
        """
        if self.engine.has_unfinished_requests:
            raise RuntimeError(
                f"requests {sorted(self.engine.requests)} were added to the engine and still run; step it to their end"
            )
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str | bytes):
            raise ValueError(f"sampling_params={_shown(sampling_params)} must be a SamplingParams or a list of them")
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params has {len(sampling_params)} entries for {len(prompts)} prompts; "
                "allowed: one SamplingParams, or a list of one for each prompt"
            )
        outputs: dict[str, RequestOutput] = {}
        request_ids = []
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                request_id = str(self._num_requests)
                self._num_requests += 1
                request_ids.append(request_id)
                try:
                    text, token_ids = encode(prompt)
                    self.engine.add_request(request_id, token_ids, params, text)
                except ValueError as error:
                    if len(prompts) == 1:
                        raise
                    outputs[request_id] = _refused(request_id, prompt, str(error))
            self._run(outputs, len(prompts), use_tqdm)
        except BaseException:
            for request_id in request_ids:
                self.engine.abort_request(request_id)
            raise
        failed = outputs[request_ids[0]].error if len(prompts) == 1 else None
        if failed:
            raise RuntimeError(failed)
        return [outputs[request_id] for request_id in request_ids]

    def _run(self, outputs: dict[str, RequestOutput], num_prompts: int, use_tqdm: bool) -> None:
        start = self.engine.metrics.emitted_tokens
        with tqdm(total=num_prompts, initial=len(outputs), disable=not use_tqdm, unit="prompt") as bar:
            while self.engine.has_unfinished_requests:
                finished = self.engine.step()
                if not finished:
                    continue
                outputs.update((output.request_id, output) for output in finished)
                elapsed = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{(self.engine.metrics.emitted_tokens - start) / elapsed:.0f} tokens/s", False)
                bar.update(len(finished))
        self.engine.check_idle()

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"prompt={_shown(prompt)} is text, but model={self.config.model!r} has no tokenizer; "
                    f"allowed: {_TOKENS_FORM}"
                )
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"prompt={_shown(prompt)} has a lone surrogate at {error.start}; allowed: text that UTF-8 can write"
                ) from None
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            for key in prompt:
                if key not in ("prompt_token_ids", "prompt"):
                    raise ValueError(f"prompt has a key {key!r}; allowed: 'prompt_token_ids', and 'prompt' beside it")
            return prompt.get("prompt"), prompt["prompt_token_ids"]
        raise ValueError(f"prompt={_shown(prompt)} must be a string or {_TOKENS_FORM}")


def _kv_caches(config: EngineConfig, models: Sequence[LoadedModel]) -> Sequence[KVCache]:
    return (kv_memory if config.rollback == "truncate" else dense_kv_memory).new_kv_caches(config, models)


def _kv_layout(config: EngineConfig, models: Sequence[LoadedModel], caches: Sequence[KVCache]) -> KVLayout:
    if kv_memory.has_own_pool(config, models):
        return SplitKVLayout(config.block_size, caches[1].num_blocks, config.speculative_config.kv_window)
    if config.rollback == "truncate":
        return KVLayout(config.block_size)
    return dense_layout(config.rollback, caches, config.max_model_len, config.max_num_seqs)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _refused(request_id: str, prompt: Any, error: str) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(request_id, text, [], None, outputs=[], finished=True, metrics=RequestMetrics(), error=error)


def _engine_config(
    model: str | None,
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None,
    engine_arguments: Mapping[str, Any],
) -> EngineConfig:
    embedded = model is None or str(model) == EMBEDDED_TARGET
    if speculative_config is None and model is None:
        speculative_config = SpeculativeConfig()
    if isinstance(speculative_config, Mapping):
        speculative_config = SpeculativeConfig.from_mapping(speculative_config)
    if not isinstance(speculative_config, SpeculativeConfig | None):
        raise ValueError(
            f"speculative_config={_shown(speculative_config)} must be None, a SpeculativeConfig or a mapping such as "
            "{'model': ..., 'num_speculative_tokens': 5}"
        )
    if speculative_config is not None:
        studied = is_for_studies(
            engine_arguments.get("schedule", "continuous"), engine_arguments.get("rollback", "truncate")
        )
        speculative_config = speculative_config.resolved(engine_arguments.get("device", "cpu"), studied)
    drafts_by_model = speculative_config is not None and speculative_config.model_method == "draft_model"
    if drafts_by_model and speculative_config.model is None:
        if not embedded and speculative_config.max_draft_tokens > 0:
            raise ValueError(
                "speculative_config['model']=None: a draft model is needed beside "
                f"model={str(model)!r}; allowed: a local path or hub id"
            )
        speculative_config = replace(speculative_config, model=EMBEDDED_DRAFT)
    if speculative_config is not None and speculative_config.model is not None:
        speculative_config = replace(speculative_config, model=str(speculative_config.model))
    allowed = [name for name in EngineConfig.__dataclass_fields__ if name not in ("model", "speculative_config")]
    for name in engine_arguments:
        if name not in allowed:
            raise ValueError(
                f"LLM() has no argument {name!r}; allowed: model, speculative_config, {', '.join(allowed)}"
            )
    if str(engine_arguments.get("device", "")).startswith("cuda"):  # larger blocks cost the kernels fewer look-ups
        engine_arguments = {"block_size": GPU_BLOCK_SIZE, **engine_arguments}
    return EngineConfig(
        model=EMBEDDED_TARGET if model is None else str(model),
        speculative_config=speculative_config,
        **engine_arguments,
    )

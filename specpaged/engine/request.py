"""A request: one prompt, one or more sequences, one output. Ints only, no torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from specpaged.engine.sequence import Sequence
from specpaged.metrics import RequestMetrics
from specpaged.outputs import CompletionOutput, Logprob, RequestOutput
from specpaged.sampling_params import SamplingParams, validate_for_model


def validate_request(
    prompt_token_ids: SequenceOf[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    has_tokenizer: bool,
    max_model_len: int,
    max_draft_tokens: int,
    verification: str,
) -> None:
    """Raise ValueError, naming the argument, its value and what is allowed, for what cannot be served."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params={params!r} must be a SamplingParams")
    if not isinstance(prompt_token_ids, SequenceOf) or isinstance(prompt_token_ids, str | bytes):
        raise ValueError(f"prompt_token_ids={str(prompt_token_ids)[:80]!r} must be a list of ints")
    if len(prompt_token_ids) == 0:
        raise ValueError("prompt is empty; allowed: at least one token")
    if len(prompt_token_ids) >= max_model_len:
        raise ValueError(
            f"prompt has {len(prompt_token_ids)} tokens; allowed: fewer than max_model_len={max_model_len}, "
            "so that at least one token can be generated"
        )
    for position, token_id in enumerate(prompt_token_ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"prompt_token_ids[{position}]={token_id!r} is out of range; allowed: ints in [0, {vocab_size})"
            )
    if verification == "greedy" and params.temperature > 0:
        raise ValueError(
            f"temperature={params.temperature} needs speculative_config['verification'] 'coupled' or "
            "'rejection'; 'greedy' allows temperature 0 only"
        )
    validate_num_speculative_tokens(params, max_draft_tokens)
    validate_for_model(params, vocab_size, has_tokenizer)


def validate_num_speculative_tokens(params: SamplingParams, max_draft_tokens: int) -> None:
    """Raise ValueError if a request asks for longer drafts than there are."""
    k = params.num_speculative_tokens or 0
    if k > max_draft_tokens:
        allowed = f"0 to {max_draft_tokens}" if max_draft_tokens else "0, as this engine has no draft"
        raise ValueError(f"extra_args['num_speculative_tokens']={k} is more than the engine drafts; allowed: {allowed}")


@dataclass
class Request:
    """The `n` sequences of one prompt."""

    request_id: str
    prompt: str | None
    sequences: list[Sequence]

    @property
    def is_finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.is_finished for sequence in self.sequences)

    def output(self, tokenizer: Any) -> RequestOutput:
        """The request as its user sees it, finished or not.

        Where the tokenizer raises, it comes with that error, and with token ids alone.
        """
        first = self.sequences[0]
        errors = [sequence.error for sequence in self.sequences if sequence.error]
        try:
            prompt_logprobs = _prompt_logprobs(first, tokenizer)
            outputs = [_completion(sequence, tokenizer, sequence.stop_checker.text) for sequence in self.sequences]
        except Exception as error:
            errors.append(f"request {self.request_id!r}: its text cannot be read ({type(error).__name__}: {error})")
            prompt_logprobs = _prompt_logprobs(first, None)
            outputs = [_completion(sequence, None, "") for sequence in self.sequences]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self.is_finished,
            metrics=RequestMetrics.total(sequence.metrics for sequence in self.sequences),
            error=errors[0] if errors else None,
        )


def _completion(sequence: Sequence, tokenizer: Any, text: str) -> CompletionOutput:
    logprobs = cumulative = None
    if sequence.params.logprobs is not None:
        logprobs = [_as_dict(row, tokenizer) for row in sequence.logprobs]
        cumulative = sum(row.logprob for row in sequence.logprobs)
    return CompletionOutput(
        index=sequence.child_idx,
        text=text,
        token_ids=list(sequence.output_token_ids),
        cumulative_logprob=cumulative,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        seed=sequence.seed,
    )


def _prompt_logprobs(sequence: Sequence, tokenizer: Any) -> list[dict[int, Logprob] | None] | None:
    if sequence.params.prompt_logprobs is None:
        return None
    rows = sequence.prompt_logprobs or [None]
    return [None if row is None else _as_dict(row, tokenizer) for row in rows]


def _as_dict(row: Any, tokenizer: Any) -> dict[int, Logprob]:
    """vLLM's shape: the token itself first, then the most likely ones in order."""

    def decoded(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id])

    entries = {row.token_id: Logprob(row.logprob, row.rank, decoded(row.token_id))}
    for rank, (token_id, logprob) in enumerate(row.top, start=1):
        entries.setdefault(token_id, Logprob(logprob, rank, decoded(token_id)))
    return entries

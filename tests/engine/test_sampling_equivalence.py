"""Every sampling parameter: K = 5 against K = 0, identical token ids, text, ends and log-probabilities.

Plain decoding runs one prompt at a time; speculation runs in a batch, with two drafts: one that is often wrong (so that
rows are rejected) and the target itself (so that all rows of every round count, and must see the drafts before them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from specpaged import LLM, SamplingParams
from specpaged.drafting.base import DraftOutput
from specpaged.engine.detokenizer import IncrementalDetokenizer
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest
from specpaged.verification import get_verifier
from tests import toys

PROMPTS = ["speculative deco", "lazy dog jumps over the", "the quick brown fox"]
GREEDY = {"temperature": 0.0, "seed": 3, "max_tokens": 18, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "seed": 11, "max_tokens": 18, "ignore_eos": True}
EOS_OFTEN = {toys.EOS: 4.0}  # a logit bias under which eos comes in a few tokens' time
# Tokens of whole characters: a toy model's free text is mostly broken UTF-8.
READABLE = {"allowed_token_ids": [*range(1, 95), *range(257, toys.VOCAB_SIZE)]}


class Engines:
    """The plain engine, the speculative ones, and plain outputs that were computed before."""

    def __init__(self, pair: toys.Pair):
        def llm(draft: str | None, numerics: str = "fast", **arguments: Any) -> LLM:
            speculative = draft and {"model": draft, "num_speculative_tokens": 5, "numerics": numerics}
            return LLM(pair.target, speculative_config=speculative, max_model_len=128, **arguments)

        self._plain = llm(None, max_num_seqs=1)
        self.poor_draft = llm(pair.draft, max_num_seqs=12, max_num_batched_tokens=24)  # prefill in chunks, too
        self.perfect_draft = llm(pair.target, "exact", max_num_seqs=3)
        self.tokenizer = self._plain.tokenizer
        self._seen: dict[str, list[Any]] = {}

    def plain(self, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        arguments = [{name: value for name, value in a.items() if name != "extra_args"} for a in arguments]
        key = repr(arguments)
        if key not in self._seen:
            self._seen[key] = [
                self._plain.generate(prompt, SamplingParams(**a), use_tqdm=False)[0]
                for prompt, a in zip(PROMPTS, arguments, strict=True)
            ]
        return self._seen[key]


@pytest.fixture(scope="module")
def engines(tokenizer_pair):
    return Engines(tokenizer_pair)


@dataclass(frozen=True)
class Free:
    """An output without the parameter under test, from which a prompt's stop strings and bad words are taken."""

    output: Any
    tokenizer: Any

    @property
    def token_ids(self) -> list[int]:
        return self.output.outputs[0].token_ids

    def token(self, start: int) -> int:
        """The first token from `start` on that did not come before."""
        return next(t for i, t in enumerate(self.token_ids) if i >= start and t not in self.token_ids[:i])

    def stop_string(self, start: int) -> str:
        """The end of one token's text and the beginning of the next one's."""
        detokenizer = IncrementalDetokenizer(self.tokenizer, SamplingParams(), self.output.prompt_token_ids)
        text, previous = "", ""
        for i, token_id in enumerate(self.token_ids):
            piece = detokenizer.append(token_id)
            spanning = previous[-1:] + piece[:1]
            if i > start and previous and piece and spanning not in text:
                return spanning
            text, previous = text + piece, piece
        raise AssertionError(f"no string spans two tokens of {text!r}")

    def character(self) -> str:
        """The last character of which UTF-8 makes more than one token; a placeholder where there is none."""
        wide = [c for c in self.output.outputs[0].text if ord(c) > 127 and c != "\ufffd"]
        return wide[-1] if wide else "none"

    def word(self, num_tokens: int) -> str | None:
        """A word of the output that a tokenizer reads as the very tokens that wrote it."""
        for i in range(len(self.token_ids) - num_tokens + 1):
            ids = self.token_ids[i : i + num_tokens]
            word = self.tokenizer.decode(ids)
            if word.strip() and self.tokenizer.encode(word.lstrip(), add_special_tokens=False) == ids:
                return word
        return None


Arguments = dict[str, Any] | Callable[[Free], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A parameter, over a base without it; given a function, each prompt's own comes from its free output."""

    name: str
    change: Arguments
    base: dict[str, Any]
    context: Arguments | None = None  # parameters of both sides, given which the change means something

    def arguments(self, engines: Engines) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """For each prompt, the parameters without the change and with it."""
        free = [self.base | {"seed": self.base["seed"] + 7 * i} for i in range(len(PROMPTS))]
        without = self._resolve(engines, self.context or {}, free, free)
        return without, self._resolve(engines, self.change, without, free)

    def _resolve(self, engines, change, arguments, free):
        if callable(change):
            outputs = [Free(output, engines.tokenizer) for output in engines.plain(free)]
            return [a | change(output) for a, output in zip(arguments, outputs, strict=True)]
        return [a | change for a in arguments]


def both(name: str, change: Arguments, context: Arguments | None = None, base: dict | None = None) -> list[Case]:
    bases = {"greedy": GREEDY, "sampled": SAMPLED}
    return [Case(f"{name}-{kind}", change, b | (base or {}), context) for kind, b in bases.items()]


def sampled(name: str, change: Arguments, base: dict | None = None) -> list[Case]:
    return [Case(name, change, SAMPLED | (base or {}))]


def stop(free: Free) -> dict[str, Any]:
    return {"stop": [free.stop_string(6), "never said", free.stop_string(10)]}


def stop_character(free: Free) -> dict[str, Any]:
    return {"stop": free.character()}


def stop_token(free: Free) -> dict[str, Any]:
    return {"stop_token_ids": [free.token(5), free.token(9)]}


def bad_words(free: Free) -> dict[str, Any]:
    return {"bad_words": [word for word in (free.word(1), free.word(2)) if word] or ["the"]}


def bias(free: Free) -> dict[str, Any]:
    return {"logit_bias": {free.token(3): -100.0, 40: 4.0, 41: 3.5, 42: 3.0}}


ALLOWED = {"allowed_token_ids": [*range(30, 90), *range(256, 290)]}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
EVERYTHING = (
    PENALTIES
    | ALLOWED
    | {"n": 2, "temperature": 1.1, "top_p": 0.95, "top_k": 60, "min_p": 0.01, "min_tokens": 4}
    | {"logit_bias": {50: 2.0, 60: -2.0}, "logprobs": 2, "prompt_logprobs": 1, "include_stop_str_in_output": True}
)

CASES = [
    *sampled("n", {"n": 3}),
    *sampled("temperature-low", {"temperature": 0.3}),
    *sampled("temperature-one", {"temperature": 1.0}),
    *sampled("temperature-high", {"temperature": 1.7}),
    *sampled("temperature-zero", {"temperature": 0.0}),
    *sampled("top_p", {"top_p": 0.4}),
    *sampled("top_k", {"top_k": 3}),
    *sampled("min_p", {"min_p": 0.3}),
    *sampled("seed", {"seed": 2**40 + 1}),
    *both("max_tokens", {"max_tokens": 7}),
    *both("min_tokens-eos", {"min_tokens": 14}, {"ignore_eos": False, "logit_bias": EOS_OFTEN}),
    *both("min_tokens-stop_token_ids", {"min_tokens": 12}, stop_token),
    *both("min_tokens-stop", {"min_tokens": 15}, stop, READABLE),
    *both("stop", stop, base=READABLE),
    *both("stop-character", stop_character),
    *both("stop_token_ids", stop_token),
    *both("include_stop_str_in_output-stop", {"include_stop_str_in_output": True}, stop, READABLE),
    *both("include_stop_str_in_output-stop_token_ids", {"include_stop_str_in_output": True}, stop_token, READABLE),
    *both("ignore_eos", {"ignore_eos": True}, {"ignore_eos": False, "logit_bias": EOS_OFTEN}),
    *both("eos", {"ignore_eos": False}, {"logit_bias": EOS_OFTEN}),
    *both("logprobs-0", {"logprobs": 0}),
    *both("logprobs-3", {"logprobs": 3}),
    *both("logprobs-all", {"logprobs": -1}, {"max_tokens": 8}),
    *both("prompt_logprobs-0", {"prompt_logprobs": 0}),
    *both("prompt_logprobs-3", {"prompt_logprobs": 3}),
    *both("prompt_logprobs-all", {"prompt_logprobs": -1}, {"max_tokens": 8}),
    *both("presence_penalty", {"presence_penalty": 1.5}),
    *both("presence_penalty-negative", {"presence_penalty": -2.0}),
    *both("frequency_penalty", {"frequency_penalty": 1.2}),
    *both("frequency_penalty-negative", {"frequency_penalty": -1.0}),
    *both("repetition_penalty", {"repetition_penalty": 1.4}),
    *both("repetition_penalty-below-one", {"repetition_penalty": 0.7}),
    *both("logit_bias", bias),
    *both("bad_words", bad_words),
    *both("bad_words-two-tokens", lambda free: {"bad_words": [free.word(2)]}, base=READABLE),
    *both("allowed_token_ids", ALLOWED),
    *both("skip_special_tokens", {"skip_special_tokens": False}, {"logit_bias": EOS_OFTEN}),
    *both("detokenize", {"detokenize": False}),
    *both("extra_args-logprobs", {"extra_args": {"num_speculative_tokens": 2}, "logprobs": 1}),
    *sampled("top_k-top_p-penalties-logprobs", PENALTIES | {"top_k": 20, "top_p": 0.8, "logprobs": 2}),
    *sampled(
        "n-stop-min_tokens-logprobs", lambda free: stop(free) | {"n": 4, "min_tokens": 8, "logprobs": 1}, READABLE
    ),
    *sampled("n-prompt_logprobs-penalties", PENALTIES | {"n": 2, "prompt_logprobs": 2, "logprobs": 0}),
    *both("bad_words-bias-penalties", lambda free: bad_words(free) | bias(free) | PENALTIES | {"logprobs": 1}),
    *both(
        "allowed-min_tokens-eos",
        ALLOWED | {"allowed_token_ids": [0, *range(30, 90)], "min_tokens": 5, "ignore_eos": False},
    ),
    *sampled(
        "everything",
        lambda free: EVERYTHING | stop(free) | bad_words(free),
        READABLE,
    ),
]


def seen_by_user(output: Any) -> tuple:
    """All that a request returns, but for its id and counters. Floats are compared exactly."""
    assert output.error is None
    assert output.finished
    return output.prompt_token_ids, output.prompt_logprobs, output.outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_is_the_same_with_and_without_speculation(engines, case):
    without, arguments = case.arguments(engines)
    expected = [seen_by_user(output) for output in engines.plain(arguments)]
    unchanged = [seen_by_user(output) for output in engines.plain(without)]
    assert expected != unchanged
    params = [SamplingParams(**a) for a in arguments]
    for llm in (engines.poor_draft, engines.perfect_draft):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [seen_by_user(output) for output in outputs] == expected
        assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks
        drafted = sum(output.metrics.draft_tokens for output in outputs)
        accepted = sum(output.metrics.accepted_tokens for output in outputs)
        if llm is engines.perfect_draft:
            # Its drafts went through the same parameters after the same tokens: none can be wrong.
            assert 0 < accepted == drafted
        else:
            assert 0 < accepted < drafted


# What each parameter does at all, so that agreeing on nothing cannot pass: over the plain outputs of its case.


def run_plainly(engines, name):
    case = next(case for case in CASES if case.name == name)
    without, arguments = case.arguments(engines)
    outputs = [output.outputs[0] for output in engines.plain(arguments)]
    return outputs, [output.outputs[0] for output in engines.plain(without)], arguments


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_stop_strings_span_tokens_and_end_the_text(engines, kind):
    outputs, free, arguments = run_plainly(engines, f"stop-{kind}")
    kept, _, _ = run_plainly(engines, f"include_stop_str_in_output-stop-{kind}")
    for output, with_stop, unstopped, a in zip(outputs, kept, free, arguments, strict=True):
        assert output.finish_reason == "stop"
        assert output.stop_reason in a["stop"]
        assert output.text + output.stop_reason == with_stop.text
        assert unstopped.text.startswith(with_stop.text)
        assert engines.tokenizer.decode(output.token_ids[-1:]) != output.stop_reason


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_the_cases_reach_what_they_are_named_for(engines, kind):
    outputs, free, arguments = run_plainly(engines, f"stop_token_ids-{kind}")
    assert all(o.stop_reason in a["stop_token_ids"] for o, a in zip(outputs, arguments, strict=True))
    outputs, free, _ = run_plainly(engines, f"min_tokens-eos-{kind}")
    assert min(len(o.token_ids) for o in free) < 14 <= min(len(o.token_ids) for o in outputs)
    outputs, _, _ = run_plainly(engines, f"eos-{kind}")
    assert any(o.finish_reason == "stop" and o.token_ids[-1] == toys.EOS and o.stop_reason is None for o in outputs)
    outputs, free, arguments = run_plainly(engines, f"bad_words-{kind}")
    words = [word for a in arguments for word in a["bad_words"]]
    assert any(len(engines.tokenizer.encode(word.lstrip())) > 1 for word in words)  # a word of two tokens
    assert any(o.token_ids != f.token_ids for o, f in zip(outputs, free, strict=True))
    outputs, _, arguments = run_plainly(engines, f"allowed_token_ids-{kind}")
    assert all(set(o.token_ids) <= set(a["allowed_token_ids"]) for o, a in zip(outputs, arguments, strict=True))
    outputs, _, _ = run_plainly(engines, f"skip_special_tokens-{kind}")
    assert any("<|endoftext|>" in o.text for o in outputs)
    outputs, _, _ = run_plainly(engines, f"logprobs-all-{kind}")
    assert all(len(row) == toys.VOCAB_SIZE for o in outputs for row in o.logprobs)
    assert all(o.cumulative_logprob < 0 for o in outputs)
    assert all(o.text == "" and o.token_ids for o in run_plainly(engines, f"detokenize-{kind}")[0])


# The token mask of a serving stack's grammar: no user parameter, so at the verifier.

V, K = 24, 4


def language(seed: int) -> torch.Tensor:
    """A model that is a table: the logits after token a are its row a."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 2


def request(params: dict, outputs: Sequence[int], masks: torch.Tensor, seed: int = 5) -> SamplingRequest:
    return SamplingRequest(SamplingParams(**params), seed, [1], list(outputs), token_mask=masks)


def allowed_after(token_id: int) -> torch.Tensor:
    """A grammar, of sorts: a third of the vocabulary may follow a token, and another third that."""
    return (torch.arange(V) + 2 * token_id + 1) % 3 == 0


def mask_rows(last: int, drafts: Sequence[int]) -> torch.Tensor:
    return torch.stack([allowed_after(token_id) for token_id in (last, *drafts)])


def decode_plainly(params: dict, table: torch.Tensor, num_tokens: int, masked: bool = True) -> list[int]:
    outputs = [3]
    verifier = get_verifier("coupled")
    for _ in range(num_tokens):
        mask = mask_rows(outputs[-1], ()) if masked else torch.ones(1, V, dtype=torch.bool)
        batch = SamplingBatch([request(params, outputs, mask)], V, "cpu")
        outputs += verifier.verify(table[outputs[-1:]], DraftOutput([[]], [None]), batch).token_ids[0]
    return outputs


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9}])
def test_a_token_mask_rules_over_each_row_of_a_verification(params):
    table = language(0)
    plain = decode_plainly(params, table, 40)
    assert plain != decode_plainly(params, table, 40, masked=False)
    assert all(allowed_after(a)[b] for a, b in pairwise(plain))
    outputs, accepted, rejected = [3], 0, 0
    while len(outputs) < len(plain):
        # Drafts are right up to a place that moves on, then wrong; some wrong ones the grammar forbids.
        drafts = plain[len(outputs) : len(outputs) + K]
        if len(outputs) % 3 and drafts:
            place = len(outputs) % len(drafts)
            drafts = [*drafts[:place], (drafts[place] + 1 + len(outputs)) % V, *drafts[place + 1 :]]
        masks = mask_rows(outputs[-1], drafts)
        batch = SamplingBatch([request(params, outputs, masks)], V, "cpu")
        logits = table[[outputs[-1], *drafts]]
        verified = get_verifier("coupled").verify(logits, DraftOutput([drafts], [None]), batch)
        accepted += verified.num_accepted[0]
        rejected += len(drafts) - verified.num_accepted[0]
        outputs += verified.token_ids[0]
    assert outputs[: len(plain)] == plain
    assert accepted > 0 < rejected


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_what_a_mask_forbids_is_never_verified(verification):
    table, verifier = language(1), get_verifier(verification)
    for seed in range(40):
        drafts = torch.randint(0, V, (K,), generator=torch.Generator().manual_seed(seed)).tolist()
        probs = torch.full((K, V), 1.0 / V)
        masks = mask_rows(3, drafts)
        batch = SamplingBatch([request({"temperature": 1.0}, [3], masks, seed)], V, "cpu")
        draft = DraftOutput([drafts], [probs])
        verified = verifier.verify(table[[3, *drafts]], draft, batch)
        assert verified.failed == [False]
        assert all(mask[token_id] for mask, token_id in zip(masks, verified.token_ids[0], strict=False))


def test_a_row_that_allows_nothing_fails_its_request_only_if_the_row_counts():
    table, verifier = language(2), get_verifier("coupled")
    open_, shut = torch.ones(V, dtype=torch.bool), torch.zeros(V, dtype=torch.bool)
    first = int(table[3].argmax())
    second = int(table[first].argmax())
    wrong = (second + 1) % V

    def verify(drafts, masks):
        batch = SamplingBatch([request({"temperature": 0}, [3], torch.stack(masks))], V, "cpu")
        return verifier.verify(table[[3, *drafts]], DraftOutput([drafts], [None]), batch)

    counts = verify([first, second], [open_, open_, shut])
    assert (counts.failed, counts.token_ids) == ([True], [[first, second]])
    behind_a_rejection = verify([first, wrong], [open_, open_, shut])
    assert (behind_a_rejection.failed, behind_a_rejection.token_ids) == ([False], [[first, second]])

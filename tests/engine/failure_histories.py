"""Random requests under a random engine in which random calls fail: `python -m tests.engine.failure_histories`.

A call that fails once, before or behind what it does, must not be seen in any output. A request at which the same call
fails again and again ends with an error, alone. Whatever fails, no block is lost, and a draft model that is the target
has all of its drafts accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tqdm import tqdm

from specpaged import LLM, SamplingParams
from specpaged.config import BY_HALVES
from specpaged.engine.detokenizer import IncrementalDetokenizer
from specpaged.engine.engine import Engine
from tests import toys
from tests.engine.test_engine import make_llm

MAX_MODEL_LEN = 80
BYTES_PER_TOKEN = 512  # of a toy model's KV
TEXTS = ["the", "e", "qu", "never that"]


class Sabotage(Exception):
    """What an injected failure raises."""


@dataclass
class Saboteur:
    """Wraps what an engine calls, and raises now and then."""

    rng: random.Random
    engine: Engine
    num_left: int  # failures still to come
    chance: float  # of a call
    focus: str | None = None  # the only point that fails; None: all do
    poisoned: str | None = None  # a request at which `poison` fails whenever it has num_outputs tokens
    poison: str = "score"
    num_outputs: int = 0
    failed: Counter = field(default_factory=Counter)

    def points(self) -> dict[str, tuple[Any, str]]:
        """What may fail: an object, and its method."""
        engine = self.engine
        step = engine.speculative_step
        points = {
            "schedule": (engine.scheduler, "schedule"),
            "fork": (engine.target.kv_cache, "copy_blocks"),
            "place": (engine.kv_layout, "place"),
            "score": (step, "score"),
            "pass": (engine.target, "forward"),
            "greedy passes": (engine.target, "greedy"),
            "verify": (step, "verify"),
            "commit": (step, "commit"),
            "realign": (engine.kv_layout, "realign"),
            "reserve": (engine.scheduler, "reserve_drafts"),
            "finish": (engine.scheduler, "finish"),
            "make room": (engine.scheduler, "_make_room"),
            "truncate": (engine.kv_layout.new_table(engine.allocator, 1), "truncate"),
            "advance": (engine.kv_layout.new_table(engine.allocator, 1), "advance"),
            "draft passes": (engine.target, "greedy_steps"),
            "mark cached": (engine.allocator, "mark_cached"),
        }
        if step.drafter is not None:
            points |= {"propose": (step.drafter, "propose"), "forget": (step.drafter, "forget")}
        if engine.prefix_cache is not None:
            points["publish"] = (engine.prefix_cache, "publish")
        return points

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Meanwhile calls of the engine's classes may fail."""
        with contextlib.ExitStack() as stack:
            for name, (owner, method) in self.points().items():
                honest = getattr(type(owner), method)
                stack.enter_context(patch.object(type(owner), method, self._failing(name, honest)))
            append = IncrementalDetokenizer.append
            stack.enter_context(patch.object(IncrementalDetokenizer, "append", self._detokenizing(append)))
            yield

    def _failing(self, name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: Any, *arguments: Any, **options: Any) -> Any:
            if name == self.poison and self._holds_poisoned(arguments[0]):
                self.failed["poison"] += 1
                raise Sabotage(f"poison at {name}")
            fails = self.focus in (None, name) and self.num_left > 0 and self.rng.random() < self.chance
            before = self.rng.random() < 0.5 or name == "mark cached"  # which sets one bit: done is done
            if fails:
                self.num_left -= 1
                self.failed[name] += 1
            if fails and before:
                raise Sabotage(f"before {name}")
            result = honest(owner, *arguments, **options)
            if fails:
                raise Sabotage(f"behind {name}")
            return result

        return call

    def _holds_poisoned(self, argument: Any) -> bool:
        """Of what `score` or `verify` is given."""
        entries = getattr(argument, "entries", argument)
        return any(
            entry.sequence.request_id == self.poisoned and len(entry.sequence.output_token_ids) >= self.num_outputs
            for entry in entries
        )

    def _detokenizing(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        def append(detokenizer: IncrementalDetokenizer, token_id: int) -> Any:
            if self.poison == "detokenizer" and self.poisoned in self.engine.requests:
                for sequence in self.engine.requests[self.poisoned].sequences:
                    if sequence.stop_checker._detokenizer is detokenizer:
                        self.failed["poison"] += 1
                        raise Sabotage("poison at detokenizer")
            return honest(detokenizer, token_id)

        return append


def random_params(rng: random.Random) -> dict[str, Any]:
    """Of all samplers."""
    temperature = rng.choice([0, 0, 0.8, 1.0])
    return {
        "temperature": temperature,
        "seed": rng.randrange(100),
        "max_tokens": rng.choice([1, 2, 9, 24, 40]),
        "n": 1 if temperature == 0 else rng.choice([1, 3]),
        "logprobs": rng.choice([None, None, 2]),
        "prompt_logprobs": rng.choice([None, None, None, 1]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
        "top_k": rng.choice([0, 0, 5]),
        "top_p": rng.choice([1.0, 1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
        "stop": rng.choice([[], [], TEXTS[:1], TEXTS]),
        "stop_token_ids": rng.choice([[], [5, 6, 7], list(range(20, 60))]),
        "ignore_eos": rng.random() < 0.5,
    }


def random_llm(rng: random.Random, pair: toys.Pair, schedule: str = "continuous") -> tuple[LLM, bool]:
    """An engine with hardly more memory than one sequence needs; and whether its draft is its target."""
    k, block_size = rng.choice([0, 1, 3, 5]), rng.choice([1, 4, 16])
    k = k or int(schedule == "overlap")  # which is for who drafts
    kind = rng.choice(["draft", "draft", "target", "ngram"])
    num_pools = 2 if k and kind != "ngram" else 1
    num_blocks = -(-MAX_MODEL_LEN // block_size) + rng.choice([0, 2, 20])
    speculative: dict[str, Any] = {}
    if kind == "ngram":
        speculative = {"model": None, "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    elif kind == "target":
        speculative = {"numerics": "exact"}
    llm = make_llm(
        pair,
        k=k,
        draft=pair.target if kind == "target" else None,
        speculative=speculative,
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([1, 2, 5, 8]),
        max_num_batched_tokens=rng.choice([8, 20, 200]),
        enable_prefix_caching=rng.random() < 0.6,
        schedule=schedule,
        kv_cache_memory_bytes=num_blocks * block_size * BYTES_PER_TOKEN * num_pools,
    )
    return llm, kind == "target"


def outcome(output: Any) -> tuple:
    """All that plain decoding decides."""
    completions = [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
    return output.error, output.prompt_logprobs, completions


def stepped(engine: Engine) -> dict[str, Any]:
    """The outputs of a step, by request; none of one that was made to fail twice."""
    try:
        outputs = engine.step()
    except RuntimeError as error:
        if not isinstance(error.__cause__, Sabotage):
            raise
        outputs = []
    engine.check_integrity()
    return {output.request_id: output for output in outputs}


def finish(engine: Engine) -> dict[str, Any]:
    """Steps to the end of all requests."""
    outputs = {}
    for _ in range(3000):
        if not engine.has_unfinished_requests:
            return outputs
        outputs |= stepped(engine)
    raise AssertionError(f"requests {sorted(engine.requests)} do not end")


def run_history(
    seed: int, pair: toys.Pair, plain: LLM, num_requests: int = 6, num_after: int = 3, schedule: str = "continuous"
) -> Counter:
    """One history; how often what failed in it. AssertionError where an output is not what it has to be."""
    rng = random.Random(seed)
    llm, draft_is_target = random_llm(rng, pair, schedule)
    engine = llm.engine
    prompts = toys.prompts(num_requests + num_after, seed=rng.randrange(1000), shortest=1, longest=40)
    beginning = prompts[0]["prompt_token_ids"]  # something to find in the cache
    prompts[1], prompts[num_requests] = {"prompt_token_ids": [*beginning, 1, 2]}, prompts[0]
    params = [SamplingParams(**random_params(rng)) for _ in prompts]
    expected = [plain.generate(*request, use_tqdm=False)[0] for request in zip(prompts, params, strict=True)]

    def add(i: int) -> None:
        own = params[i]
        if rng.random() < 0.25:
            own = SamplingParams(**{**vars_of(own), "extra_args": {"num_speculative_tokens": 0}})
        engine.add_request(str(i), prompts[i]["prompt_token_ids"], own)

    saboteur = Saboteur(
        rng, engine, num_left=rng.choice([1, 1, 2, 4]), chance=rng.choice([0.05, 0.2, 0.5]),
        poisoned=str(rng.randrange(num_requests)) if rng.random() < 0.4 else None,
        poison=rng.choice(["score", "verify", "detokenizer"]), num_outputs=rng.choice([0, 1, 5]),
    )  # fmt: skip
    saboteur.focus = rng.choice([None, *saboteur.points()])
    outputs: dict[str, Any] = {}
    with saboteur.at_work():
        for i in range(num_requests):
            add(i)
            for _ in range(rng.randrange(4)):
                if engine.has_unfinished_requests:
                    outputs |= stepped(engine)
        outputs |= finish(engine)
    assert engine.allocator.num_held == 0
    for i in range(num_requests, len(prompts)):
        add(i)
    outputs |= finish(engine)
    assert engine.allocator.num_held == 0
    assert set(outputs) == {str(i) for i in range(len(prompts))}
    for i, plainly in enumerate(expected):
        output = outputs[str(i)]
        if output.error is None:
            assert outcome(output) == outcome(plainly), f"request {i}"
        else:
            # A pass that fails for all, if for another one's sake, then for this one alone, has failed for it twice.
            twice = sum(saboteur.failed[name] for name in ("score", "pass", "greedy passes", "verify", "poison")) > 1
            poisoned = str(i) == saboteur.poisoned and "Sabotage: poison at" in output.error
            assert poisoned or (twice and "Sabotage: be" in output.error), f"request {i}: {output.error}"
            for completion, whole in zip(output.outputs, plainly.outputs, strict=True):
                assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    if draft_is_target:
        assert engine.metrics.acceptance_rate in (None, 1.0)
    return saboteur.failed


def vars_of(params: SamplingParams) -> dict[str, Any]:
    """The arguments that make these params."""
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def main() -> None:
    """Many histories, with progress and a last line of JSON. Exit status 1 if any is not what it has to be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--schedule", default="continuous", choices=["continuous", *BY_HALVES])
    arguments = parser.parse_args()
    logging.getLogger("specpaged").setLevel(logging.CRITICAL)
    counts, wrong = Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        pair = toys.save_pair(Path(folder), with_tokenizer=True)
        plain = make_llm(pair, k=0, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
        for seed in tqdm(range(arguments.first_seed, arguments.first_seed + arguments.histories), unit="history"):
            try:
                counts += run_history(seed, pair, plain, schedule=arguments.schedule)
            except Exception as error:
                wrong.append(seed)
                tqdm.write(f"history {seed}: {type(error).__name__}: {error}")
    print(json.dumps({"histories": arguments.histories, "failures": dict(counts.most_common()), "wrong": wrong}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

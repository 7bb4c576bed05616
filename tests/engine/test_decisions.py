"""Whatever is decided about drafts, outputs are those of plain decoding; and what is told of them is true."""

from __future__ import annotations

import random
import time
from functools import partial
from types import SimpleNamespace

import pytest

from specpaged import SamplingParams
from specpaged.drafting.draft import Draft
from specpaged.engine import draft_planner
from specpaged.engine.draft_planner import DraftPlanner, evidence_of
from specpaged.speculation.acceptance import logit
from specpaged.speculation.controller import Plan
from specpaged.speculation.stop_rule import StopRule
from tests import toys
from tests.engine.test_engine import generate, make_llm, token_ids
from tests.heads_world import heads_llm, plain_llm

PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, top_k=20, repetition_penalty=1.2, max_tokens=25, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, extra_args={"num_speculative_tokens": 2}),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, extra_args={"num_speculative_tokens": 0}),
]


class Whim:
    """Decides by chance whatever may be decided, and keeps what it is told."""

    looks_in = 2  # in every second step of a plan without drafts

    def __init__(self, seed, looks_back=True, num_steps=(1, 1, 1, 1, 3, 8)):
        self.rng = random.Random(seed)
        self.looks_back = looks_back
        self.num_steps = num_steps
        self.outcomes = []
        self.num_looks = self.num_looks_again = self.num_rules = self.num_trials = 0
        self.costs = SimpleNamespace(draft=True)  # drafts cost something, so that plans without any look back
        self.forgotten = set()

    def plan(self, candidates, num_steps):
        plan = self._plan(candidates, num_steps)
        plan.num_steps = self.rng.choice(self.num_steps)  # it stands so long, whoever goes
        return plan

    def _plan(self, candidates, num_steps):
        assert num_steps > 0
        rng, draws = self.rng, self.rng.random()
        self.forgotten -= {candidate.sequence for candidate in candidates}  # back from a preemption
        counts = [rng.randint(0, candidate.most) if draws < 0.7 else 0 for candidate in candidates]
        if rng.random() < 0.25:
            self.num_trials += 1
            return Plan(counts, is_trial=True, tries_rows=True)
        may_look = [i for i, candidate in enumerate(candidates) if candidate.most and candidate.lag > 1]
        looks = [i for i in may_look if not counts[i] and rng.random() < 0.3] if self.looks_back else []
        glances = [i for i in looks if candidates[i].may_glance and rng.random() < 0.5]
        self.num_looks += len(looks)
        num_drafting = sum(map(bool, counts))
        if not num_drafting or rng.random() < 0.5:
            return Plan(counts, looks, glances=glances)
        self.num_rules += 1
        gains = [rng.random() for _ in range(num_drafting)]
        rule = StopRule(1.0, [0.0] * 16, [rng.uniform(-2, 2)] * num_drafting, gains, 0.1, rng.random() * num_drafting)
        return Plan(counts, looks, rule, [rng.randint(0, count) for count in counts], glances=glances)

    def look(self, candidates, num_steps):
        assert num_steps > 0
        looks = [i for i, c in enumerate(candidates) if self.looks_back and c.most and c.lag > 1]
        looks = [i for i in looks if self.rng.random() < 0.5]
        self.num_looks_again += len(looks)
        return looks, [i for i in looks if candidates[i].may_glance and self.rng.random() < 0.5]

    def selects(self):
        return self.rng.random() < 0.8

    def select(self, sequences, evidence):
        return [self.rng.randint(0, len(of_draft)) for of_draft in evidence]

    def observe_drafts(self, sequence, num_accepted, num_rejected, evidence=None):
        assert sequence not in self.forgotten
        assert num_rejected in (0, 1)
        assert evidence is None or num_accepted + num_rejected <= len(evidence)
        self.outcomes += [True] * num_accepted + [False] * num_rejected

    def forget(self, sequence):
        self.forgotten.add(sequence)

    def __getattr__(self, name):
        return lambda *_: None  # what passes take


@pytest.fixture(autouse=True)
def _looks_again_often(monkeypatch):
    """Whenever a Whim says so."""
    monkeypatch.setattr(draft_planner, "_LOOKING_AGAIN", (0.0, 1.0, 1, 1))


def with_whim(llm, seed, **arguments):
    whim = Whim(seed, **arguments)
    llm.engine.speculative_step.planner = planner_of(whim)
    return whim


def planner_of(whim):
    """A planner of which a test fails where its controller does."""
    return DraftPlanner(Outspoken(whim))


class Outspoken:
    """A controller whose failures end the test: else nobody fails for what a controller does."""

    def __init__(self, controller):
        self.controller = controller

    def __getattr__(self, name):
        value = getattr(self.controller, name)

        def ask(*arguments):
            try:
                return value(*arguments)
            except Exception as error:
                pytest.fail(f"{name}: {error!r}")

        return ask if callable(value) else value


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("draft_model", {}),
        ("draft_model", {"max_num_batched_tokens": 16, "max_num_seqs": 3}),  # prefill in chunks, passes of few tokens
        ("draft_model", {"kv_cache_memory_bytes": 1024 * 16 * 12, "max_model_len": 96}),  # preempted
        ("draft_model", {"enable_prefix_caching": True}),
        ("ngram", {}),
        ("suffix", {}),
        ("custom", {}),
    ],
    ids=["draft model", "chunks", "preemption", "prefix cache", "ngram", "suffix", "custom"],
)
def test_outputs_do_not_depend_on_what_is_decided(toy_pair, seed, method, arguments):
    prompts = [{"prompt_token_ids": [7, 8, 9] * 6}, *toys.prompts(len(PARAMS) - 1, seed=seed)]
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts, [as_plain(params) for params in PARAMS]))
    speculative = {"num_speculative_tokens": "auto"}
    of_model = method == "draft_model"
    if not of_model:
        speculative |= {"method": method, "model": None}
    if method == "custom":
        speculative["drafter"] = "tests.drafting.test_custom:Repeats"
    llm = make_llm(toy_pair, speculative=speculative, **arguments)
    whim = with_whim(llm, seed, **({} if of_model else {"looks_back": False, "num_steps": (1, 1, 3)}))
    for _ in range(2):  # the second time, prompts may be found in the cache
        assert token_ids(generate(llm, prompts, PARAMS)) == expected
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.failed_steps == llm.metrics.failed_proposals == 0
    assert whim.outcomes
    assert (whim.num_looks > 0 and whim.num_looks_again > 0) or not of_model
    assert whim.num_rules > 0
    assert whim.num_trials > 0


@pytest.mark.parametrize("method", ["eagle3", "clover"])
def test_nor_do_they_with_heads(target, heads, method):
    prompts = toys.prompts(len(PARAMS), seed=2)
    expected = token_ids(generate(plain_llm(target), prompts, [as_plain(params) for params in PARAMS]))
    llm = heads_llm(target, method, heads[method], "auto")
    whim = Whim(7, looks_back=False)
    llm.engine.speculative_step.planner = DraftPlanner(Outspoken(whim), follows_target=True)
    assert token_ids(generate(llm, prompts, PARAMS)) == expected
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.failed_steps == llm.metrics.failed_proposals == 0
    assert whim.outcomes


def test_ranks_that_plan_unlike_one_another_all_do_what_the_first_one_has_planned(toy_pair):
    """What it has said is said again to one that decides, and selects, by another whim."""
    prompts = toys.prompts(len(PARAMS))
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts, [as_plain(params) for params in PARAMS]))
    agreed, counts = [], []
    for seed in (1, 2):
        llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"})
        whim, heard = with_whim(llm, seed), iter(agreed)
        if seed == 1:
            llm.engine.speculative_step.agree = lambda said: agreed.append([list(of) for of in said]) or agreed[-1]
        else:
            llm.engine.speculative_step.agree = lambda said, heard=heard: next(heard)
        assert token_ids(generate(llm, prompts, PARAMS)) == expected
        assert llm.metrics.failed_steps == llm.metrics.failed_proposals == 0
        counts.append((llm.metrics.draft_tokens, llm.metrics.steps))
        assert whim.num_trials > 0
    assert next(heard, None) is None
    assert counts[0] == counts[1]
    plans = [said for said in agreed if len(said) == 5 and len(said[4]) == 1 and not any(said[3])]
    assert any(tries == [1] and any(counts) and not looks for counts, looks, _, _, tries in plans), "none tried rows"


@pytest.mark.parametrize("first_fails", [False, True])
@pytest.mark.parametrize("k", [2, "auto"])
def test_ranks_of_which_one_has_failed_to_draft_draft_for_the_same_ones(target, heads, k, first_fails):
    """With heads, which from then on lack hidden states there; it is told what the first one has said.

    Of those whose states the first one lacks, nobody is asked for drafts that it could not add its own to.
    """
    prompts = toys.prompts(3, seed=2)
    expected = token_ids(generate(plain_llm(target), prompts, PARAMS[0]))
    agreed = []
    for is_first in (True, False):
        fails = is_first == first_fails
        llm, heard = heads_llm(target, "eagle3", heads["eagle3"], k), iter(agreed)
        step = llm.engine.speculative_step
        if k == "auto":
            step.planner = DraftPlanner(Whim(7, looks_back=False), follows_target=True)
        honest, calls = step.drafter.propose, []

        def propose(*args, fails=fails, honest=honest, calls=calls):
            calls.append(None)
            if fails and len(calls) == 2:
                raise MemoryError("of one rank")
            return honest(*args)

        step.drafter.propose = propose
        if is_first:
            step.agree = lambda said: agreed.append([list(of) for of in said]) or agreed[-1]
        else:
            step.agree = lambda said, heard=heard: [of for _, of in zip(said, next(heard), strict=True)]
        assert token_ids(generate(llm, prompts, PARAMS[0])) == expected
        assert (llm.metrics.failed_steps, llm.metrics.failed_proposals) == (0, fails)
    assert next(heard, None) is None
    assert len(agreed) > 8
    plans = [said for said in agreed if len(said) == 5]  # of "auto" alone
    assert any(any(counts) for counts, *_ in plans[2:]) != first_fails or k == 2


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_under_rejection_nothing_is_decided_by_what_was_drawn(toy_pair, method, verification):
    speculative = {"num_speculative_tokens": "auto", "verification": verification, "method": method}
    speculative |= {} if method == "draft_model" else {"model": None}
    controller = make_llm(toy_pair, speculative=speculative).engine.speculative_step.planner.controller
    assert controller.by_evidence == (verification == "coupled")


@pytest.mark.parametrize("speculative", [{"num_speculative_tokens": "auto"}, {"selection": "tetris"}], ids=str)
def test_outputs_are_plain_decodings_with_the_controllers_that_ship(toy_pair, speculative):
    prompts = toys.prompts(len(PARAMS), seed=4)
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts, [as_plain(params) for params in PARAMS]))
    llm = make_llm(toy_pair, k=3, speculative=speculative, enable_prefix_caching=True)
    planner = llm.engine.speculative_step.planner
    if planner.costs is not None:  # whatever passes of toys take, it is to draft
        planner.clock.is_deaf = True
        for passes, seconds in ((planner.costs.target, 1.0), (planner.costs.draft, 1e-3)):
            passes.seconds = [seconds] * len(passes.seconds)
    assert token_ids(generate(llm, prompts, PARAMS)) == expected
    metrics = llm.metrics
    assert 0 < metrics.accepted_tokens < metrics.draft_tokens <= metrics.proposed_tokens
    if "selection" in speculative:
        assert 0 < metrics.draft_tokens < metrics.proposed_tokens  # 3 and 2 more are drafted, 3 in the mean verified
        assert metrics.token_efficiency == metrics.accepted_tokens / metrics.proposed_tokens


def as_plain(params):
    return SamplingParams(**{**vars(params), "extra_args": None})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_that_is_the_target_is_right_wherever_it_drafts_or_looks_back(toy_pair, temperature):
    """Also of drafts that nobody verified. Looking back, it meets the noise that the tokens have met.

    And nothing is told of rows that were tried, which are no drafts of its.
    """
    llm = make_llm(toy_pair, draft=toy_pair.target, speculative={"num_speculative_tokens": "auto", "numerics": "exact"})
    whim = with_whim(llm, 5, num_steps=[1])  # what came of drafts is told with the next plan
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=20, ignore_eos=True) for i in range(4)]
    generate(llm, toys.prompts(4), params)
    assert whim.num_looks > 0
    assert whim.num_trials > 0
    assert llm.metrics.acceptance_rate == 1.0
    assert len(whim.outcomes) > llm.metrics.draft_tokens  # those that were left out among them
    assert all(whim.outcomes)


def test_auto_decides_by_measured_costs_and_decodes_as_without_drafts(tokenizer_pair, tmp_path, monkeypatch):
    """What was measured is kept: the second engine finds it."""
    monkeypatch.setenv("SPECPAGED_CACHE", str(tmp_path))
    prompts = toys.prompts(5)
    expected = token_ids(generate(make_llm(tokenizer_pair, k=0), prompts, PARAMS[0]))
    costs = []
    for _ in range(2):
        llm = make_llm(tokenizer_pair, speculative={"num_speculative_tokens": "auto"})
        costs.append(llm.engine.speculative_step.planner.controller.costs.as_dict())
        assert token_ids(generate(llm, prompts, PARAMS[0])) == expected
    assert costs[0] == costs[1]
    assert len(list(tmp_path.glob("costs-*.json"))) == 1
    assert "decided in every step" in str(llm.report)
    planner = llm.engine.speculative_step.planner
    planner.outcomes.tell()
    assert planner.controller.num_requests == 0


def test_a_plan_does_not_outlive_the_kv_of_its_sequences(toy_pair):
    """Whoever gave up their KV have to catch up: what was planned before is asked anew, though they are the same."""
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"})
    planner, asked = llm.engine.speculative_step.planner, []
    planner.controller.plan = lambda candidates, num_steps: asked.append(0) or Plan([2] * len(candidates), num_steps=16)
    for i, prompt in enumerate(toys.prompts(2)):
        llm.engine.add_request(str(i), prompt["prompt_token_ids"], PARAMS[0])
    for _ in range(3):
        llm.engine.step()
    sequences = list(planner._standing.sequences)
    num_asked = len(asked)
    planner.plan(sequences)
    assert len(asked) == num_asked
    planner.forget(sequences[0])
    assert planner.plan(sequences[1:]).num_draft_tokens == [2]
    assert len(asked) == num_asked  # for the others it still holds
    planner.plan(sequences)
    assert len(asked) == num_asked + 1


def test_a_controller_is_told_what_passes_proposals_and_steps_without_drafts_take(toy_pair):
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"})
    whim, told = Whim(1), {"observe_target": [], "observe_proposal": [], "observe_rest": []}
    for name, calls in told.items():
        setattr(whim, name, lambda *arguments, of=calls: of.append(arguments))
    llm.engine.speculative_step.planner = planner_of(whim)
    start = time.perf_counter()
    generate(llm, toys.prompts(4), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    wall = time.perf_counter() - start
    assert all(told.values())
    assert any(shape.num_rows > shape.num_seqs for shape, _ in told["observe_target"])
    spent = [seconds for _, seconds in told["observe_target"]] + [seconds for seconds, *_ in told["observe_rest"]]
    spent += [x for _, seconds, _, rest, _ in told["observe_proposal"] for x in (seconds, rest)]
    rests = [rest for *_, rest, _ in told["observe_proposal"]]  # 0 where sequences have changed meanwhile
    assert sum(seconds == 0 for seconds in spent) == rests.count(0) < len(rests)
    assert min(spent) >= 0
    assert sum(spent) < wall


@pytest.mark.parametrize(("temperature", "looks", "deepest"), [(0.0, False, 4), (0.9, False, 1), (0.0, True, 1)])
def test_plans_that_are_deep_for_the_sake_of_a_rule_are_not_where_nobody_asks_it(toy_pair, temperature, looks, deepest):
    """Sampled drafts are made without it, and all where somebody sampled looks back beside them."""
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"})
    whim, lengths = Whim(1), []

    def plan(candidates, num_steps):
        counts = [4] * len(candidates)
        if looks and len(counts) > 1:
            counts[-1] = 0
        num_rows = sum(map(bool, counts))
        never = StopRule(1.0, [0.0] * 16, [0.0] * num_rows, [1.0] * num_rows, -1.0, 0.0)
        return Plan(counts, [len(counts) - 1] if num_rows < len(counts) else (), never, [int(k > 0) for k in counts])

    whim.plan = plan
    whim.selects = lambda: True
    whim.select = lambda sequences, evidence: lengths.extend(map(len, evidence)) or [*map(len, evidence)]
    llm.engine.speculative_step.planner = planner_of(whim)
    temperatures = [temperature, temperature, 0.9 if looks else temperature]
    params = [SamplingParams(max_tokens=12, temperature=of, seed=1, ignore_eos=True) for of in temperatures]
    generate(llm, toys.prompts(3), params)
    assert max(lengths) == deepest


def test_a_rule_is_asked_of_those_who_draft_though_one_more_was_to(toy_pair):
    """The first one has no room, as it ends with its next token: nobody's drafts are longer for that."""
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"})
    whim, lengths = Whim(1), []
    at_once = StopRule(1.0, [0.0] * 16, [0.0] * 3, [1.0] * 3, 0.0, 9.0)
    whim.plan = lambda candidates, num_steps: Plan(
        [4] * len(candidates), (), at_once.of_rows(range(len(candidates))), [4] * len(candidates)
    )
    whim.selects = lambda: True
    whim.select = lambda sequences, evidence: lengths.append([*map(len, evidence)]) or lengths[-1]
    llm.engine.speculative_step.planner = planner_of(whim)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 12, 12)]
    generate(llm, toys.prompts(3), params)
    assert [0, 1, 1] in lengths
    assert max(map(max, lengths)) == 1


@pytest.mark.controllers_may_fail
def test_nobody_fails_for_a_controller_that_does(toy_pair, monkeypatch, caplog):
    prompts = toys.prompts(4)
    expected = token_ids(generate(make_llm(toy_pair, k=0), prompts, PARAMS[0]))
    llm = make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"})
    whim = Whim(3)
    llm.engine.speculative_step.planner = DraftPlanner(whim)

    def failing(honest, *arguments):
        if whim.rng.random() < 0.3:
            raise KeyError("whim")
        return honest(*arguments)

    for name in ("plan", "select", "observe_drafts", "forget", "observe_target"):
        monkeypatch.setattr(whim, name, partial(failing, getattr(whim, name)), raising=False)
    assert token_ids(generate(llm, prompts, PARAMS[0])) == expected
    assert llm.metrics.draft_tokens > 0
    assert llm.metrics.failed_steps == 0
    assert "controller of drafts failed" in caplog.text


def test_auto_is_refused_where_layouts_are_compared(toy_pair):
    with pytest.raises(ValueError, match=r"num_speculative_tokens'\]='auto' is for schedule='continuous'"):
        make_llm(toy_pair, speculative={"num_speculative_tokens": "auto"}, schedule="eqspec")


def test_evidence_is_what_a_drafter_knows():
    assert evidence_of(Draft([5, 6], [-0.1, float("-inf")]))[1] == logit(0.0)
    assert evidence_of(Draft([5, 6, 7], num_matched=2)) == [-1.0] * 3
    assert evidence_of(Draft([5], num_matched=9)) == [3.0]


def test_of_who_has_ended_it_is_told_how_much_of_its_max_tokens_came(toy_pair):
    """Not of who only gives up its KV, nor of who fails."""
    told = []
    llm = make_llm(
        toy_pair, speculative={"num_speculative_tokens": "auto"}, kv_cache_memory_bytes=1024 * 16 * 12, max_model_len=96
    )
    llm.engine.speculative_step.planner.controller.observe_end = lambda *counts: told.append(counts)
    params = [SamplingParams(temperature=0, max_tokens=30 + i, ignore_eos=True) for i in range(5)]
    generate(llm, toys.prompts(5), params)
    assert llm.metrics.preemptions > 0
    llm.engine.speculative_step.planner.outcomes.tell()
    assert sorted(told) == [(30 + i, 30 + i) for i in range(5)]

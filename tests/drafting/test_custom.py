"""Drafters of somebody else's: how they are made, and that whatever they propose costs drafts at most."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from specpaged import LLM, SamplingParams, SpeculativeConfig
from specpaged.drafting.base import Drafter, DraftRow
from specpaged.drafting.checked import CheckedDrafter, DraftError
from specpaged.drafting.custom import DrafterContext
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.drafting.ngram import NgramDrafter
from specpaged.modeling.forward_output import HiddenStatesRequest
from specpaged.modeling.pair import ModelPair
from specpaged.sampling.batch import SamplingBatch
from specpaged.sampling.request import SamplingRequest
from tests import toys
from tests.engine.test_engine import make_llm, token_ids

HERE = "tests.drafting.test_custom"


class Repeats(Drafter):
    """Proposes the sequence's newest token again."""

    def __init__(self, context, **options):
        self.context, self.options = context, options

    def propose(self, rows, sampling, stop_rule=None):
        drafts = [NO_DRAFT] * len(sampling.requests)
        for row in rows:
            drafts[row.request_idx] = Draft(row.sequence.token_ids[-1:] * row.num_draft_tokens)
        return drafts

    class Within:
        """A drafter that derives from nothing, within another class."""

        def __init__(self, context):
            pass

        def propose(self, rows, sampling):
            return [NO_DRAFT] * len(sampling.requests)

        def forget(self, sequence):
            pass


def custom_llm(pair, drafter, k=4, **arguments):
    speculative = {"method": "custom", "model": None, "drafter": drafter} | arguments.pop("speculative", {})
    return make_llm(pair, k=k, speculative=speculative, **arguments)


def prompts_and_params():
    prompts = [*toys.prompts(5), {"prompt_token_ids": [7] * 12}]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    sampled = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(3)]
    return prompts, [greedy, *sampled, greedy, greedy]


@pytest.fixture(scope="module")
def plain(toy_pair):
    return token_ids(make_llm(toy_pair, k=0).generate(*prompts_and_params(), use_tqdm=False))


NONSENSE = {
    "a token beyond the vocabulary": lambda rows, good: [Draft([toys.VOCAB_SIZE])] * len(good),
    "a token far beyond it": lambda rows, good: [Draft([2**70])] * len(good),
    "a negative token": lambda rows, good: [Draft([-1])] * len(good),
    "a float": lambda rows, good: [Draft([1.5])] * len(good),
    "a bool": lambda rows, good: [Draft([True])] * len(good),
    "text": lambda rows, good: [Draft("ab")] * len(good),
    "a tensor": lambda rows, good: [Draft(torch.tensor([1, 2]))] * len(good),
    "too many tokens": lambda rows, good: [Draft([1] * 40)] * len(good),
    "too few drafts": lambda rows, good: good[1:],
    "too many drafts": lambda rows, good: [*good, NO_DRAFT],
    "nothing": lambda rows, good: None,
    "lists": lambda rows, good: [[1]] * len(good),
    "no list": lambda rows, good: iter(good),
    "log-probabilities of nobody": lambda rows, good: [Draft([1], [])] * len(good),
    "a log-probability of NaN": lambda rows, good: [Draft([1], [float("nan")])] * len(good),
    "log-probabilities of text": lambda rows, good: [Draft([1], ["-1"])] * len(good),
    "no length of a match": lambda rows, good: [Draft([1], num_matched="long")] * len(good),
    "an error": lambda rows, good: 1 / 0,
    "an error without words": lambda rows, good: next(iter(())),
}


@pytest.mark.parametrize("k", [4, "auto"])
@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_costs_drafts_and_nothing_else(toy_pair, plain, caplog, nonsense, k):
    """One proposal in three is nonsense: nobody ends for it, and the others are verified as ever."""

    class Talks(Repeats):
        num_calls = 0

        def propose(self, rows, sampling, stop_rule=None):
            good = super().propose(rows, sampling)
            self.num_calls += 1
            return good if self.num_calls % 3 else NONSENSE[nonsense](rows, good)

    llm = custom_llm(toy_pair, Talks, k)
    with caplog.at_level(logging.WARNING, logger="specpaged"):
        assert token_ids(llm.generate(*prompts_and_params(), use_tqdm=False)) == plain
    failed, warnings = llm.metrics.failed_proposals, [r for r in caplog.records if "proposal" in r.getMessage()]
    num_calls = llm.engine.speculative_step.drafter.drafter.num_calls
    assert failed == num_calls // 3 == len(warnings)
    assert llm.metrics.failed_steps == 0
    assert k == "auto" or (failed > 3 and llm.metrics.draft_tokens > 30)
    for warning in warnings:
        says_where = "error" in nonsense  # its own module's lines; of what breaks a rule, the rule is enough
        assert (warning.exc_info is not None and bool(warning.exc_info)) == says_where
        assert ("drafts" in warning.getMessage().split(";")[1]) or says_where
    llm.engine.check_integrity()


def test_who_cannot_forget_ends_nobody(toy_pair, plain):
    class Clings(Repeats):
        def forget(self, sequence):
            raise KeyError(sequence)

    llm = custom_llm(toy_pair, Clings)
    assert token_ids(llm.generate(*prompts_and_params(), use_tqdm=False)) == plain


def test_it_is_made_of_a_context_and_its_options(toy_pair):
    options = {"depth": 3, "names": ["a"]}
    llm = custom_llm(toy_pair, f"{HERE}:Repeats", speculative={"drafter_options": options}, max_num_seqs=5)
    made = llm.engine.speculative_step.drafter.drafter
    assert made.options == options
    assert made.context == DrafterContext(
        model=toy_pair.target, vocab_size=toys.VOCAB_SIZE, hidden_size=32, num_layers=2, max_model_len=256,
        max_num_seqs=5, max_draft_tokens=4, block_size=16, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    assert llm.engine.num_pools == 1
    assert str(llm.report).splitlines()[-1] == f"K      4, by {HERE}:Repeats"


def test_it_need_not_derive_from_anything_and_may_be_within_a_class(toy_pair):
    llm = custom_llm(toy_pair, f"{HERE}:Repeats.Within")
    assert isinstance(llm.engine.speculative_step.drafter.drafter, Repeats.Within)
    llm.generate(*prompts_and_params(), use_tqdm=False)
    assert llm.metrics.failed_proposals == 0


def test_who_derives_from_drafter_has_to_write_propose_alone():
    drafter = Repeats(None)
    assert (drafter.hidden_states, drafter.looks_back, drafter.stops, drafter.in_rounds) == (None, False, False, None)
    assert drafter.forget("nobody") is None


def test_it_is_asked_for_nothing_but_drafts(toy_pair):
    """Ours might draft in calls of several rounds: not here, where nobody could look at what comes of it."""
    llm = custom_llm(toy_pair, lambda _: NgramDrafter(1, 2))
    drafter = llm.engine.speculative_step.drafter
    assert (drafter.looks_back, drafter.in_rounds) == (False, None)


def test_a_stop_rule_comes_to_who_stops_alone():
    given = []

    class Listens(Repeats):
        def propose(self, rows, sampling, *rule):
            given.append(rule)
            return super().propose(rows, sampling)

    rows, sampling = [], SamplingBatch([], 9, "cpu")
    for stops in (False, True):
        drafter = Listens(None)
        drafter.stops = stops
        CheckedDrafter(drafter, 9, False).propose(rows, sampling, "rule")
    assert given == [(), ("rule",)]


class MustGiveLogits(Repeats):
    hidden_states = HiddenStatesRequest()


class MustGiveLayers(Repeats):
    hidden_states = HiddenStatesRequest(layer_inputs=(0, 2))


class Says(Repeats):
    hidden_states = ("last",)


class Refuses(Repeats):
    def __init__(self, context):
        raise RuntimeError("no weights\nfor this target")


class Abstract(Drafter):
    def __init__(self, context):
        pass


class Forgets:
    def __init__(self, context):
        pass

    def forget(self, sequence):
        pass


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("no_such.module:Name", "cannot be imported (ModuleNotFoundError: No module named 'no_such')"),
        (f"{HERE}:NoSuch", f"cannot be imported (AttributeError: module '{HERE}' has no attribute 'NoSuch')"),
        (f"{HERE}:HERE", "is no class, but str"),
        (f"{HERE}:MustGiveLogits", "(ValueError: HiddenStatesRequest() asks for none; None does that)"),
        (f"{HERE}:MustGiveLayers", "(ValueError: layer_inputs must name layers 0 .. 1 of the model, got (0, 2))"),
        (f"{HERE}:Says", "(ValueError: ('last',) is no HiddenStatesRequest)"),
        (f"{HERE}:Refuses", "cannot be made with drafter_options={} (RuntimeError: no weights)"),
        (f"{HERE}:Abstract", "cannot be made with drafter_options={} (TypeError: Can't instantiate abstract class"),
        (f"{HERE}:Forgets", "is no drafter: Forgets has no method 'propose'"),
        (json.dumps.__module__ + ":dumps", "cannot be made with drafter_options={} (TypeError: "),
    ],
)
def test_what_is_no_drafter_is_refused_in_a_sentence(toy_pair, drafter, message):
    with pytest.raises(ValueError) as refused:
        custom_llm(toy_pair, drafter)
    assert str(refused.value).startswith(f"speculative_config['drafter']={drafter!r} ")
    assert message in str(refused.value)
    assert "allowed: 'package.module:Class', on Python's path" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_hidden_states_of_a_model_that_does_not_show_its_layers_are_refused(toy_pair, monkeypatch):
    def find(module):
        raise ValueError("hidden states are asked of Odd, which has no list of its layers")

    class Reads(Repeats):
        hidden_states = HiddenStatesRequest(last=True)

    monkeypatch.setattr("specpaged.modeling.transformers_source.find_decoder_layers", find)
    custom_llm(toy_pair, Reads)  # whose decoder is our own
    with pytest.raises(
        ValueError, match=r"asks for hidden_states that there are not .*: hidden states are asked of Odd"
    ):
        custom_llm(toy_pair, Reads, model_impl="transformers")


def test_a_module_that_is_not_there_is_said_before_a_model_is_loaded(toy_pair, monkeypatch):
    monkeypatch.setattr(ModelPair, "load", None)
    with pytest.raises(ValueError, match="cannot be imported"):
        custom_llm(toy_pair, "no_such.module:Name")


class Certain(Repeats):
    gives_probs = True


class Drawn(Repeats):
    """Draws uniformly."""

    gives_probs = True

    def propose(self, rows, sampling, stop_rule=None):
        drafts = super().propose(rows, sampling)
        vocab_size = self.context.vocab_size
        return [
            Draft(d.token_ids, probs=torch.full((len(d), vocab_size), 1 / vocab_size)) if d else NO_DRAFT
            for d in drafts
        ]


@pytest.mark.parametrize("drafter", [Certain, Drawn])
def test_rejection_sampling_takes_drafters_that_say_what_they_drew_from(toy_pair, plain, drafter):
    llm = custom_llm(toy_pair, drafter, speculative={"verification": "rejection"})
    outputs = token_ids(llm.generate(*prompts_and_params(), use_tqdm=False))
    assert [outputs[i] for i in (0, 4, 5)] == [plain[i] for i in (0, 4, 5)]  # greedy
    assert llm.metrics.failed_proposals == 0
    assert llm.metrics.draft_tokens > 0
    with pytest.raises(ValueError, match="Repeats' does not say that it `gives_probs`, which verification='rejection'"):
        custom_llm(toy_pair, Repeats, speculative={"verification": "rejection"})


@pytest.mark.parametrize(
    "probs",
    [
        torch.full((2, 9), 1 / 9, dtype=torch.float64),
        torch.full((1, 9), 1 / 9),
        torch.full((2, 9), 1 / 8),
        torch.full((2, 9), float("nan")),
        torch.eye(9)[[1, 3]],
        [[1 / 9] * 9] * 2,
    ],
    ids=["of another dtype", "too few", "of another sum", "NaN", "of other tokens", "a list"],
)
def test_probabilities_that_cannot_be_are_not_taken(probs):
    """What is rejected, and what comes in its place, depends on them."""

    class Draws(Drafter):
        def propose(self, rows, sampling, stop_rule=None):
            return [Draft([1, 2], probs=probs)]

    request = SamplingRequest(SamplingParams(), 0, [1], [])
    rows, sampling = [DraftRow("a", (), 0, (), 2, 0)], SamplingBatch([request], 9, "cpu")
    with pytest.raises(DraftError, match=r"^drafts\[0\].probs"):
        CheckedDrafter(Draws(), 9, wants_probs=True).propose(rows, sampling)
    (draft,) = CheckedDrafter(Draws(), 9, wants_probs=False).propose(rows, sampling)
    assert draft == Draft([1, 2])


def test_drafts_are_copies():
    """Of what the drafter goes on with, nothing is left with sequences."""
    own = [1, 2]

    class Keeps(Drafter):
        def propose(self, rows, sampling, stop_rule=None):
            return [Draft(own, is_trial=True)]

    request = SamplingRequest(SamplingParams(), 0, [1], [])
    row = DraftRow("a", (), 0, (), 2, 0)
    (draft,) = CheckedDrafter(Keeps(), 9, False).propose([row], SamplingBatch([request], 9, "cpu"))
    own[:] = [3, 4]
    assert draft == Draft([1, 2])


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "custom"}, "speculative_config['drafter']=None must be 'package.module:Class', or in Python"),
        ({"method": "custom", "drafter": "module"}, "speculative_config['drafter']='module' must be "),
        ({"method": "custom", "drafter": "a.b.C"}, "speculative_config['drafter']='a.b.C' must be "),
        ({"method": "custom", "drafter": ":C"}, "speculative_config['drafter']=':C' must be "),
        ({"method": "custom", "drafter": "a:b:C"}, "speculative_config['drafter']='a:b:C' must be "),
        ({"method": "custom", "drafter": 3}, "speculative_config['drafter']=3 must be "),
        ({"method": "custom", "drafter": "a:B", "model": "m"}, "['model']='m' is for methods 'draft_model', "),
        ({"method": "custom", "drafter": "a:B", "kv_cache_dtype": "float16"}, "method 'custom' has no KV"),
        ({"method": "custom", "drafter": "a:B", "drafter_options": [1]}, "['drafter_options']=[1] must be a mapping"),
        ({"method": "custom", "drafter": "a:B", "drafter_options": {1: 2}}, "must be a mapping whose keys are strings"),
        ({"method": "ngram", "drafter": "a:B"}, "['drafter']='a:B' is for method 'custom' alone; method='ngram'"),
        ({"drafter_options": {}}, "['drafter_options']={} is for method 'custom' alone; method='draft_model'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(speculative, message):
    with pytest.raises(ValueError) as refused:
        SpeculativeConfig.from_mapping(speculative)
    assert message in str(refused.value)


def test_where_nothing_is_drafted_nobody_is_made():
    config = {"method": "custom", "drafter": Refuses, "num_speculative_tokens": 0}
    assert LLM(speculative_config=config, max_model_len=32).engine.speculative_step.drafter is None

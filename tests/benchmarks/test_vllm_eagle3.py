"""The witness of EAGLE-3 without vLLM: what is equal, a near-tie or a fault, on proposals that are made up here."""

import copy

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.vllm_eagle3.agreement import Agreement, accepted_and_rejected, judge
from benchmarks.vllm_eagle3.of_vllm import _proposals
from benchmarks.vllm_eagle3.proposal import AS_IS, Proposal
from benchmarks.vllm_eagle3.show import is_as_wanted
from benchmarks.vllm_eagle3.variants import chosen, write_target
from specpaged.testing.heads import write_eagle3
from tests.drafting.heads_reference import eagle3_reference


def test_the_first_draft_that_differs_says_whether_it_was_a_near_tie():
    found = Agreement()
    found.add([1, 2, 3], [1, 2, 3, 4], [5.0, 5.0, 5.0, 5.0], "a")
    found.add([1, 2, 3], [1, 9, 8], [5.0, 1e-5, 5.0], "b")
    found.add([1, 2, 3], [1, 2, 8], [5.0, 1e-5, 5.0], "c")
    assert (found.steps, found.drafts, found.equal, found.near_ties, found.faults) == (3, 9, 1, 1, 1)
    assert [(entry["where"], entry["draft"], entry["tokens"]) for entry in found.differing] == [
        ("b", 1, (2, 9)),
        ("c", 2, (3, 8)),
    ]


def test_what_is_drafted_within_a_prompt_counts_only_for_what_it_was_paired_with():
    """A prompt of 5 tokens in chunks of 2, 2 and 1, and two outputs. A third was cut off by a stop."""
    token_ids = (10, 11, 12, 13, 14, 20, 21)
    seen = [("r", 3, 14, [1]), ("r", 5, 14, [2]), ("r", 6, 20, [3]), ("r", 7, 21, [4]), ("r", 8, 22, [5])]
    assert list(_proposals(AS_IS, 5, token_ids, seen)) == [
        Proposal(AS_IS, token_ids[:6], (3,), ((1, 14),)),
        Proposal(AS_IS, token_ids, (4,), ((1, 14),)),
    ]
    with pytest.raises(RuntimeError, match="drafts behind 14, not 12"):
        list(_proposals("chunks", 5, token_ids, seen))


def test_steps_behind_accepted_and_behind_rejected_drafts_are_told_from_known_tokens():
    proposals = [
        Proposal("prompts", (1, 2), (3, 4, 5, 6)),
        Proposal("prompts", (1, 2, 3, 4, 9), (8, 8, 8, 8)),  # two accepted, one rejected
        Proposal("prompts", (1, 2, 3, 4, 9, 7), (6, 5, 4, 3)),  # none accepted
        Proposal("prompts", (1, 2, 3, 4, 9, 7, 6, 5, 4, 3, 2), (1, 1, 1, 1)),  # all accepted
        Proposal(AS_IS, (1, 2, 3, 4, 9, 7, 6), (1, 1, 1, 1)),
    ]
    assert accepted_and_rejected(proposals) == (2, 2)


@pytest.fixture(scope="module")
def proposals(tmp_path_factory):
    """Paths of a target and a head, and true proposals."""
    directory = tmp_path_factory.mktemp("witness")
    target, head = str(directory / "target"), str(directory / "head")
    write_target(directory / "target", "llama", ())
    write_eagle3(head, AutoConfig.from_pretrained(target), draft_vocab_size=100)
    model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    token_ids = tuple(range(5, 17))
    made = []
    for num_known in (7, 9, 12):
        drafts = eagle3_reference(head, model, token_ids[:num_known], 4).token_ids
        made.append(Proposal("prompts", token_ids[:num_known], tuple(drafts)))
    return target, head, made


def test_true_proposals_agree_and_others_are_faults(proposals):
    target, head, made = proposals
    found = judge(target, head, made, made)
    for name in ("vLLM", "ours", "ours and vLLM"):
        assert (found[name].steps, found[name].equal) == (3, 3)
    wrong = made[1].drafts
    changed = [made[0], made[1]._replace(drafts=(*wrong[:2], wrong[2] ^ 1, wrong[3])), made[2]]
    found = judge(target, head, changed, made)
    assert (found["vLLM"].faults, found["ours"].faults, found["ours and vLLM"].faults) == (1, 0, 1)
    assert found["vLLM"].differing[0]["draft"] == 2


def test_pairs_as_they_are_in_vllm_are_the_references_too(proposals):
    target, head, made = proposals
    as_is = [proposal._replace(phase=AS_IS, paired=((3, 16),)) for proposal in made]
    found = judge(target, head, [*made, *as_is], made)
    assert found["vLLM, chunks as they are"].faults > 0
    assert found["unlike without the fault"].faults == 0


def test_a_row_is_as_wanted_only_where_all_agree_and_all_that_is_to_be_shown_has_happened():
    agreement = {"steps": 5, "faults": 0}
    compared = ("vLLM", "vLLM, chunks as they are", "ours", "ours and vLLM")
    row = {name: dict(agreement) for name in compared} | {
        "variant": "defaults", "cached_tokens": {"vllm": 64, "ours": 96}, "behind_rejected": 4, "behind_accepted": 0,
    }  # fmt: skip
    assert is_as_wanted(row)
    assert not is_as_wanted(row | {"variant": "accepted at times"})
    assert not is_as_wanted(row | {"behind_rejected": 0})
    assert not is_as_wanted(row | {"cached_tokens": {"vllm": 0, "ours": 96}})
    for name in compared:
        for wrong in ({"faults": 1}, {"steps": 0}):
            changed = copy.deepcopy(row)
            changed[name] |= wrong
            assert not is_as_wanted(changed)


def test_each_variant_runs_in_each_spelling_that_has_it():
    runs = set(chosen([]))
    assert {("fc_norm", "authors"), ("fc_norm", "speculators"), ("eagle_config", "authors")} <= {r[:2] for r in runs}
    assert ("eagle_config", "speculators") not in {r[:2] for r in runs}
    assert {r[2] for r in chosen(["all norms"])} == {"llama", "qwen3"}

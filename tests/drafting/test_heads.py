"""Heads propose what a dense reference does, through pages, chunks and rejections; and they decide nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specpaged import LLM, SamplingParams
from specpaged.modeling import pair
from specpaged.paging.page_table import DRAFT, TARGET
from specpaged.testing.heads import write_clover, write_eagle3
from tests import toys
from tests.drafting.heads_reference import CloverReference, Eagle3Reference, residual_streams
from tests.engine.test_engine import generate, token_ids
from tests.heads_world import heads_llm, plain_llm

PREEMPTING = 28 * 4 * 2048  # bytes of KV
CLEAR = 1e-3  # of logits of two tokens, from which on the most likely one is no matter of rounding
# spelling and flags of EAGLE-3's checkpoints
VARIANTS = {
    "authors": {},
    "authors, all norms": {
        "norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
        "own_embedding": False,
    },
    "in eagle_config": {"norm_before_fc": True, "aux_layers": (0, 3, 5), "in_eagle_config": True},
    "own vocabulary": {"draft_vocab_size": 40, "norm_output": True},
    "two taps": {"aux_layers": (1, 4), "fc_norm": True, "own_embedding": False},
    "speculators": {"spelling": "speculators", "draft_vocab_size": 120},
    "speculators, norm behind": {"spelling": "speculators", "norm_before_residual": False, "norm_before_fc": True},
}  # fmt: skip
METHODS = pytest.mark.parametrize("method", ["eagle3", "clover"])


def recorded(llm) -> list[tuple[list[int], list[int], list[float]]]:
    """Known tokens, drafts and log-probabilities of each greedy proposal from now on, in rounds of one call, too."""
    step, proposals = llm.engine.speculative_step, []
    propose, commit = step.drafter.propose, step.commit

    def record(rows, sampling, stop_rule=None):
        drafts = propose(rows, sampling, stop_rule)
        for row in rows:
            if row.num_draft_tokens and sampling.requests[row.request_idx].takes_argmax:
                draft = drafts[row.request_idx]
                proposals.append((list(row.sequence.token_ids), list(draft.token_ids), list(draft.logprobs)))
        return drafts

    def record_rounds(scored, verified):
        for i, entry in enumerate(scored.entries if scored.rounds is not None else ()):
            known = list(entry.sequence.token_ids)
            for of_round in scored.rounds.rounds:
                if of_round.evidence[i]:
                    drafts = of_round.drafts[i] + of_round.left_out[i]
                    proposals.append((list(known), drafts, of_round.evidence[i]))
                known += of_round.token_ids[i]
            drafts, logprobs = scored.rounds.waiting()[i]
            if drafts:
                proposals.append((known, drafts, logprobs))
        commit(scored, verified)

    step.drafter.propose, step.commit = record, record_rounds
    return proposals


def check_against_reference(reference, target, proposals):
    """Each is the reference's, up to the first near-tie."""
    assert proposals
    streams: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for known, drafted, _ in proposals:
        longest = next((tokens for tokens in streams if list(tokens[: len(known)]) == known), None)
        if longest is None:
            longest = tuple(max((k for k, *_ in proposals if k[: len(known)] == known), key=len))
            streams[longest] = residual_streams(target[1], longest)
        expected = reference.drafts(streams[longest], known, len(drafted))
        at = expected.differs_at(drafted)
        assert at is None or expected.margins[at] < CLEAR, (len(known), drafted, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_eagle3_proposes_what_a_dense_reference_does(target, tmp_path, name):
    """In chunks of prompts, behind rejections, and of prompts whose beginning is in the prefix cache."""
    path = write_eagle3(tmp_path, AutoConfig.from_pretrained(target[0]), **VARIANTS[name])
    llm = heads_llm(target, "eagle3", str(path), enable_prefix_caching=True, max_num_batched_tokens=16)
    proposals = recorded(llm)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = toys.prompts(3, shortest=20)
    again = [{"prompt_token_ids": [*p["prompt_token_ids"][:16], 7, 8]} for p in prompts]
    for batch in (prompts, prompts[::-1], again):
        assert token_ids(generate(llm, batch, params)) == token_ids(plain_llm(target).generate(batch, params))
    assert llm.metrics.failed_proposals == 0
    assert llm.metrics.draft_tokens > llm.metrics.accepted_tokens
    check_against_reference(Eagle3Reference(path, target[1]), target, proposals)


@pytest.mark.parametrize("own_embedding", [False, True])
def test_clover_proposes_what_a_dense_reference_does_by_all_of_its_heads(target, tmp_path, own_embedding):
    path = write_clover(tmp_path, AutoConfig.from_pretrained(target[0]), own_embedding=own_embedding)
    llm = heads_llm(target, "clover", str(path), k=5, enable_prefix_caching=True, max_num_batched_tokens=16)
    proposals = recorded(llm)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompts in (toys.prompts(3, shortest=20), toys.prompts(3, shortest=20)):
        assert token_ids(generate(llm, prompts, params)) == token_ids(plain_llm(target).generate(prompts, params))
    assert max(len(drafted) for _, drafted, _ in proposals) == 5
    check_against_reference(CloverReference(path, target[1]), target, proposals)


@METHODS
def test_behind_preemptions_heads_propose_what_a_dense_reference_does(target, heads, method):
    """Their KV, on which drafts of random weights depend, is made anew."""
    llm = heads_llm(target, method, heads[method], kv_cache_memory_bytes=PREEMPTING, max_num_seqs=4)
    proposals = recorded(llm)
    prompts, params = toys.prompts(5, longest=30), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert token_ids(generate(llm, prompts, params)) == token_ids(plain_llm(target).generate(prompts, params))
    assert llm.metrics.preemptions > 0
    reference = Eagle3Reference if method == "eagle3" else CloverReference
    check_against_reference(reference(heads[method], target[1]), target, proposals)


@METHODS
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_proposals_of_a_batch_are_those_of_each_sequence_alone(target, heads, method, backend):
    """Bit for bit, under numerics="exact" of the heads."""
    prompts, params = toys.prompts(5), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    of_batches = []
    for max_num_seqs in (1, 5):
        # Short calls, so that there are proposals between them.
        arguments = {"attention_backend": backend, "num_scheduler_steps": 4}
        llm = heads_llm(target, method, heads[method], max_num_seqs=max_num_seqs, **arguments)
        proposals = recorded(llm)
        generate(llm, prompts, params)
        of_batches.append({tuple(known): (drafted, logprobs) for known, drafted, logprobs in proposals})
    alone, together = of_batches
    assert len(alone) > 20
    both = set(alone) & set(together)  # not all: some are behind the end of a round that another sequence has ended
    assert len(both) > 0.9 * len(alone)
    assert {known: together[known] for known in both} == {known: alone[known] for known in both}


@METHODS
@pytest.mark.parametrize("k", [2, 4, "auto"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 24, "kv_cache_memory_bytes": PREEMPTING, "max_num_seqs": 4},
        {"enable_prefix_caching": True, "speculative": {"numerics": "fast", "kv_cache_dtype": "fp8_e4m3"}},
        {"speculative": {"verification": "greedy"}},
    ],
    ids=["plenty", "preempted", "prefix cache", "greedy"],
)
def test_outputs_are_those_of_plain_decoding(target, heads, method, k, arguments):
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=4, top_k=20, repetition_penalty=1.2, max_tokens=15, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, extra_args={"num_speculative_tokens": 2}),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, extra_args={"num_speculative_tokens": 0}),
    ]
    if arguments.get("speculative", {}).get("verification") == "greedy":
        params = [p for p in params if p.temperature == 0]
    prompts = toys.prompts(len(params), longest=50)
    as_plain = [SamplingParams(**{**vars(p), "extra_args": None}) for p in params]
    expected = token_ids(plain_llm(target, max_num_seqs=8).generate(prompts, as_plain, use_tqdm=False))
    llm = heads_llm(target, method, heads[method], k, **arguments)
    for _ in range(2):
        assert token_ids(generate(llm, prompts, params)) == expected
    assert llm.metrics.failed_proposals == 0
    assert llm.metrics.proposed_tokens > 0 or k == "auto"
    assert (llm.metrics.preemptions > 0) == ("kv_cache_memory_bytes" in arguments)


@METHODS
def test_behind_a_step_heads_have_kv_of_all_that_the_target_has_and_of_no_draft(target, heads, method, monkeypatch):
    llm = heads_llm(target, method, heads[method], num_scheduler_steps=4)
    step, num_seen = llm.engine.speculative_step, 0
    propose = step.propose

    def watched(scored, reserve):
        nonlocal num_seen
        propose(scored, reserve)
        for entry in scored.entries:
            context_lens = entry.sequence.page_table.context_lens
            if not entry.sequence.has_ended:
                assert context_lens[DRAFT] == context_lens[TARGET]
                num_seen += 1

    monkeypatch.setattr(step, "propose", watched)
    generate(llm, toys.prompts(4), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert num_seen > 10
    assert llm.metrics.rolled_back_tokens > 0


@METHODS
def test_who_lacks_hidden_states_as_a_proposal_has_failed_drafts_no_more(target, heads, method, monkeypatch):
    llm = heads_llm(target, method, heads[method], num_scheduler_steps=1)
    drafter = llm.engine.speculative_step.drafter
    propose, calls = drafter.propose, []

    def fails_once(rows, sampling, stop_rule=None):
        calls.append(rows)
        if len(calls) == 2:
            raise RuntimeError("no")
        return propose(rows, sampling, stop_rule)

    monkeypatch.setattr(drafter, "propose", fails_once)
    prompts, params = toys.prompts(2), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert token_ids(generate(llm, prompts, params)) == token_ids(plain_llm(target).generate(prompts, params))
    assert llm.metrics.failed_proposals == 1
    assert all(row.num_draft_tokens == 0 for rows in calls[2:] for row in rows)


def copying_target(path: Path) -> torch.nn.Module:
    """A target of which each token alone says what follows it: its layers add nothing.

    Embeddings are of random signs, so that none has a larger product with another one's share of a head than with its
    own.
    """
    model = toys.model(num_hidden_layers=4, tie_word_embeddings=False, eos_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn_like(model.model.embed_tokens.weight).sign())
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(path)
    return model


def as_copies(method: str, path: Path, model: torch.nn.Module) -> None:
    """Overwrite weights so that the newest token alone decides, by the target's own norm and output layer."""
    weights = load_file(path / "model.safetensors")
    hidden, much = model.config.hidden_size, 1e4
    norm, eye = model.model.norm.weight.detach().clone(), torch.eye(hidden)
    if method == "clover":
        for name, weight in weights.items():
            if name.startswith("layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        for name in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
            for part in "qk":  # which point the same way, whatever they are made of
                weights[f"{name}.{part}.weight"].zero_()
                weights[f"{name}.{part}.bias"].fill_(1.0)
            weights[f"{name}.v.weight"], weights[f"{name}.v.bias"] = much * eye, torch.zeros(hidden)
        weights["clover_norm.weight"].fill_(1.0)
        weights |= {"clover_head_mlp.weight": eye.clone(), "clover_head_mlp.bias": torch.zeros(hidden)}
        weights |= {
            "clover_head_mlp2.weight": torch.cat([0 * eye, eye], 1),
            "clover_head_mlp2.bias": torch.zeros(hidden),
        }
        weights["clover_head_norm.weight"] = norm
    else:
        layer = "midlayer.self_attn"
        shape = weights[f"{layer}.q_proj.weight"].shape  # [Hq * D, 2 * hidden], of as many heads as fit the hidden size
        picks = torch.zeros(shape)
        picks[:hidden, :hidden] = eye
        for part in "qk":
            weights[f"{layer}.{part}_proj.weight"] = 100 * picks[: len(weights[f"{layer}.{part}_proj.weight"])].clone()
        weights[f"{layer}.v_proj.weight"] = picks[: len(weights[f"{layer}.v_proj.weight"])].clone()
        weights[f"{layer}.o_proj.weight"] = much * torch.eye(hidden, shape[0])
        weights["midlayer.input_layernorm.weight"].fill_(1.0)
        weights["midlayer.mlp.down_proj.weight"].zero_()
        weights["fc.weight"].zero_()
        weights |= {"norm.weight": norm, "lm_head.weight": model.lm_head.weight.detach().clone()}
        weights.pop("embed_tokens.weight", None)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")


@METHODS
@pytest.mark.parametrize(
    "arguments",
    [{}, {"kv_cache_memory_bytes": PREEMPTING, "max_num_seqs": 4}, {"enable_prefix_caching": True}],
    ids=["plenty", "preempted", "prefix cache"],
)
def test_heads_that_copy_the_target_are_always_right(tmp_path, method, arguments):
    """At any depth, behind preemptions, prefix-cache hits and rollbacks of what comes beyond max_tokens."""
    model = copying_target(tmp_path / "target")
    write = write_eagle3 if method == "eagle3" else write_clover
    flags = {"num_key_value_heads": 4, "head_dim": 8}  # as many values as the hidden size has
    flags |= {"norm_output": True} if method == "eagle3" else {}
    path = write(tmp_path / method, model.config, **flags)
    as_copies(method, path, model)
    llm = heads_llm((str(tmp_path / "target"),), method, str(path), k=6, **arguments)
    prompts = toys.prompts(5, longest=30)
    params = [SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True) for i in range(5)]
    for _ in range(2):
        generate(llm, prompts, params)
    assert llm.metrics.draft_tokens > 100
    assert llm.metrics.acceptance_rate == 1.0
    assert llm.metrics.mean_acceptance_length > 5


@METHODS
def test_the_report_says_what_heads_hold_beside_the_target(target, heads, method):
    llm = heads_llm(target, method, heads[method])
    (_, ours), (path,) = llm.report.models, Path(heads[method]).glob("*.safetensors")
    stored = sum(tensor.numel() * 4 for tensor in load_file(path).values() if tensor.is_floating_point())
    assert stored <= ours.weight_bytes < 1.6 * stored  # rotations, and the padding of kernels' layouts
    num_layers = {"eagle3": 1, "clover": 2}[method]
    assert ours.kv_bytes_per_token == num_layers * 2 * 2 * 16 * 4
    assert ours.num_parameters == stored // 4


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported; allowed: 1"),
        ("eagle3", {"model_type": "qwen3"}, "model_type='qwen3' is not supported"),
        ("eagle3", {"architectures": ["PeagleLlamaForCausalLM"]}, "architectures='PeagleLlamaForCausalLM'"),
        ("eagle3", {"pard_token": 3}, "pard_token=3 is not supported"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "eagle_aux_hidden_state_layer_ids.*layers 0 .. 5"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": "2,3,4"}, "='2,3,4' must be a list of ints"),
        ("eagle3", {"eagle_config": [1]}, "has no eagle3 heads for this target: AttributeError"),
        ("eagle3", {"target_hidden_size": 64}, "target_hidden_size=64 must be the target's 32"),
        ("eagle3", {"vocab_size": 400}, "vocab_size=400 must be the target's 300"),
        ("eagle3", {"draft_vocab_size": 50}, r"lm_head.weight in the shape \(60, 32\); allowed: \(50, 32\)"),
        ("eagle3", {"fc_norm": True}, "the checkpoint lacks fc_norm.0.weight"),
        ("eagle3", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("eagle3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("eagle3", {"layer_types": ["sliding_attention"]}, "layer_types='sliding_attention' is not supported"),
        ("clover", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention'"),
        ("clover", {"hidden_size": 64}, "hidden_size=64 must be the target's 32"),
        ("clover", {"num_hidden_layers": 3}, "the checkpoint lacks layers.2"),
        ("clover", {"num_hidden_layers": 1}, "holds layers.1.*, which is not supported"),
    ],
)
def test_what_a_checkpoint_asks_for_that_is_not_done_is_refused_by_name(
    target, heads, tmp_path, method, change, message
):
    source = Path(heads[method])
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        heads_llm(target, method, str(tmp_path))


def test_speculators_heads_of_another_kind_of_layer_are_refused(target, tmp_path):
    write_eagle3(tmp_path, AutoConfig.from_pretrained(target[0]), spelling="speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"]["model_type"] = "qwen3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"transformer_layer_config.model_type='qwen3' is not supported"):
        heads_llm(target, "eagle3", str(tmp_path))


def test_heads_that_are_not_there_are_refused_before_the_target_is_read(target, monkeypatch, tmp_path):
    monkeypatch.setattr(pair, "load_model", None)
    with pytest.raises(ValueError, match="nowhere"):
        heads_llm(target, "eagle3", str(tmp_path / "nowhere"))


def test_heads_of_another_width_need_an_embedding_of_their_own(target, tmp_path):
    """The target's rows are of another size."""
    path = write_eagle3(tmp_path, AutoConfig.from_pretrained(target[0]), hidden_size=64)
    assert heads_llm(target, "eagle3", str(path)).engine.draft.model.hidden_size == 64
    weights = load_file(path / "model.safetensors")
    del weights["embed_tokens.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the checkpoint lacks embed_tokens.weight"):
        heads_llm(target, "eagle3", str(path))


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_where_heads_can_draft_no_token_that_is_allowed_they_draft_none(target, heads, verification):
    """A distribution of such a token is none: what is drawn from it would come too often."""
    (path,) = Path(heads["eagle3"]).glob("*.safetensors")
    offsets = load_file(path)["d2t"]
    drafted = set((offsets + torch.arange(len(offsets))).tolist())
    allowed = [token_id for token_id in range(1, toys.VOCAB_SIZE) if token_id not in drafted]
    llm = heads_llm(target, "eagle3", heads["eagle3"], speculative={"verification": verification})
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, allowed_token_ids=allowed)
    outputs = token_ids(generate(llm, toys.prompts(3), params))
    assert all(set(ids) <= set(allowed) for of_request in outputs for ids in of_request)
    assert llm.metrics.draft_tokens == llm.metrics.failed_proposals == 0


def test_heads_need_a_model_and_a_target_whose_layers_are_ours(target, heads):
    with pytest.raises(ValueError, match=r"speculative_config\['model'\]=None: method 'eagle3' needs heads"):
        LLM(target[0], speculative_config={"method": "eagle3"})
    with pytest.raises(ValueError, match="needs a target whose layers are ours: model_impl is 'transformers'"):
        heads_llm(target, "clover", heads["clover"], model_impl="transformers")
    with pytest.raises(ValueError, match=r"model 'nowhere/at/all' does not exist|is no local directory"):
        heads_llm(target, "eagle3", "/nowhere")

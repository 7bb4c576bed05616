"""`python -m benchmarks.vllm_eagle3`: what our EAGLE-3 drafter proposes, beside what vLLM's own CPU runner does.

Heads of random weights in both spellings of their checkpoints, with every norm, over toy targets. vLLM runs under its
own worker and scheduler; a hook in its process writes down each proposal. Ours runs in each way that it has. Both are
compared with a dense reference (tests/drafting/heads_reference.py), and with each other wherever both drafted behind
the same tokens: behind prompts, rejections, prefixes that were cached, and prompts that were run in chunks.

Of a prompt that is run in chunks, vLLM 0.32 pairs the features of a chunk's last token with the last token of the
prompt, not with the next one: it drafts from other KV than its heads were trained on. It runs these prompts twice: as
it is, compared with a reference that does the same; and with that token put right.

Prints a table, ends in one line of JSON, and in exit status 1 where a draft differs that was no near-tie.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from tqdm import tqdm

K = 4
MAX_TOKENS = 24  # of each output
TIE = 1e-3  # of two logits whose standard deviation is 4, in fp32
VOCAB_SIZE = 384
MAX_NUM_BATCHED_TOKENS = 128
COMMON: dict[str, Any] = {
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS, "enforce_eager": True,
    "enable_prefix_caching": True, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
TARGET = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.2, "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
FAMILIES = ("llama", "qwen3")
FAVOURED = (5, 17, 130, 301)  # that targets and heads like best, in some variants: some drafts are accepted by chance
SPELLINGS = ("authors", "speculators")
ALL_NORMS = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}
SMALLER = {"draft_vocab_size": 200}
# name -> what write_eagle3 is told in either spelling
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": SMALLER,
    "norm_before_residual": SMALLER | {"norm_before_residual": True},
    "no norm_before_residual": SMALLER | {"norm_before_residual": False},
    "norm_before_fc": SMALLER | {"norm_before_fc": True},
    "fc_norm": SMALLER | {"fc_norm": True},
    "norm_output": SMALLER | {"norm_output": True},
    "all norms": SMALLER | ALL_NORMS,
    "the target's vocabulary": {},
    "the target's embedding": SMALLER | {"own_embedding": False},
    "taps at 0, 3, 6": SMALLER | {"aux_layers": (0, 3, 6)},
    "taps named 5, 2, 4": SMALLER | {"aux_layers": (5, 2, 4)},
    "another rope_theta": SMALLER | {"rope_theta": 500.0},
    "another width": SMALLER | {"hidden_size": 96},
    "accepted at times": SMALLER | {"favoured_token_ids": FAVOURED},
    "eagle_config": SMALLER | {"norm_before_fc": True, "aux_layers": (1, 2, 5), "in_eagle_config": True},
}
PHASES = ("prompts", "cached prefixes", "chunks")
AS_IS = "chunks, as it is"  # of vLLM
# Of our engine: several rounds in one call where it can, one in a call, and Python around torch's kernels.
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_scheduler_steps": 1}, {"attention_backend": "torch"})


class Proposal(NamedTuple):
    """What was drafted behind `known` tokens, in which phase."""

    phase: str
    known: tuple[int, ...]
    drafts: tuple[int, ...]
    paired: tuple[tuple[int, int], ...] = ()  # position and token, where features were paired with another one


@dataclass
class Agreement:
    """Proposals compared, and how they came out."""

    steps: int = 0
    drafts: int = 0
    equal: int = 0  # steps
    near_ties: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)  # where, and which tokens; near-ties, too

    @property
    def faults(self) -> int:
        return self.steps - self.equal - self.near_ties

    def summary(self) -> dict[str, Any]:
        """As JSON has it: at most the first three that differ."""
        return asdict(self) | {"faults": self.faults, "differing": self.differing[:3]}

    def add(self, drafts: Sequence[int], others: Sequence[int], margins: Sequence[float], where: str) -> None:
        """Count a step: `margins` say of each draft how far it was above the second most likely token."""
        pairs = list(zip(drafts, others, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        self.steps += 1
        self.drafts += len(pairs)
        if at is None:
            self.equal += 1
            return
        self.near_ties += margins[at] < TIE
        self.differing.append({"where": where, "draft": at, "tokens": pairs[at], "margin": margins[at]})


def prompts_of(phase: str) -> list[list[list[int]]]:
    """Batches that are run one behind the other."""
    import torch

    generator = torch.Generator().manual_seed(PHASES.index(phase))

    def prompt(length: int) -> list[int]:
        return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()

    if phase == "prompts":  # each batch in one pass
        return [[prompt(length) for length in (3, 5, 8, 13, 21, 34)], [prompt(100)]]
    if phase == "cached prefixes":
        first = prompt(110)
        return [[first], [first[:104] + prompt(9), first], [first[:70] + prompt(40)]]
    return [[prompt(length) for length in (150, 290, 200)]]


def write_target(path: Path, family: str, favoured: Sequence[int]) -> None:
    """A toy of random weights; rows of its output layer but those of `favoured` are small, if there are any."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TARGET))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
        if favoured:
            others = [i for i in range(VOCAB_SIZE) if i not in favoured]
            model.lm_head.weight[others] *= 0.15
    model.save_pretrained(path)


def vllm_proposals(target: str, head: str) -> tuple[list[Proposal], dict[str, int]]:
    """Of vLLM's own worker; and how many prompt tokens were cached, by phase."""
    from vllm import LLM, SamplingParams

    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": K}
    # Blocks of vLLM's CPU attention are multiples of 32.
    llm = LLM(target, skip_tokenizer_init=True, block_size=32, speculative_config=speculative, **COMMON)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    propose = runner.drafter.propose
    seen: list[tuple[str, int, int, list[int]]] = []  # request, known tokens, the newest, drafts
    puts_right = False

    def recorded(**arguments: Any) -> Any:
        newest, indices = arguments["next_token_ids"].clone(), arguments["token_indices_to_sample"]
        if indices is None:
            indices = arguments["common_attn_metadata"].query_start_loc[1:] - 1
        # Features of the last token that stands, at this position, are paired with the newest one, behind it.
        num_known = (arguments["target_positions"][indices] + 2).tolist()
        requests = runner.input_batch.req_ids[: len(num_known)]
        for i, (request, count) in enumerate(zip(requests, num_known, strict=True)):
            if puts_right and count <= runner.requests[request].num_prompt_tokens:
                newest[i] = runner.requests[request].get_token_id(count - 1)
        drafts = propose(**(arguments | {"next_token_ids": newest}))
        seen.extend(zip(requests, num_known, newest.tolist(), drafts.tolist(), strict=True))
        return drafts

    runner.drafter.propose = recorded
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    proposals: list[Proposal] = []
    cached: dict[str, int] = {}
    for phase in (*PHASES, AS_IS):
        puts_right = phase == "chunks"
        assert llm.reset_prefix_cache()
        for batch in prompts_of("chunks" if phase == AS_IS else phase):
            seen.clear()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
            cached[phase] = cached.get(phase, 0) + sum(output.num_cached_tokens or 0 for output in outputs)
            for output in outputs:
                token_ids = (*output.prompt_token_ids, *output.outputs[0].token_ids)
                # Within vLLM's engine a request's name goes on behind that which it was given.
                of_request = [entry for entry in seen if entry[0].rpartition("-")[0] == output.request_id]
                proposals += _proposals(phase, len(output.prompt_token_ids), token_ids, of_request)
    return proposals, cached


def _proposals(
    phase: str, num_prompt: int, token_ids: tuple[int, ...], seen: Sequence[tuple[str, int, int, list[int]]]
) -> Iterator[Proposal]:
    """Of one request, and behind its outputs alone: what is drafted within a prompt is never verified."""
    paired: dict[int, int] = {}
    for _, num_known, newest, drafts in seen:
        if num_known > len(token_ids):
            continue  # behind a stop
        if newest != token_ids[num_known - 1]:
            if phase != AS_IS or num_known > num_prompt:
                raise RuntimeError(f"vLLM drafts behind {newest}, not {token_ids[num_known - 1]}, in {phase!r}")
            paired[num_known - 2] = newest
        if num_known > num_prompt:
            yield Proposal(phase, token_ids[:num_known], tuple(drafts), tuple(paired.items()))


def our_proposals(target: str, head: str) -> tuple[list[Proposal], dict[str, int]]:
    """Of this project's engine, which runs the same batches in each way that it has."""
    from specpaged import LLM, SamplingParams

    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": K}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    proposals: list[Proposal] = []
    cached: dict[str, int] = {}
    for way in WAYS:
        engine = LLM(target, block_size=16, speculative_config=speculative, **(COMMON | way)).engine
        for phase in PHASES:
            cached[phase] = 0
            for batch in prompts_of(phase):
                for i, ids in enumerate(batch):
                    engine.add_request(str(i), ids, params)
                pending: dict[tuple[int, ...], tuple[int, ...]] = {}
                while engine.has_unfinished_requests:
                    for output in engine.step():
                        if output.error is not None:
                            raise RuntimeError(output.error)
                        cached[phase] += output.metrics.cached_prompt_tokens
                    sequences = (sequence for request in engine.requests.values() for sequence in request.sequences)
                    # What the next step verifies, whoever has drafted it.
                    pending |= {tuple(s.token_ids): tuple(s.draft.token_ids) for s in sequences if s.draft}
                proposals += [Proposal(phase, known, drafts) for known, drafts in pending.items()]
        if engine.metrics.failed_proposals:
            raise RuntimeError("a proposal of ours failed")
    return proposals, cached


def judge(target: str, head: str, theirs: Sequence[Proposal], ours: Sequence[Proposal]) -> dict[str, Agreement]:
    """vLLM with the reference, vLLM as it is with a reference that pairs as it does, ours with either."""
    from transformers import AutoModelForCausalLM

    from tests.drafting.heads_reference import Eagle3Reference, ReferenceDrafts, residual_streams

    model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    reference = Eagle3Reference(head, model)
    all_known = {proposal.known for proposal in (*theirs, *ours)}
    longest = [known for known in all_known if not any(known == k[: len(known)] and known != k for k in all_known)]
    streams = {known: residual_streams(model, known) for known in longest}
    expected: dict[tuple[Any, ...], ReferenceDrafts] = {}

    def drafts_of(known: tuple[int, ...], paired: tuple[tuple[int, int], ...] = ()) -> ReferenceDrafts:
        if (known, paired) not in expected:
            states = next(states for tokens, states in streams.items() if tokens[: len(known)] == known)
            expected[known, paired] = reference.drafts(states, known, K, dict(paired))
        return expected[known, paired]

    names = ("vLLM", "vLLM, chunks as they are", "unlike without the fault", "ours", "ours and vLLM")
    found = {name: Agreement() for name in names}
    of_vllm = {}
    for proposal in theirs:
        where = f"{proposal.phase}, {len(proposal.known)} known"
        is_as_is = proposal.phase == AS_IS
        of_reference = drafts_of(proposal.known, proposal.paired)
        name = "vLLM, chunks as they are" if is_as_is else "vLLM"
        found[name].add(of_reference.token_ids, proposal.drafts, of_reference.margins, where)
        if is_as_is:
            right = drafts_of(proposal.known)
            found["unlike without the fault"].add(right.token_ids, proposal.drafts, right.margins, where)
        else:
            of_vllm[proposal.phase, proposal.known] = proposal.drafts
    for proposal in ours:
        where = f"{proposal.phase}, {len(proposal.known)} known"
        of_reference = drafts_of(proposal.known)
        found["ours"].add(of_reference.token_ids, proposal.drafts, of_reference.margins, where)
        others = of_vllm.get((proposal.phase, proposal.known))
        if others is not None:
            found["ours and vLLM"].add(proposal.drafts, others, of_reference.margins, where)
    return found


def accepted_and_rejected(proposals: Sequence[Proposal]) -> tuple[int, int]:
    """How many steps were behind one in which drafts were accepted, and behind one in which one was rejected."""
    steps = {proposal.known: proposal.drafts for proposal in proposals if proposal.phase != AS_IS}
    num_accepted = num_rejected = 0
    for known in steps:
        for count in range(1, K + 2):  # tokens of the step before
            drafts = steps.get(known[:-count])
            if drafts is not None and drafts[: count - 1] == known[-count:-1]:
                num_accepted += count > 1
                num_rejected += count <= len(drafts)
                break
    return num_accepted, num_rejected


def in_a_process(function: Any, *arguments: Any) -> Any:
    """Its result: engines of vLLM do not share a process well. Each is forked from one that has imported vLLM."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "specpaged.llm"])
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def run_variant(directory: Path, name: str, spelling: str, family: str) -> dict[str, Any]:
    """One row of the table."""
    from transformers import AutoConfig

    from specpaged.testing.heads import write_eagle3

    options = VARIANTS[name]
    favoured = options.get("favoured_token_ids", ())
    target = directory / (f"{family}-favours" if favoured else family)
    if not target.exists():
        write_target(target, family, favoured)
    head = directory / f"{family}-{spelling}-{name.replace(' ', '-')}"
    write_eagle3(head, AutoConfig.from_pretrained(target), spelling=spelling, num_speculative_tokens=K, **options)
    paths = (str(target), str(head))
    theirs, their_cached = in_a_process(vllm_proposals, *paths)
    ours, our_cached = in_a_process(our_proposals, *paths)
    found = in_a_process(judge, *paths, theirs, ours)
    num_accepted, num_rejected = accepted_and_rejected(theirs)
    return {
        "variant": name, "spelling": spelling, "target": family,
        "cached_tokens": {"vllm": their_cached["cached prefixes"], "ours": our_cached["cached prefixes"]},
        "behind_accepted": num_accepted, "behind_rejected": num_rejected,
        "drafted_tokens": len({token_id for proposal in theirs for token_id in proposal.drafts}),
        **{name: agreement.summary() for name, agreement in found.items()},
    }  # fmt: skip


def chosen(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Variant, spelling and target: each variant in both spellings, over one target or the other; a few over both."""
    for i, name in enumerate(VARIANTS):
        if names and name not in names:
            continue
        spellings = SPELLINGS if not VARIANTS[name].get("in_eagle_config") else SPELLINGS[:1]
        on_both = name in ("defaults", "all norms", "accepted at times")
        for j, spelling in enumerate(spellings):
            for family in FAMILIES if on_both else (FAMILIES[(i + j) % 2],):
                yield name, spelling, family


def main(
    variants: Annotated[list[str] | None, typer.Argument(help="Names of variants; default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the JSON.")] = None,
) -> None:
    """Run all variants."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in variants or []:
        if name not in VARIANTS:
            raise typer.BadParameter(f"{name!r} is unknown; allowed: {', '.join(VARIANTS)}")
    runs = list(chosen(variants or []))
    with tempfile.TemporaryDirectory() as directory:
        run = partial(run_variant, Path(directory))
        rows = [run(*each) for each in tqdm(runs, unit="variant")]
    print_table(rows)
    from benchmarks.environment import environment

    results = environment(int(os.environ["OMP_NUM_THREADS"])) | {
        "study": "vllm_eagle3",
        "settings": {"num_speculative_tokens": K, "max_tokens": MAX_TOKENS, "tie": TIE},
        "rows": rows,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "vllm_eagle3.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    raise typer.Exit(0 if all(is_as_wanted(row) for row in rows) else 1)


def is_as_wanted(row: dict[str, Any]) -> bool:
    """No draft differs but at near-ties, and what the row is to show has happened."""
    compared = ("vLLM", "vLLM, chunks as they are", "ours", "ours and vLLM")
    agree = all(row[name]["faults"] == 0 < row[name]["steps"] for name in compared)
    happened = all(row["cached_tokens"].values()) and row["behind_rejected"] > 0
    return agree and happened and (row["behind_accepted"] > 0 or row["variant"] != "accepted at times")


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line for each variant."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="EAGLE-3 drafts: ours, vLLM's own CPU runner's, and a dense reference's",
        caption="proposals that are equal / compared (near-ties); chunks as they are: vLLM's, with the reference that "
        "pairs as it does, and those unlike the reference that does not",
    )
    names = ("variant", "spelling", "target", "ours = vLLM", "vLLM = ref.", "ours = ref.", "chunks as they are")
    for name in (*names, "unlike", "cached", "accepted", "rejected"):
        table.add_column(name, justify="left" if name in names[:3] else "right")
    for row in rows:
        compared = ("ours and vLLM", "vLLM", "ours", "vLLM, chunks as they are")
        unlike = row["unlike without the fault"]
        table.add_row(
            row["variant"], row["spelling"], row["target"],
            *(f"{row[name]['equal']}/{row[name]['steps']} ({row[name]['near_ties']})" for name in compared),
            str(unlike["steps"] - unlike["equal"]), str(row["cached_tokens"]["vllm"]),
            str(row["behind_accepted"]), str(row["behind_rejected"]),
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)

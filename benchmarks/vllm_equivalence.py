"""`python -m benchmarks.vllm_equivalence`: the worker's outputs, prompt by prompt, in every way that vLLM may run them.

Each configuration of vLLM with our worker against the project's own engine and against plain decoding under the same
worker; and against vLLM's own CPU worker, where a difference is judged as `specpaged verify` does: a near-tie or a
fault. Prints a table, ends in one line of JSON, and in exit status 1 where an output differs.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

MAX_MODEL_LEN = 1024
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "pattern": "^[A-Za-z ]{1,12}$"},
        "year": {"type": "integer", "minimum": 0, "maximum": 3000},
    },
    "required": ["title", "year"],
    "additionalProperties": False,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LOOKUPS = {"lookups": "suffix,ngram"}
FIXED = {"additional_config": {"specpaged": {"adaptive": False}}}  # else, few or no drafts where they do not pay
# Room for 480 prompts: a second pass over more than the pool holds finds nothing.
PREFIX_CACHE = {"enable_prefix_caching": True, "block_size": 16, "kv_cache_memory_bytes": 3 << 30}
COMPACT = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
SAMPLED = {"temperature": 0.8, "seed": 7, "n": 2}
PREEMPTION = {"num_gpu_blocks_override": 160, "block_size": 16}
# name -> (K, or vLLM's speculative_config), vLLM's arguments, sampling parameters, and what it is compared with
Configuration = tuple[int | dict[str, Any], dict[str, Any], dict[str, Any], str]
CONFIGURATIONS: dict[str, Configuration] = {
    "plain": (0, {}, {}, "standalone"),
    "K = 1": (1, FIXED, {}, "standalone"),
    "K = 4": (4, FIXED, {}, "standalone"),
    "K = 7": (7, FIXED, {}, "standalone"),
    "decided": (4, {}, {}, "standalone"),
    "ngram": (NGRAM, FIXED, {}, "standalone"),
    "ngram, decided": (NGRAM, {}, {}, "standalone"),
    "lookups beside": (4, {"additional_config": {"specpaged": {"adaptive": False} | LOOKUPS}}, {}, "standalone"),
    "lookups beside, decided": (4, {"additional_config": {"specpaged": LOOKUPS}}, {}, "standalone"),
    "chunks of 64": (4, {"max_num_batched_tokens": 64} | FIXED, {}, "standalone"),
    "prefix cache": (4, PREFIX_CACHE | FIXED, {}, "standalone"),
    "preemption": (4, PREEMPTION | FIXED, {}, "standalone"),
    "sampled, plain": (0, {}, SAMPLED, "standalone, sampled"),
    "sampled": (4, FIXED, SAMPLED, "sampled, plain"),
    "sampled, lookups": (4, {"additional_config": {"specpaged": LOOKUPS}}, SAMPLED, "sampled, plain"),
    "JSON, plain": (0, COMPACT, {"structured_outputs": SCHEMA}, "JSON, plain"),
    "JSON": (4, COMPACT | FIXED, {"structured_outputs": SCHEMA}, "JSON, plain"),
}
REFERENCES = {"standalone": {}, "standalone, sampled": SAMPLED}


def configurations(heads: Path | None, parts: str) -> dict[str, Configuration]:
    """Those whose names hold one of the parts, which ";" separates; with heads, and with suffixes where vLLM can.

    BadParameter: there are no such heads, a part is in no name, or a name is compared with one that is left out.
    """
    drafters: dict[str, dict[str, Any]] = {}
    if find_spec("arctic_inference") is not None:
        drafters["suffix"] = {"method": "suffix"}
    if heads is not None:
        drafters["eagle3"] = {"method": "eagle3", "model": str(heads / "eagle3")}
        drafters["clover"] = {"method": "custom_class", "model": f"clover:{heads / 'clover'}"}
    for method in ("eagle3", "clover") if heads is not None else ():
        if not (heads / method / "config.json").is_file():
            raise typer.BadParameter(f"--heads: {str(heads)!r} has no folder {method!r} with a config.json")
    found = dict(CONFIGURATIONS)
    for name, of in drafters.items():
        speculation = of | {"num_speculative_tokens": 4}
        found[name] = (speculation, FIXED, {}, "standalone")
        found[f"{name}, decided"] = (speculation, {}, {}, "standalone")
        found[f"{name}, prefix cache"] = (speculation, PREFIX_CACHE | FIXED, {}, "standalone")
        found[f"{name}, preemption"] = (speculation, PREEMPTION | FIXED, {}, "standalone")
        found[f"{name}, sampled"] = (speculation, FIXED, SAMPLED, "standalone, sampled")
        if name != "suffix":
            beside = {"additional_config": {"specpaged": {"lookups": "suffix"}}}
            found[f"suffix beside {name}"] = (speculation, beside, {}, "standalone")
    for part in parts.split(";"):
        if not any(part in name for name in found):
            raise typer.BadParameter(f"--only: {part!r} is in no name of a configuration; there are {'; '.join(found)}")
    wanted = {name: of for name, of in found.items() if any(part in name for part in parts.split(";"))}
    for name, (*_, compared_with) in wanted.items():
        if compared_with not in wanted.keys() | REFERENCES.keys():
            raise typer.BadParameter(f"--only: {name!r} is compared with {compared_with!r}, which is left out")
    return wanted


def encoded(path: str | None, max_tokens: int, num_prompts: int | None) -> list[list[int]]:
    """The prompts, cut to what fits."""
    from specpaged.config import EMBEDDED_TARGET
    from specpaged.modeling.loading import load_tokenizer
    from specpaged.prompts import clip, evenly_spread, load_prompts

    records = evenly_spread(load_prompts(path), num_prompts)
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    return clip([tokenizer.encode(record.text) for record in records], MAX_MODEL_LEN - max_tokens)[0]


def vllm_engine(speculation: int | dict[str, Any], max_num_seqs: int, ours: bool = True, **arguments: Any) -> Any:
    """Of vLLM, in this process."""
    from vllm import LLM

    from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET
    from specpaged.vllm_plugin import WORKER_CLS

    defaults: dict[str, Any] = {
        "dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": max_num_seqs, "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False,
    }  # fmt: skip
    if ours:
        defaults["worker_cls"] = WORKER_CLS
    if isinstance(speculation, dict):
        defaults["speculative_config"] = speculation
    elif speculation:
        draft = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": speculation}
        defaults["speculative_config"] = draft
    return LLM(EMBEDDED_TARGET, **(defaults | arguments))


def run_vllm(
    configuration: Configuration, prompts: list[list[int]], max_tokens: int, max_num_seqs: int, ours: bool
) -> dict[str, Any]:
    """One configuration: its outputs and what was seen on the way."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.core.sched.scheduler import Scheduler

    speculation, arguments, given, _ = configuration
    params = {"temperature": 0, "max_tokens": max_tokens} | given
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(json=params["structured_outputs"])
    preempted, preempt = [], Scheduler._preempt_request

    def counting(self: Scheduler, *positional: Any, **options: Any) -> Any:
        preempted.append(1)
        return preempt(self, *positional, **options)

    Scheduler._preempt_request = counting
    llm = vllm_engine(speculation, max_num_seqs, ours, **arguments)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    passes = 2 if arguments.get("enable_prefix_caching") else 1
    for _ in range(passes):
        outputs = llm.generate(requests, SamplingParams(**params), use_tqdm=False)
    token_ids = [list(completion.token_ids) for output in outputs for completion in output.outputs]
    found: dict[str, Any] = {"token_ids": token_ids, "preemptions": len(preempted)}
    found["cached_tokens"] = sum(output.num_cached_tokens or 0 for output in outputs)
    if "structured_outputs" in given:
        # Of the tokens: vLLM's text repeats a prompt that was cut within a character.
        tokenizer = llm.get_tokenizer()
        found["valid"] = sum(is_valid(tokenizer.decode(ids, skip_special_tokens=True)) for ids in token_ids)
    if ours:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        worker.model_runner.check_integrity()
        found["acceptance"] = worker.model_runner.metrics.acceptance_rate
    return found


def is_valid(text: str) -> bool:
    """Whether the text is a JSON object by SCHEMA, whose longest object is far shorter than max_tokens."""
    from jsonschema import ValidationError, validate

    try:
        validate(json.loads(text), SCHEMA)
    except (ValueError, ValidationError):
        return False
    return True


def top_two(prompts: list[list[int]], ours: bool) -> list[Any]:
    """The two most likely next tokens of each prompt, plainly decoded under vLLM's worker or ours."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import SamplingParams

    from specpaged.comparison.equivalence import TopTwo

    llm = vllm_engine(0, 8, ours)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    tops = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
        row = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: -item[1].logprob)[:2]
        tops.append(TopTwo(tuple(i for i, _ in row), tuple(entry.logprob for _, entry in row)))
    return tops


def standalone(prompts: list[list[int]], max_tokens: int, max_num_seqs: int, given: dict[str, Any]) -> list[list[int]]:
    """The project's own engine, speculating."""
    from specpaged import LLM, SamplingParams

    llm = LLM(max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs)
    params = SamplingParams(**({"temperature": 0, "max_tokens": max_tokens} | given))
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def near_ties(prompts: list[list[int]], references: list[list[int]], outputs: list[list[int]]) -> tuple[int, int]:
    """How many outputs part from vLLM's own at a near-tie, and how many otherwise."""
    from specpaged.comparison.equivalence import compare, is_near_tie

    mismatches = compare(references, outputs)
    common = [prompts[m.prompt_idx] + references[m.prompt_idx][: m.position] for m in mismatches]
    if not common:
        return 0, 0
    theirs, ours = (in_a_process(top_two, common, of_ours) for of_ours in (False, True))
    near = [is_near_tie(m, a, b, "float32") for m, a, b in zip(mismatches, theirs, ours, strict=True)]
    return sum(near), len(near) - sum(near)


def in_a_process(function: Any, *arguments: Any) -> Any:
    """Its result: engines of vLLM do not share a process well."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main(
    prompts: Annotated[str | None, typer.Option(help="JSON lines in Spec-Bench form; default: the embedded.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="An evenly spread selection of them.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each output.")] = 64,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 16,
    heads: Annotated[Path | None, typer.Option(help="Folder of the folders eagle3 and clover, to draft by.")] = None,
    only: Annotated[str, typer.Option(help="Names of configurations, or parts of them, separated by ';'.")] = "",
    out: Annotated[Path | None, typer.Option(help="A folder for the JSON.")] = None,
) -> None:
    """Run all configurations."""
    wanted = configurations(heads, only)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ids = encoded(prompts, max_tokens, num_prompts)
    rows: list[dict[str, Any]] = []
    references: dict[str, list[list[int]]] = {}
    alone = sorted({of[3] for of in wanted.values()} & REFERENCES.keys())
    own = None
    with tqdm(total=len(alone) + len(wanted) + ("plain" in wanted), unit="configuration") as bar:
        for name in alone:
            references[name] = in_a_process(standalone, ids, max_tokens, max_num_seqs, REFERENCES[name])
            bar.update()
        for name, configuration in wanted.items():
            found = in_a_process(run_vllm, configuration, ids, max_tokens, max_num_seqs, True)
            outputs = references[name] = found.pop("token_ids")
            reference = configuration[3]
            identical = sum(a == b for a, b in zip(outputs, references[reference], strict=True))
            rows.append({"configuration": name, "with": reference, "outputs": len(outputs), "identical": identical}
                        | found)  # fmt: skip
            bar.update()
        if "plain" in wanted:
            theirs = in_a_process(run_vllm, wanted["plain"], ids, max_tokens, max_num_seqs, False)["token_ids"]
            near, faults = near_ties(ids, theirs, references["plain"])
            same = len(theirs) - near - faults
            own = {"outputs": len(theirs), "identical": same, "near_ties": near, "faults": faults}
            bar.update()
    print_table(rows, own)
    from benchmarks.environment import environment

    results = environment(int(os.environ["OMP_NUM_THREADS"])) | {
        "study": "vllm_equivalence",
        "settings": {"max_tokens": max_tokens, "max_num_seqs": max_num_seqs,
                     "prompts": "embedded" if prompts is None else Path(prompts).name},
        "rows": rows,
        "vllm_own_worker": own,
    }  # fmt: skip
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "vllm_equivalence.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    as_wanted = all(row["preemptions"] > 0 for row in rows if "preemption" in row["configuration"])
    as_wanted &= all(row["cached_tokens"] > 0 for row in rows if "prefix cache" in row["configuration"])
    as_wanted &= all(row[name] == row["outputs"] for row in rows for name in ("identical", "valid") if name in row)
    as_wanted &= own is None or (own["faults"] == 0 and own["near_ties"] <= 0.005 * own["outputs"])
    raise typer.Exit(0 if as_wanted else 1)


def print_table(rows: list[dict[str, Any]], own: dict[str, int] | None) -> None:
    """One line for each configuration."""
    from rich.console import Console
    from rich.table import Table

    caption = own and (
        f"vLLM's own worker, plain: {own['identical']} of {own['outputs']} identical, {own['near_ties']} near-ties, "
        f"{own['faults']} faults"
    )
    table = Table(title="vLLM with specpaged's worker", caption=caption)
    for name in ("configuration", "compared with", "identical", "preemptions", "cached tokens", "accepted", "valid"):
        table.add_column(name, justify="left" if name in ("configuration", "compared with") else "right")
    for row in rows:
        accepted = "" if row.get("acceptance") is None else f"{row['acceptance']:.1%}"
        table.add_row(
            row["configuration"], row["with"], f"{row['identical']}/{row['outputs']}", str(row["preemptions"]),
            str(row["cached_tokens"]), accepted, str(row.get("valid", "")),
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

"""The command line: `specpaged generate | verify`."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specpaged.config import DTYPES, NUMERICS
from specpaged.prompts import PromptRecord, clip, evenly_spread, load_prompts

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()
errors = Console(stderr=True)

Model = Annotated[str | None, typer.Option(help="Target: local path or hub id. Default: the embedded pair.")]
DraftModel = Annotated[str | None, typer.Option(help="Draft: local path or hub id.")]
Prompts = Annotated[str | None, typer.Option(help="JSON lines in Spec-Bench form; - reads standard input.")]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="An evenly spread selection of the prompts.")]
MaxPromptTokens = Annotated[int | None, typer.Option(min=1, help="Clip longer prompts; default: what fits.")]
K = Annotated[int, typer.Option("--num-speculative-tokens", min=0, help="Draft tokens per round; 0: plain decoding.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences in a batch.")]
MaxModelLen = Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and output. Default: the model's.")]
KVCacheMemory = Annotated[
    int | None, typer.Option("--kv-cache-memory-bytes", min=1, help="Of both pools. Default: at most 1 GiB on a CPU.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: greedy.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of sampled output; prompt i uses seed + i.")]
DType = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Numerics = Annotated[str, typer.Option(help=f"One of {', '.join(NUMERICS)}.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of a pass. Default: torch's choice.")]
Output = Annotated[Path | None, typer.Option(help="Write the completions as JSON lines.")]
AsJson = Annotated[bool, typer.Option("--json", help="End in one line of JSON.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run model code that a checkpoint brings along.")]


@dataclass(frozen=True)
class Job:
    """Prompts, ready to run: an LLM, their token ids, and one SamplingParams each."""

    llm: Any
    records: list[PromptRecord]
    token_ids: list[list[int]]
    params: list[Any]
    num_clipped: int

    @property
    def label(self) -> str:
        """How the batch is decoded."""
        llm = self.llm
        k = llm.engine.max_draft_tokens
        return f"{'speculative' if k else 'plain'}, batch of {llm.config.max_num_seqs}" + (f", K = {k}" if k else "")

    def run(self, label: str, params: Sequence[Any] | None = None, one_at_a_time: bool = False) -> Run:
        """Decode every prompt, with a progress bar."""
        from tqdm import tqdm

        params = params or self.params
        prompts = [{"prompt_token_ids": ids} for ids in self.token_ids]
        console.print(f"[dim]{label}[/]")
        start = time.perf_counter()
        if one_at_a_time:
            pairs = tqdm(list(zip(prompts, params, strict=True)), unit="prompt")
            outputs = [self.llm.generate(prompt, p, use_tqdm=False)[0] for prompt, p in pairs]
        else:
            outputs = self.llm.generate(prompts, params)
        return Run(label, outputs, time.perf_counter() - start)


@dataclass(frozen=True)
class Run:
    """Outputs of one way of decoding, and the wall time that they took, prefill included."""

    label: str
    outputs: list[Any]
    seconds: float

    @property
    def token_ids(self) -> list[list[int]]:
        """The first completion of every prompt."""
        return [output.outputs[0].token_ids if output.outputs else [] for output in self.outputs]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens by wall time."""
        return sum(map(len, self.token_ids)) / self.seconds


def _prepare(
    *,
    model: str | None,
    draft_model: str | None,
    prompts: str | None,
    num_prompts: int | None,
    max_prompt_tokens: int | None,
    num_speculative_tokens: int,
    max_num_seqs: int,
    max_model_len: int | None,
    kv_cache_memory_bytes: int | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    dtype: str,
    numerics: str,
    threads: int | None,
    trust_remote_code: bool,
    output: Path | None,
) -> Job:
    records = evenly_spread(load_prompts(prompts), num_prompts)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ValueError(f"--output={str(output)!r} cannot be written; allowed: a file in a directory that exists")
    import torch

    from specpaged.llm import LLM
    from specpaged.sampling_params import SamplingParams

    if threads is not None:
        torch.set_num_threads(threads)
    speculative: dict[str, Any] | None = {"num_speculative_tokens": num_speculative_tokens, "model": draft_model}
    if model is not None and draft_model is None:
        if num_speculative_tokens:
            console.print("no --draft-model: decoding plainly")
        speculative = None
    llm = LLM(
        model,
        speculative_config=speculative,
        dtype=dtype,
        numerics=numerics,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        trust_remote_code=trust_remote_code,
    )
    room = llm.config.max_model_len - max_tokens
    if room < 1:
        raise ValueError(f"--max-tokens={max_tokens} must be below max_model_len={llm.config.max_model_len}")
    if llm.tokenizer is None:
        raise ValueError(f"--model={model!r} has no tokenizer; allowed: a checkpoint with one, to read text prompts")
    token_ids, num_clipped = clip(
        [llm.tokenizer.encode(record.text) for record in records], min(max_prompt_tokens or room, room)
    )
    base = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    params = [base if seed is None else replace(base, seed=seed + i) for i in range(len(records))]
    console.print(str(llm.report), highlight=False, markup=False)
    lengths = sorted(map(len, token_ids))
    console.print(
        f"prompts {len(records)}, {lengths[0]}-{lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), "
        f"{num_clipped} clipped",
        highlight=False,
    )
    return Job(llm, records, token_ids, params, num_clipped)


@app.command()
def generate(
    model: Model = None,
    draft_model: DraftModel = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    max_prompt_tokens: MaxPromptTokens = None,
    num_speculative_tokens: K = 5,
    max_num_seqs: MaxNumSeqs = 8,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemory = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: DType = "auto",
    numerics: Numerics = "exact",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Complete prompts in batches, speculatively."""
    arguments = {name: value for name, value in locals().items() if name != "as_json"}
    job = _checked(_prepare, **arguments)
    run = _checked(job.run, "generating")
    metrics = job.llm.metrics
    completions = Table("id", "completion", show_lines=True)
    for record, result in zip(job.records, run.outputs, strict=True):
        text = Text(result.error or result.outputs[0].text)  # code is full of what would pass for markup
        completions.add_row(Text(str(record.question_id)), text, style="red" if result.error else None)
    console.print(completions)
    table = Table(title=f"{len(run.outputs)} prompts, {job.label}")
    for column in ("tokens/s", "rounds", "acceptance", "mean acceptance length", "rollback"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{run.tokens_per_second:.0f}",
        str(metrics.rounds),
        _rate(metrics.acceptance_rate, ".1%"),
        _rate(metrics.mean_acceptance_length, ".2f"),
        f"{metrics.rollbacks} x, {metrics.rolled_back_tokens} tokens, {metrics.rollback_blocks_freed} blocks, "
        f"{metrics.rollback_seconds * 1e3:.1f} ms",
    )
    console.print(table)
    _write_completions(job, run, output)
    failed = [result.error for result in run.outputs if result.error]
    for error in failed:
        _print_error(error)
    if as_json:
        print(json.dumps(_environment() | {"tokens_per_second": run.tokens_per_second} | metrics.as_dict()))
    raise typer.Exit(1 if failed else 0)


@app.command()
def verify(
    model: Model = None,
    draft_model: DraftModel = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    max_prompt_tokens: MaxPromptTokens = None,
    num_speculative_tokens: K = 5,
    max_num_seqs: MaxNumSeqs = 8,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemory = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: DType = "auto",
    numerics: Numerics = "exact",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    reference: Annotated[
        str,
        typer.Option(
            help="'plain': our own plain decoding, one prompt at a time, where any "
            "difference is a fault; 'hf': transformers' generate."
        ),
    ] = "plain",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Decode every prompt plainly, one at a time, and speculatively in batches; compare token ids."""
    arguments = {name: value for name, value in locals().items() if name not in ("reference", "as_json")}
    from specpaged import reference as references

    _checked(references.check_reference, reference, temperature, seed)
    if temperature > 0 and seed is None:
        arguments["seed"] = 0  # both runs need the same seeds
    job = _checked(_prepare, **arguments)
    runs, transformers = [], None
    if reference == "plain":
        opted_out = [replace(p, extra_args={"num_speculative_tokens": 0}) for p in job.params]
        runs.append(_checked(job.run, "plain, one at a time", opted_out, one_at_a_time=True))
        runs.append(_checked(job.run, f"plain, batch of {max_num_seqs}", opted_out))
    else:
        transformers = references.TransformersReference(job.llm)
        runs.append(_checked(references.run_transformers, job, transformers, Run))
    if runs[-1].label != job.label:  # without a draft that run is done
        runs.append(_checked(job.run, job.label))
    _write_completions(job, runs[-1], output)
    mismatches = _checked(references.judge, job, runs, transformers)
    _print_verdict(job, runs, mismatches)
    faults = [m for m in mismatches if m.label == "fault"]
    num_identical = len(job.records) - len({m.prompt_idx for m in mismatches})
    if as_json:
        print(
            json.dumps(
                _environment()
                | {run.label: run.tokens_per_second for run in runs}
                | {
                    "prompts": len(job.records),
                    "identical": num_identical,
                    "near_ties": len(mismatches) - len(faults),
                    "faults": len(faults),
                    "acceptance_rate": job.llm.metrics.acceptance_rate,
                    "mean_acceptance_length": job.llm.metrics.mean_acceptance_length,
                }
            )
        )
    else:
        console.print(f"{num_identical}/{len(job.records)} outputs identical", highlight=False)
    raise typer.Exit(1 if faults else 0)


def _print_verdict(job: Job, runs: Sequence[Run], mismatches: Sequence[Any]) -> None:
    table = Table("run", "tokens/s", "against the first", "acceptance", "mean acceptance length")
    metrics = job.llm.metrics
    for run in runs:
        speculative = run.label.startswith("speculative")
        table.add_row(
            run.label,
            f"{run.tokens_per_second:.0f}",
            f"{run.tokens_per_second / runs[0].tokens_per_second:.2f}x",
            _rate(metrics.acceptance_rate, ".1%") if speculative else "",
            _rate(metrics.mean_acceptance_length, ".2f") if speculative else "",
        )
    console.print(table)
    if mismatches:
        table = Table("prompt", "first divergence", "reference, ours", "margin", "label", title="mismatches")
        for m in mismatches:
            margin = "" if m.margin is None else f"{m.margin:.2e}"
            name = Text(str(job.records[m.prompt_idx].question_id))
            table.add_row(name, str(m.position), str(m.token_ids), margin, m.label)
        console.print(table)


def _checked(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a step that checks its input: what it refuses ends the command in one sentence and exit status 2."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        _print_error(str(error))
        raise typer.Exit(2) from None


def _print_error(message: str) -> None:
    """One line, however narrow the terminal, and nothing in it taken for markup."""
    errors.print(Text.assemble(("error:", "red"), " ", message), soft_wrap=True)


def _write_completions(job: Job, run: Run, output: Path | None) -> None:
    if output is not None:
        with output.open("w", encoding="utf-8") as file:
            for record, result in zip(job.records, run.outputs, strict=True):
                file.write(json.dumps(_as_record(record, result)) + "\n")


def _rate(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _as_record(record: PromptRecord, output: Any) -> dict[str, Any]:
    entry = {"question_id": record.question_id, "category": record.category, "prompt": record.text}
    if output.error:
        return entry | {"error": output.error}
    completion = output.outputs[0]
    return entry | {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "acceptance_rate": output.metrics.acceptance_rate,
    }


def _environment() -> dict[str, Any]:
    import torch
    import transformers

    import specpaged

    return {
        "specpaged": specpaged.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }

"""The command line: `specpaged generate | verify | bench`."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specpaged.cli.bench import app as bench
from specpaged.config import ATTENTION_BACKENDS, DTYPES, MODEL_IMPLS, NUMERICS
from specpaged.prompts import PromptRecord

if TYPE_CHECKING:  # torch and transformers take seconds to import: --help does without
    from specpaged.comparison.job import Job, Run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")
console = Console()
errors = Console(stderr=True)

Model = Annotated[str | None, typer.Option(help="Target: local path or hub id. Default: the embedded pair.")]
DraftModel = Annotated[str | None, typer.Option(help="Draft: local path or hub id.")]
Prompts = Annotated[str | None, typer.Option(help="JSON lines in Spec-Bench form; - reads standard input.")]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="An evenly spread selection of the prompts.")]
MaxPromptTokens = Annotated[int | None, typer.Option(min=1, help="Clip longer prompts; default: what fits.")]
K = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        min=0,
        help="Draft tokens per round; 0: plain decoding. Default: by the number of running sequences.",
    ),
]
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
AttentionBackend = Annotated[str, typer.Option(help=f"One of {', '.join(ATTENTION_BACKENDS)}.")]
ModelImpl = Annotated[str, typer.Option(help=f"One of {', '.join(MODEL_IMPLS)}.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda[:index]'.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of a pass. Default: torch's choice.")]
Output = Annotated[Path | None, typer.Option(help="Write the completions as JSON lines.")]
AsJson = Annotated[bool, typer.Option("--json", help="End in one line of JSON.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run model code that a checkpoint brings along.")]


@app.command()
def generate(
    model: Model = None,
    draft_model: DraftModel = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    max_prompt_tokens: MaxPromptTokens = None,
    num_speculative_tokens: K = None,
    max_num_seqs: MaxNumSeqs = 8,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemory = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: DType = "auto",
    device: Device = "cpu",
    numerics: Numerics = "exact",
    attention_backend: AttentionBackend = "auto",
    model_impl: ModelImpl = "auto",
    enforce_eager: EnforceEager = False,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Complete prompts in batches, speculatively."""
    arguments = {name: value for name, value in locals().items() if name != "as_json"}
    job = _prepare(arguments)
    run = _run(job, "generating")
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
    num_speculative_tokens: K = None,
    max_num_seqs: MaxNumSeqs = 8,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemory = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: DType = "auto",
    device: Device = "cpu",
    numerics: Numerics = "exact",
    attention_backend: AttentionBackend = "auto",
    model_impl: ModelImpl = "auto",
    enforce_eager: EnforceEager = False,
    threads: Threads = 1,
    trust_remote_code: TrustRemoteCode = False,
    reference: Annotated[
        str,
        typer.Option(
            help="'plain': our own plain decoding, one prompt at a time, where any "
            "difference is a fault; 'hf': transformers' generate."
        ),
    ] = "plain",
    plain_batch: Annotated[
        bool, typer.Option("--plain-batch", help="Decode plainly in batches, too: for its speed, and compared as well.")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Decode every prompt plainly, one at a time, and speculatively in batches; compare token ids.

    One at a time they are decoded in as many processes as the CPU has cores for, --threads each.
    """
    arguments = {k: v for k, v in locals().items() if k not in ("reference", "plain_batch", "as_json")}
    from specpaged.comparison import reference as references
    from specpaged.comparison.one_at_a_time import num_processes

    _checked(references.check_reference, reference, temperature)
    if temperature > 0 and seed is None:
        arguments["seed"] = 0  # both runs need the same seeds
    job = _prepare(arguments)
    model = job.llm.engine.target.model
    processes = num_processes(len(job.token_ids), model.weight_bytes, model.device)
    console.print(f"[dim]{references.reference_label(reference, processes)}[/]")
    runs = [_checked(references.run_reference, reference, job, processes)]
    if plain_batch:
        opted_out = [replace(p, extra_args={"num_speculative_tokens": 0}) for p in job.params]
        runs.append(_run(job, f"plain, batch of {max_num_seqs}", opted_out))
    if runs[-1].label != job.label:  # without a draft that run is done
        runs.append(_run(job, job.label))
    mismatches = _checked(references.judge, reference, job, runs)
    _print_verdict(job, runs, mismatches)
    _write_completions(job, runs[-1], output)
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


def _prepare(arguments: dict[str, Any]) -> Job:
    """The job, and what there is to know of it before it runs."""
    from specpaged.comparison.job import Job

    job = _checked(Job.prepare, **arguments)
    if (
        arguments["num_speculative_tokens"] != 0
        and arguments["draft_model"] is None
        and not job.llm.engine.max_draft_tokens
    ):
        console.print("no --draft-model: decoding plainly")
    console.print(str(job.llm.report), highlight=False, markup=False)
    lengths = sorted(map(len, job.token_ids))
    console.print(
        f"prompts {len(lengths)}, {lengths[0]}-{lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), "
        f"{job.num_clipped} clipped",
        highlight=False,
    )
    return job


def _run(job: Job, label: str, *args: Any, **kwargs: Any) -> Run:
    console.print(f"[dim]{label}[/]")
    return _checked(job.run, label, *args, **kwargs)


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

"""`specpaged verify`: the token ids of plain decoding beside those of speculative batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import specpaged.cli.options as options
from specpaged.cli.job import decode, prepare, write_completions
from specpaged.cli.printing import checked, console, print_json, rate

if TYPE_CHECKING:
    from specpaged.comparison.job import Job, Run
    from specpaged.metrics import EngineMetrics

# Of a run's tokens: with fewer from drafts, those were to see what drafts come to.
_HARDLY_ANY = 0.05


def verify(
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: options.Method = None,
    drafter: options.Drafter = None,
    speculative_config: options.SpeculativeConfig = None,
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    max_prompt_tokens: options.MaxPromptTokens = None,
    num_speculative_tokens: options.K = None,
    max_num_seqs: options.MaxNumSeqs = 8,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory_bytes: options.KVCacheMemory = None,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    dtype: options.DType = "auto",
    kv_cache_dtype: options.KVCacheDType = "auto",
    draft_kv_cache_dtype: options.DraftKVCacheDType = "auto",
    schedule: options.Schedule = "continuous",
    device: options.Device = "cpu",
    numerics: options.Numerics = "exact",
    attention_backend: options.AttentionBackend = "auto",
    model_impl: options.ModelImpl = "auto",
    enforce_eager: options.EnforceEager = False,
    threads: options.Threads = 1,
    trust_remote_code: options.TrustRemoteCode = False,
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
    output: options.Output = None,
    as_json: options.AsJson = False,
) -> None:
    """Decode every prompt plainly, one at a time, and speculatively in batches; compare token ids.

    One at a time they are decoded in as many processes as the CPU has cores for, --threads each.
    """
    arguments = {k: v for k, v in locals().items() if k not in ("reference", "plain_batch", "as_json")}
    from specpaged.comparison import reference as references
    from specpaged.comparison.one_at_a_time import num_processes

    checked(references.check_reference, reference, temperature)
    if temperature > 0 and seed is None:
        arguments["seed"] = 0  # both runs need the same seeds
    job = prepare(arguments)
    checked(references.check_verification, job)
    model = job.llm.engine.target.model
    processes = num_processes(len(job.token_ids), model.weight_bytes, model.device)
    console.print(f"[dim]{references.reference_label(reference, processes)}[/]")
    runs = [checked(references.run_reference, reference, job, processes)]
    if plain_batch:
        opted_out = [replace(p, extra_args={"num_speculative_tokens": 0}) for p in job.params]
        runs.append(decode(job, f"plain, batch of {max_num_seqs}", opted_out))
    if runs[-1].label != job.label:  # without a draft that run is done
        runs.append(decode(job, job.label))
    mismatches = checked(references.judge, reference, job, runs)
    _print_verdict(job, runs, mismatches)
    write_completions(job, runs[-1], output)
    faults = [m for m in mismatches if m.label == "fault"]
    num_identical = len(job.records) - len({m.prompt_idx for m in mismatches})
    if as_json:
        print_json(
            {run.label: run.tokens_per_second for run in runs}
            | {
                "prompts": len(job.records),
                "identical": num_identical,
                "near_ties": len(mismatches) - len(faults),
                "faults": len(faults),
                "acceptance_rate": job.llm.metrics.acceptance_rate,
                "mean_acceptance_length": job.llm.metrics.mean_acceptance_length,
                "overlapped_steps": job.llm.metrics.overlapped_steps,
            }
        )
    else:
        console.print(f"{num_identical}/{len(job.records)} outputs identical", highlight=False)
    raise typer.Exit(1 if faults else 0)


def _acceptance(metrics: EngineMetrics, num_tokens: int) -> str:
    """Of the drafts of a speculative run of so many tokens; and what was decided, where hardly any are from drafts."""
    if not metrics.drafts:
        return "decided not to draft"
    acceptance = rate(metrics.acceptance_rate, ".1%")
    if metrics.accepted_tokens < _HARDLY_ANY * num_tokens:
        return f"{acceptance}, in {metrics.drafts} drafts alone: decided not to draft"
    return acceptance


def _print_verdict(job: Job, runs: Sequence[Run], mismatches: Sequence[Any]) -> None:
    table = Table("run", "tokens/s", "against the first", "acceptance", "mean acceptance length")
    metrics = job.llm.metrics
    for run in runs:
        acceptance = length = ""
        if run.label.startswith("speculative"):
            acceptance = _acceptance(metrics, sum(map(len, run.token_ids)))
            length = rate(metrics.mean_acceptance_length, ".2f")
        table.add_row(
            run.label,
            f"{run.tokens_per_second:.0f}",
            f"{run.tokens_per_second / runs[0].tokens_per_second:.2f}x",
            acceptance,
            length,
        )
    console.print(table)
    if mismatches:
        table = Table("prompt", "first divergence", "reference, ours", "margin", "label", title="mismatches")
        for m in mismatches:
            margin = "" if m.margin is None else f"{m.margin:.2e}"
            name = Text(str(job.records[m.prompt_idx].question_id))
            table.add_row(name, str(m.position), str(m.token_ids), margin, m.label)
        console.print(table)

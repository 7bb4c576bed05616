"""`specpaged generate`: prompts in, completions out."""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

import specpaged.cli.options as options
from specpaged.cli.job import decode, prepare, write_completions
from specpaged.cli.printing import console, print_error, print_json, rate


def generate(
    texts: options.Texts = None,
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
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory_bytes: options.KVCacheMemory = None,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    dtype: options.DType = "auto",
    kv_cache_dtype: options.KVCacheDType = "auto",
    draft_kv_cache_dtype: options.DraftKVCacheDType = "auto",
    draft_kv_cache_memory_bytes: options.DraftKVMemory = None,
    draft_kv_window: options.DraftKVWindow = None,
    block_size: options.BlockSize = None,
    schedule: options.Schedule = "continuous",
    device: options.Device = "cpu",
    numerics: options.Numerics = "exact",
    attention_backend: options.AttentionBackend = "auto",
    model_impl: options.ModelImpl = "auto",
    enforce_eager: options.EnforceEager = False,
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
    as_json: options.AsJson = False,
) -> None:
    """Complete prompts in batches, speculatively: those named here, those of a file, or the sample prompts."""
    arguments = {name: value for name, value in locals().items() if name != "as_json"}
    job = prepare(arguments)
    run = decode(job, "generating")
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
        rate(metrics.acceptance_rate, ".1%"),
        rate(metrics.mean_acceptance_length, ".2f"),
        f"{metrics.rollbacks} x, {metrics.rolled_back_tokens} tokens, {metrics.rollback_blocks_freed} blocks, "
        f"{metrics.rollback_seconds * 1e3:.1f} ms",
    )
    console.print(table)
    write_completions(job, run, output)
    failed = [result.error for result in run.outputs if result.error]
    for error in failed:
        print_error(error)
    if as_json:
        print_json({"tokens_per_second": run.tokens_per_second} | metrics.as_dict())
    raise typer.Exit(1 if failed else 0)

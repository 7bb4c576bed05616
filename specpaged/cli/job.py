"""A command's job: prepared, run and written down, with what is to be said of it on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpaged.cli.printing import checked, console
from specpaged.prompts import PromptRecord

if TYPE_CHECKING:  # torch and transformers take seconds to import: --help does without
    from specpaged.comparison.job import Job, Run


def prepare(arguments: dict[str, Any]) -> Job:
    """The job, and what there is to know of it before it runs."""
    from specpaged.comparison.job import Job

    job = checked(Job.prepare, **arguments)
    if job.lacks_draft and arguments["num_speculative_tokens"] != 0:
        console.print("no --draft-model: decoding plainly")
    console.print(str(job.llm.report), highlight=False, markup=False)
    lengths = sorted(map(len, job.token_ids))
    console.print(
        f"prompts {len(lengths)}, {lengths[0]}-{lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), "
        f"{job.num_clipped} clipped",
        highlight=False,
    )
    return job


def decode(job: Job, label: str, *args: Any, **kwargs: Any) -> Run:
    """Decode the job's prompts, under a line that says how: see Job.run."""
    console.print(f"[dim]{label}[/]")
    return checked(job.run, label, *args, **kwargs)


def write_completions(job: Job, run: Run, output: Path | None) -> None:
    """A line of JSON for each prompt, if there is a file to write them to."""
    if output is not None:
        with output.open("w", encoding="utf-8") as file:
            for record, result in zip(job.records, run.outputs, strict=True):
                file.write(json.dumps(_as_record(record, result)) + "\n")


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

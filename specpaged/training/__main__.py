"""`python -m specpaged.training all --out DIR --work DIR`: train the pair, write it, print its figures."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from specpaged.training.corpus import load_corpus, read_documents, split

app = typer.Typer(help=__doc__, no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="Folder that receives target/, draft/ and sample_prompts.jsonl.")]
Work = Annotated[Path, typer.Option(help="Folder for tokenizer, checkpoints, continuations; kept to resume.")]
Workers = Annotated[int, typer.Option(min=1, help="Threads, one per core that may be used.")]


@app.command()
def target(out: Out, work: Work, minutes: float = 49, workers: Workers = 2) -> None:
    """Train (or resume) the target for MINUTES of training time and write `OUT/target`."""
    from specpaged.training.export import export
    from specpaged.training.target import train_target

    work.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer = load_corpus(work)
    print(f"{corpus.num_train_files} files, {len(corpus.train)} tokens, {len(corpus.held_out)} held out")
    model, position = train_target(corpus, tokenizer, work, minutes, workers)
    export(model, tokenizer, out / "target")
    print(json.dumps(position))


@app.command()
def draft(
    out: Out,
    work: Work,
    minutes: float = 50,
    batches: int = 260,
    workers: Workers = 2,
) -> None:
    """Distil (or resume) the draft from `OUT/target` for MINUTES on BATCHES of 64 continuations."""
    from specpaged.training.draft import train_draft
    from specpaged.training.export import export, load_exported

    corpus, tokenizer = load_corpus(work)
    teacher = load_exported(out / "target")
    target_file = out / "target" / "model.safetensors"
    model, position = train_draft(teacher, target_file, tokenizer, corpus.train, work, minutes, batches, workers)
    export(model, tokenizer, out / "draft")
    print(json.dumps(position))


@app.command()
def quality(out: Out, work: Work, prompts: int = 256, workers: Workers = 2, ngram: bool = True) -> None:
    """Print the figures of the pair in OUT on held-out text; the last line is JSON."""
    from specpaged.training.export import load_exported
    from specpaged.training.ngram_baseline import kneser_ney_loss
    from specpaged.training.quality import held_out_prompts, measure_acceptance
    from specpaged.training.target import stream_loss

    corpus, tokenizer = load_corpus(work)
    models = {name: load_exported(out / name) for name in ("target", "draft")}
    windows = held_out_prompts(corpus.held_out_documents, prompts)
    acceptance = measure_acceptance(models["target"], models["draft"], windows, tokenizer.eos_token_id)
    figures = {key: round(value, 4) for key, value in dataclasses.asdict(acceptance).items()}
    for name, model in models.items():
        figures[f"{name}_parameters"] = sum(p.numel() for p in model.parameters())
        figures[f"{name}_loss"] = round(stream_loss(model, corpus.held_out, len(corpus.held_out), workers=workers), 4)
    if ngram:
        figures["ngram_loss"] = round(kneser_ney_loss(corpus.train, corpus.held_out, len(tokenizer)), 4)
    for key, value in figures.items():
        print(f"{key:20} {value}")
    print(json.dumps(figures))


@app.command()
def prompts(out: Out, work: Work, count: int = 64) -> None:
    """Write `OUT/sample_prompts.jsonl` from held-out files, in Spec-Bench's format."""
    from specpaged.training.export import sample_prompts, write_prompts

    _, tokenizer = load_corpus(work)
    write_prompts(sample_prompts(tokenizer, split(read_documents())[1], count), out / "sample_prompts.jsonl")


@app.command("all")
def run_all(out: Out, work: Work, minutes: float = 49, draft_minutes: float = 50, workers: Workers = 2) -> None:
    """Everything in turn; start it again after an interruption and it resumes."""
    target(out, work, minutes, workers)
    draft(out, work, draft_minutes, workers=workers)
    prompts(out, work)
    quality(out, work)


if __name__ == "__main__":
    app()

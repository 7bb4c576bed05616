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
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from benchmarks.vllm_eagle3.agreement import TIE, accepted_and_rejected, judge
from benchmarks.vllm_eagle3.of_vllm import vllm_proposals
from benchmarks.vllm_eagle3.ours import our_proposals
from benchmarks.vllm_eagle3.proposal import MAX_TOKENS, K
from benchmarks.vllm_eagle3.show import is_as_wanted, print_table
from benchmarks.vllm_eagle3.variants import VARIANTS, chosen, write_target


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


if __name__ == "__main__":
    typer.run(main)

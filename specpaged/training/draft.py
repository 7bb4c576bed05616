"""The draft: one Qwen3 layer, distilled from the exported target on the target's own continuations.

Acceptance is measured on what the target writes, so the draft learns from greedy and sampled continuations of
training text. These are slow to write, and a draft that sees each of them ten times learns them by heart: it starts on
the text itself, and half of the lessons that follow are what the target says to text that it has not written. The
target is read back from its fp16 file: the draft learns from the rounded weights, in fp32 arithmetic. Its TOP most
likely tokens are kept as the continuations are written.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specpaged.training.corpus import batch_at
from specpaged.training.quality import decode, length_before_cycle
from specpaged.training.target import make_model, next_token_loss
from specpaged.training.trainer import train

DRAFT_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
PREFIX_LENGTHS = (32, 64, 96, 128)
NEW_TOKENS = 80
ROWS_PER_BATCH = 64
GREEDY_SHARE = 0.75
TOP = 16
ARGMAX_WEIGHT = 0.5  # of the target's most likely token, beside its distribution
TEXT_SHARE = 0.35  # of the time, on plain text; after it, half of the microbatches are text with comments
TEXT_WINDOW, TEXT_ROWS = 256, 4
MICROBATCHES_PER_STEP, ROWS = 4, 8


class Continuations(NamedTuple):
    """Rows of one prefix length, and what the target thought of each token after the prefix."""

    rows: Tensor  # [rows, prefix + NEW_TOKENS] int64
    top_ids: Tensor  # [rows, NEW_TOKENS, TOP] int64, most likely first
    top_probs: Tensor  # [rows, NEW_TOKENS, TOP] float32
    fresh: Tensor  # [rows] int64: continuation tokens before a cycle, the only ones that count


def make_draft(tokenizer, target):
    """A fresh draft whose embedding is the target's, projected on its main directions."""
    draft = make_model(tokenizer, seed=1, **DRAFT_SHAPE)
    with torch.no_grad():
        embedding = target.get_input_embeddings().weight.float()
        _, _, directions = torch.linalg.svd(embedding, full_matrices=False)
        draft.get_input_embeddings().weight.copy_(embedding @ directions[: DRAFT_SHAPE["hidden_size"]].mT)
    return draft


def write_continuations(target, stream: np.ndarray, path: Path, number: int) -> None:
    """Batch `number`, a function of its number."""
    rng = np.random.default_rng((number, 7))
    length = int(rng.choice(PREFIX_LENGTHS))
    starts = rng.integers(0, len(stream) - length, ROWS_PER_BATCH)
    prefix = torch.from_numpy(np.stack([stream[s : s + length] for s in starts])).long()
    generator = None if rng.random() < GREEDY_SHARE else torch.Generator().manual_seed(number)
    probs, ids, tokens = [], [], [prefix]
    for logits, token in decode(target, prefix, NEW_TOKENS, generator):
        top = logits.softmax(-1).topk(TOP)
        probs.append(top.values)
        ids.append(top.indices)
        tokens.append(token)
    rows = torch.cat(tokens, 1)
    tensors = {
        "rows": rows.to(torch.int16),
        "top_ids": torch.stack(ids, 1).to(torch.int16),
        "top_probs": torch.stack(probs, 1).half(),
        "fresh": torch.tensor([length_before_cycle(row[length:]) for row in rows.tolist()]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def make_continuations(target, stream: np.ndarray, folder: Path, batches: int, workers: int = 2) -> None:
    """Write batches 0 .. `batches` - 1 into `folder`; those already there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [i for i in range(batches) if not (folder / f"{i:05d}.safetensors").exists()]

    def write(number: int) -> None:
        write_continuations(target, stream, folder / f"{number:05d}.safetensors", number)

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done, _ in enumerate(pool.map(write, missing), 1):
            if done % 10 == 0 or done == len(missing):
                print(f"continuations: {done} of {len(missing)} batches", flush=True)


def read_continuations(folder: Path) -> list[Continuations]:
    """Microbatches of ROWS rows in the order of the files."""
    microbatches = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            rows, ids, probs, fresh = (file.get_tensor(key) for key in Continuations._fields)
        tensors = (rows.long(), ids.long(), probs.float(), fresh)
        microbatches += map(Continuations, *(tensor.split(ROWS) for tensor in tensors))
    return microbatches


def distillation_loss(draft, batch: Continuations) -> Tensor:
    """Cross-entropy to the target's TOP probabilities, plus ARGMAX_WEIGHT x that to its most likely token."""
    new_tokens = batch.top_ids.shape[1]
    logits = draft(input_ids=batch.rows[:, :-1], use_cache=False, logits_to_keep=new_tokens).logits
    log_draft = logits.log_softmax(-1).gather(-1, batch.top_ids)
    losses = -((batch.top_probs * log_draft).sum(-1) + ARGMAX_WEIGHT * log_draft[..., 0])
    counts = torch.arange(new_tokens) < batch.fresh[:, None]
    return (losses * counts).sum() / counts.sum()


class Uncommented(NamedTuple):
    """Text that the target is still to be asked about."""

    rows: Tensor  # [rows, length + 1] int64


@torch.no_grad()
def comment(target, rows: Tensor) -> Continuations:
    """What the target thinks of every token of int64 [rows, length + 1] but the first."""
    top = target(input_ids=rows[:, :-1], use_cache=False).logits.softmax(-1).topk(TOP)
    return Continuations(rows, top.indices, top.values, torch.full((len(rows),), rows.shape[1] - 1))


def train_draft(
    target, target_file: Path, tokenizer, stream, work: Path, minutes: float, batches: int, workers: int = 2
):
    """Write continuations and distil; both resume, for this very target file. Returns (draft, position)."""
    torch.set_num_threads(1)
    tag = hashlib.sha256(Path(target_file).read_bytes()).hexdigest()[:12]
    folder = Path(work) / f"continuations-{tag}"
    make_continuations(target, stream, folder, batches, workers)
    data = read_continuations(folder)
    fresh = torch.cat([batch.fresh for batch in data])
    cycling = (fresh < NEW_TOKENS).float().mean().item()
    print(f"{len(fresh)} continuations, {fresh.sum().item()} tokens outside cycles, {cycling:.0%} cycling", flush=True)

    def microbatches(step: int, progress: float) -> list:
        rows = batch_at(stream, step, TEXT_ROWS * MICROBATCHES_PER_STEP, TEXT_WINDOW, seed=1)
        text = list(torch.from_numpy(rows).long().split(TEXT_ROWS))
        if progress < TEXT_SHARE:
            return text
        half = MICROBATCHES_PER_STEP // 2
        rng = np.random.default_rng((step, 11))
        return [*map(Uncommented, text[:half]), *(data[i] for i in rng.integers(len(data), size=half))]

    def draft_loss(draft, microbatch: Tensor | Uncommented | Continuations) -> Tensor:
        if torch.is_tensor(microbatch):
            return next_token_loss(draft, microbatch)
        if isinstance(microbatch, Uncommented):
            microbatch = comment(target, microbatch.rows)
        return distillation_loss(draft, microbatch)

    draft = make_draft(tokenizer, target)
    checkpoint = Path(work) / f"draft-{tag}.safetensors"
    position = train(draft, draft_loss, microbatches, checkpoint, minutes * 60, workers=workers)
    return draft, position

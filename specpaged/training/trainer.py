"""The training loop: data-parallel over threads, scheduled by elapsed time, resumable from one file.

Intra-op threads spin at barriers and suffer beside busy neighbours; whole microbatches on Python threads do
not (torch releases the GIL), so torch itself runs with one thread.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specpaged.training.muon import Muon


def learning_rate_factor(progress: float, warm_up: float = 0.02, decay: float = 0.35) -> float:
    """Warm-up, stable, linear decay to zero; `progress` in [0, 1] of the time budget."""
    return max(0.0, min(1.0, (progress + 1e-3) / warm_up, (1 - progress) / decay))


def save_checkpoint(path: Path, model, optimizers: list, position: dict) -> None:
    """Weights, optimiser state and position (JSON in the header) in one file, replaced atomically."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{index}.{key}": value for key, value in state.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"position": json.dumps(position)})
    os.replace(partial, path)


def load_checkpoint(path: Path, model, optimizers: list | tuple = ()) -> dict:
    """Restore `model` and `optimizers` in place; returns the position."""
    states = [{} for _ in optimizers]
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(file.get_tensor(f"model.{name}"))
        for key in sorted(file.keys()):
            kind, *rest = key.split(".", 3)
            if kind == "optimizer" and states:
                states[int(rest[0])].setdefault(int(rest[1]), {})[rest[2]] = file.get_tensor(key)
        position = json.loads(file.metadata()["position"])
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return position


def make_optimizers(model, muon_lr: float, adam_lr: float, pool=None) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [
        Muon(matrices, lr=muon_lr, weight_decay=0.05, pool=pool),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def gradients(model, loss: Callable, microbatches: list, pool: ThreadPoolExecutor, workers: int):
    """(mean loss, its gradients) over equal microbatches; deterministic for a given number of workers."""
    params = list(model.parameters())

    def work(part: list) -> tuple[float, list[Tensor]]:
        total, grads = 0.0, None
        for microbatch in part:
            value = loss(model, microbatch) / len(microbatches)
            new = torch.autograd.grad(value, params)
            total += value.item()
            grads = list(new) if grads is None else torch._foreach_add(grads, new)
        return total, grads

    parts = [microbatches[w::workers] for w in range(min(workers, len(microbatches)))]
    (total, grads), *others = pool.map(work, parts)
    for other, new in others:
        total += other
        torch._foreach_add_(grads, new)
    return total, grads


def train(
    model,
    loss: Callable[[torch.nn.Module, Tensor], Tensor],
    microbatches: Callable[[int, float], list[Tensor]],
    checkpoint: Path,
    seconds: float,
    muon_lr: float = 0.02,
    adam_lr: float = 4e-3,
    workers: int = 2,
    evaluate: Callable[[], float] | None = None,
    evaluate_every: float = 600,
    save_every: float = 120,
    clock: Callable[[], float] = time.monotonic,
) -> dict:
    """Train until `seconds` of training time are used, from `checkpoint` if it exists; returns the position.

    `microbatches(step, progress)` must be a function of its arguments: there is then no random state to save.
    """
    torch.set_num_threads(1)
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        optimizers = make_optimizers(model, muon_lr, adam_lr, pool)
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        position = {"step": 0, "elapsed": 0.0, "tokens": 0, "held_out": []}
        if checkpoint.exists():
            position = load_checkpoint(checkpoint, model, optimizers)
        columns = (BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        saved = evaluated = position["elapsed"]
        with Progress(*columns) as bar:
            task = bar.add_task("start", total=seconds, completed=position["elapsed"])
            last = clock()
            while position["elapsed"] < seconds:
                progress = position["elapsed"] / seconds
                for optimizer, rate in zip(optimizers, rates, strict=True):
                    optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(progress)
                batch = microbatches(position["step"], progress)
                value, grads = gradients(model, loss, batch, pool, workers)
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.grad = grad
                for optimizer in optimizers:
                    optimizer.step()
                now = clock()
                tokens = sum((b if torch.is_tensor(b) else b[0])[:, 1:].numel() for b in batch)
                position["step"] += 1
                position["tokens"] += tokens
                position["elapsed"] += now - last
                line = f"step {position['step']} loss {value:.3f} {tokens / (now - last):.0f} tokens/s"
                last = now
                bar.update(task, completed=position["elapsed"], description=line)
                done = position["elapsed"] >= seconds
                if position["step"] % 20 == 0 or done:
                    bar.console.log(f"{line}, {position['tokens'] / 1e6:.2f} M tokens, {progress:.1%}")
                if evaluate and (position["elapsed"] - evaluated >= evaluate_every or done):
                    evaluated = position["elapsed"]
                    held_out = evaluate()
                    position["held_out"].append([position["tokens"], held_out])
                    bar.console.log(f"held-out loss {held_out:.4f} at step {position['step']}")
                if position["elapsed"] - saved >= save_every or done:
                    saved = position["elapsed"]
                    save_checkpoint(checkpoint, model, optimizers, position)
    return position

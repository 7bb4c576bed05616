"""The target: a Qwen3 model of 5 M parameters, trained on next-token loss and against repeating itself.

A model this small falls into loops under greedy decoding. One microbatch in eight is therefore text whose last few
tokens are copied over and over, with an unlikelihood loss (Welleck et al. 2020) from the third copy on; taking the
loops from the text instead of from the model's own outputs follows Xu et al. 2022 (DITTO).
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specpaged.training.corpus import Corpus, batch_at
from specpaged.training.quality import MAX_PERIOD
from specpaged.training.trainer import train

TARGET_SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
WINDOW = 512  # tokens
TOKENS_PER_STEP, MICROBATCH = 8192, 1024


def make_model(tokenizer, seed: int = 0, intermediate_size: int = 512, **shape: int):
    """A fresh float32 `Qwen3ForCausalLM` with tied embeddings and head_dim 32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    eos = tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer), head_dim=32, intermediate_size=intermediate_size, tie_word_embeddings=True,
        max_position_embeddings=1024, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None, eos_token_id=eos, pad_token_id=eos, attn_implementation="sdpa", **shape,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


def next_token_loss(model, window: Tensor) -> Tensor:
    """Mean nat per token of int64 [rows, length + 1]."""
    logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def stream_loss(model, stream: np.ndarray, max_tokens: int, length: int = WINDOW, workers: int = 1) -> float:
    """Mean nat per token over consecutive windows of the stream, each without what comes before it."""
    count = min(len(stream) - 1, max_tokens) // length
    windows = np.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)])

    @torch.no_grad()
    def total(part: Tensor) -> float:
        return next_token_loss(model, part).item() * len(part)

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return sum(pool.map(total, torch.from_numpy(windows).long().split(2))) / count


def loop_rows(stream: np.ndarray, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Text that turns into a loop: int64 [rows, length + 1], and the position of each third copy, int64 [rows].

    Text a b c d e f of which two tokens loop: a b c d e f e f e f e f; the third copy of "e f" starts at 8.
    """
    rng = np.random.default_rng((step, 3))
    looped, third = [], []
    for _ in range(rows):
        start, end, period = rng.integers(len(stream) - length), rng.integers(40, 129), rng.integers(1, MAX_PERIOD + 1)
        text = stream[start : start + end]
        looped.append(np.concatenate([text, np.resize(text[-period:], length + 1 - end)]))
        third.append(end + period)
    return torch.from_numpy(np.stack(looped)).long(), torch.tensor(third)


def unlikelihood_loss(model, rows: Tensor, third: Tensor) -> Tensor:
    """Mean of -log(1 - p) of the loop's tokens from the third copy on, where p is high enough to be chosen."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    log_p = logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
    in_loop = torch.arange(1, rows.shape[1]) >= third[:, None]
    wrong = in_loop & (log_p.detach() > np.log(0.2))
    return -(torch.log1p(1e-4 - log_p.exp()) * wrong).sum() / in_loop.sum()


def target_loss(model, microbatch: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Next-token loss of a window, unlikelihood loss of a pair from `loop_rows`."""
    return next_token_loss(model, microbatch) if torch.is_tensor(microbatch) else unlikelihood_loss(model, *microbatch)


def microbatches_of(stream: np.ndarray, step: int) -> list:
    """Windows of text; the last microbatch holds loops."""
    rows = batch_at(stream, step, TOKENS_PER_STEP // WINDOW, WINDOW)
    text = list(torch.from_numpy(rows).long().split(MICROBATCH // WINDOW))
    return [*text[:-1], loop_rows(stream, step, MICROBATCH // WINDOW, WINDOW)]


def train_target(corpus: Corpus, tokenizer, work: Path, minutes: float, workers: int = 2):
    """Train or resume; returns (model, position)."""
    model = make_model(tokenizer, **TARGET_SHAPE)
    position = train(
        model, target_loss, lambda step, _: microbatches_of(corpus.train, step),
        Path(work) / "target.safetensors", minutes * 60, workers=workers,
        evaluate=lambda: stream_loss(model, corpus.held_out, 40_000),
    )  # fmt: skip
    return model, position

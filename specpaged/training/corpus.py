"""Training text: the running interpreter's own standard library, split, tokenised and packed.

The split is a function of the file's relative name alone, so that every machine agrees on it.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EOS = "<|endoftext|>"
HELD_OUT_RULE = "sha256(relative name), first 4 bytes as a big-endian integer, modulo 25 equals 0 (about 4 %)"
MAX_BYTES = 300_000
SKIP_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "encoded_modules"}
SKIP_FOLDERS |= {"data", "cjkencodings"}
SKIP_PREFIXES = (
    "bad",
    "_sysconfigdata",
    "lib2to3/pgen2/conv",
    "idlelib/help",
    "test/test_stringprep",
    "config-",
)


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name (with `/`) belongs to the held-out split: HELD_OUT_RULE."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 25 == 0


def is_wanted(name: str) -> bool:
    """Whether the name is that of ordinary source: no encoding tables, generated text or broken syntax."""
    *folders, file = name.split("/")
    return not (
        SKIP_FOLDERS.intersection(folders) or any(name.startswith(p) or file.startswith(p) for p in SKIP_PREFIXES)
    )


def read_documents(root: Path | None = None) -> dict[str, str]:
    """Relative name -> text of every wanted file of plain UTF-8, sorted by name."""
    root = Path(root or sysconfig.get_path("stdlib"))
    documents = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not is_wanted(name):
            continue
        raw = path.read_bytes()
        if not 200 <= len(raw) <= MAX_BYTES:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if len(raw) - len(text) <= 0.01 * len(raw):
            documents[name] = text.replace("\r\n", "\n")
    return documents


def split(documents: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(training, held-out) documents."""
    held_out = {name: text for name, text in documents.items() if is_held_out(name)}
    return {name: text for name, text in documents.items() if name not in held_out}, held_out


def train_tokenizer(texts: list[str], vocab_size: int = 264):
    """A byte-level BPE `PreTrainedTokenizerFast` whose only special token is EOS (id 0)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, pad_token=EOS, model_max_length=int(1e9),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Packed token streams, int32 [tokens], documents separated by EOS."""

    train: np.ndarray
    held_out: np.ndarray
    held_out_documents: dict[str, list[int]]
    num_train_files: int


def pack(tokenizer, documents: dict[str, str], order_seed: int | None = None) -> np.ndarray:
    """One int32 stream: EOS before each document; the documents in a seeded order, or sorted by name."""
    names = list(documents)
    if order_seed is not None:
        np.random.default_rng(order_seed).shuffle(names)
    ids = tokenizer([documents[n] for n in names], add_special_tokens=False)["input_ids"]
    eos = [tokenizer.eos_token_id]
    return np.concatenate([np.asarray(part, np.int32) for doc in ids for part in (eos, doc)])


def load_corpus(work: Path):
    """(Corpus, tokenizer); the tokenizer is trained once, on the training split, and kept in `work`."""
    from transformers import AutoTokenizer

    train, held_out = split(read_documents())
    folder = Path(work) / "tokenizer"
    if not folder.exists():
        train_tokenizer(list(train.values())).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out_documents = {n: tokenizer(t, add_special_tokens=False)["input_ids"] for n, t in held_out.items()}
    corpus = Corpus(pack(tokenizer, train, 0), pack(tokenizer, held_out), held_out_documents, len(train))
    return corpus, tokenizer


def batch_at(stream: np.ndarray, step: int, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Batch `step`, [rows, length + 1]: windows in a seeded order, with a new offset in each epoch."""
    windows = (len(stream) - 1) // length - 1
    picked = []
    for i in range(step * rows, (step + 1) * rows):
        epoch, index = divmod(i, windows)
        offset, order = _epoch(seed, epoch, windows, length)
        start = offset + int(order[index]) * length
        picked.append(stream[start : start + length + 1])
    return np.stack(picked)


_EPOCHS: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}


def _epoch(*key: int) -> tuple[int, np.ndarray]:
    if key not in _EPOCHS:
        seed, epoch, windows, length = key
        rng = np.random.default_rng((seed, epoch))
        _EPOCHS[key] = (int(rng.integers(length)), rng.permutation(windows))
    return _EPOCHS[key]

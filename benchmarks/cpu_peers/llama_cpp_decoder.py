"""llama.cpp through its C interface: float16 weights, batches of sequences, drafts that a batch verifies at once.

Two builds of it take part (see ways.py). What is Python here is little: of a step at B = 1 some 15 us, of one at B = 32
some 40, for a batch is written, and its logits' argmax is taken, by one call of numpy for all rows.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from benchmarks.cpu_peers import gguf_file
from benchmarks.cpu_peers.worker import Job

Rows = list[tuple[int, int, list[int], int]]  # sequence, position of its first token, tokens, rows of logits at the end


class Model:
    """One model and its cache."""

    def __init__(self, path: Path, job: Job):
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.num_rows = 2048  # of a batch
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = job.max_num_seqs * job.max_model_len
        context.n_batch = self.num_rows  # which it runs in parts of 512, its default
        context.n_seq_max = job.max_num_seqs
        context.n_threads = context.n_threads_batch = job.threads
        context.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(self.num_rows, 0, 1)
        # Each row's sequence is a list in itself: of one entry, and all of them lie side by side here.
        self.sequences = np.zeros(self.num_rows, np.int32)
        for row in range(self.num_rows):
            self.batch.n_seq_id[row] = 1
            address = self.sequences.ctypes.data + row * self.sequences.itemsize
            self.batch.seq_id[row] = ctypes.cast(address, ctypes.POINTER(llama_cpp.llama_seq_id))
        self.fields = (
            np.ctypeslib.as_array(self.batch.token, (self.num_rows,)),
            np.ctypeslib.as_array(self.batch.pos, (self.num_rows,)),
            self.sequences,
            np.ctypeslib.as_array(self.batch.logits, (self.num_rows,)),
        )

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def cut(self, sequence: int, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, length, -1)

    def run(self, rows: Rows) -> list[list[int]]:
        """The most likely successors, of each entry's last rows."""
        found: list[list[int]] = []
        first = 0
        while first < len(rows):
            last, num_rows = first, 0
            while last < len(rows) and num_rows + len(rows[last][2]) <= self.num_rows:
                num_rows += len(rows[last][2])
                last += 1
            found += self._pass(rows[first:last])
            first = last
        return found

    def _pass(self, rows: Rows) -> list[list[int]]:
        places: list[tuple[int, int]] = []  # of each entry's first and last logits, among all that there are
        tokens, positions, sequences, wanted = [], [], [], []
        num_found = 0
        for sequence, position, of_entry, num_logits in rows:
            count = len(of_entry)
            tokens += of_entry
            positions += range(position, position + count)
            sequences += [sequence] * count
            wanted += [0] * (count - num_logits) + [1] * num_logits
            places.append((num_found, num_found + num_logits))
            num_found += num_logits
        n = self.batch.n_tokens = len(tokens)
        for field, values in zip(self.fields, (tokens, positions, sequences, wanted), strict=True):
            field[:n] = values
        if status := llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode: {status}")
        logits = llama_cpp.llama_get_logits(self.context)  # [num_found, V]: rows that want none have none
        found = np.ctypeslib.as_array(logits, (num_found, self.vocab_size)).argmax(1).tolist()
        return [found[first:last] for first, last in places]


class LlamaCpp:
    def __init__(self, job: Job):
        self.version = f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}, F16"
        folder = Path(job.converted)
        self.target = Model(_converted(Path(job.target), folder / "target.gguf"), job)
        self.draft = None if job.draft is None else Model(_converted(Path(job.draft), folder / "draft.gguf"), job)
        self.num_drafts = job.num_drafts or 0

    def decode(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        self.target.clear()
        first = self.target.run([(i, 0, list(prompt), 1) for i, prompt in enumerate(prompts)])
        tokens = [[*prompt, found[0]] for prompt, found in zip(prompts, first, strict=True)]
        ends = [len(prompt) + output_len for prompt in prompts]
        drafted = [0] * len(prompts)  # tokens that the draft has run
        if self.draft is not None:
            self.draft.clear()
        while going_on := [i for i, end in enumerate(ends) if len(tokens[i]) < end]:
            drafts = self._drafts(going_on, tokens, drafted) if self.draft is not None else {i: [] for i in going_on}
            rows = [(i, len(tokens[i]) - 1, [tokens[i][-1], *drafts[i]], len(drafts[i]) + 1) for i in going_on]
            for i, found in zip(going_on, self.target.run(rows), strict=True):
                num_accepted = 0
                while num_accepted < len(drafts[i]) and drafts[i][num_accepted] == found[num_accepted]:
                    num_accepted += 1
                tokens[i] += found[: num_accepted + 1]
                if drafts[i]:
                    self.target.cut(i, len(tokens[i]) - 1)
                    drafted[i] = min(drafted[i], len(tokens[i]) - 1)
                    self.draft.cut(i, drafted[i])
        return [of[len(prompt) : end] for of, prompt, end in zip(tokens, prompts, ends, strict=True)]

    def _drafts(self, going_on: list[int], tokens: list[list[int]], drafted: list[int]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {i: [] for i in going_on}
        rows = [(i, drafted[i], tokens[i][drafted[i] :], 1) for i in going_on]
        for step in range(self.num_drafts):
            for i, found in zip(going_on, self.draft.run(rows), strict=True):
                drafts[i].append(found[0])
            rows = [(i, len(tokens[i]) + step, [drafts[i][-1]], 1) for i in going_on]
        for i in going_on:
            drafted[i] = len(tokens[i]) + self.num_drafts - 1
        return drafts


def _converted(checkpoint: Path, path: Path) -> Path:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        gguf_file.write(checkpoint, path)
    return path


def load(job: Job) -> LlamaCpp:
    """With the job's threads."""
    llama_cpp.llama_backend_init()
    return LlamaCpp(job)

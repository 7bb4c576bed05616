"""OpenVINO GenAI's continuous batching, with its defaults: KV in 8 bits. Arithmetic is in float32."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.cpu_peers.worker import Job

_KV_GIB = 2


class OpenVino:
    def __init__(self, job: Job):
        self.version = f"openvino-genai {importlib.metadata.version('openvino-genai')}, {job.weights} weights, u8 KV"
        folder = Path(job.converted)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _KV_GIB
        scheduler.max_num_seqs = job.max_num_seqs
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": job.threads, "INFERENCE_PRECISION_HINT": "f32"}
        arguments: dict[str, Any] = dict(properties)
        self.num_drafts = job.num_drafts or 0
        if job.draft is not None:
            path = _converted(Path(job.draft), folder, "draft", job.weights)
            arguments["draft_model"] = openvino_genai.draft_model(str(path), "CPU", **properties)
        target = _converted(Path(job.target), folder, "target", job.weights)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", arguments)

    def decode(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        if self.num_drafts:
            config.num_assistant_tokens = self.num_drafts
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self.pipeline.generate(tensors, [config] * len(tensors))
        return [list(result.m_generation_ids[0]) for result in results]


def _converted(checkpoint: Path, converted: Path, role: str, weights: str) -> Path:
    folder = converted / f"{role}-openvino-{weights}"
    if not (folder / "openvino_model.xml").exists():
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", checkpoint]
        subprocess.run(
            [*command, "--task", "text-generation-with-past", "--weight-format", weights, folder], check=True
        )
    return folder


def load(job: Job) -> OpenVino:
    """With the job's threads."""
    return OpenVino(job)

"""Writes a trained model as a Hugging Face folder in fp16, and the sample prompts."""

import copy
import json
from pathlib import Path

import numpy as np
import torch


def export(model, tokenizer, folder: Path) -> None:
    """Write config, fp16 weights, generation config (greedy) and the tokenizer into `folder`."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    eos = tokenizer.eos_token_id
    rounded = copy.deepcopy(model).half()
    rounded.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos)
    rounded.config.dtype = torch.float16
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    # transformers 5 names a class here that earlier versions lack, and notes where it loaded from.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = model.config.max_position_embeddings
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_exported(folder: Path):
    """The model of an exported folder, its rounded weights in float32, ready for inference."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sample_prompts(tokenizer, documents: dict[str, str], count: int = 64, seed: int = 0) -> list[dict]:
    """Spec-Bench records; each prompt is 60 to 200 tokens of a held-out file, up to a line's end.

    Half of them end after a `def` or `class` line or an opening docstring. The last newline is left out,
    because the tokenizer joins it with the indentation that follows.
    """
    rng = np.random.default_rng(seed)
    names = [name for name, text in documents.items() if len(text) > 2000]
    records, seen = [], set()
    while len(records) < count:
        name = names[rng.integers(len(names))]
        lines = documents[name].split("\n")
        wanted = int(rng.integers(70, 180))
        start = 0 if rng.random() < 0.25 else int(rng.integers(len(lines)))
        prompt = prompt_from(tokenizer, lines[start:], wanted, at_opening=len(records) % 2 == 0)
        if prompt and prompt not in seen:
            seen.add(prompt)
            records.append({"question_id": len(records), "category": "stdlib", "turns": [prompt]})
    return records


def prompt_from(tokenizer, lines: list[str], wanted: int, at_opening: bool) -> str | None:
    """The first lines, about `wanted` tokens, ending after a good line; None where there is none."""
    text = ""
    best = None
    for line in lines[:60]:
        text += line
        size = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if size > 200:
            break
        stripped = line.strip()
        opening = stripped.startswith(("def ", "class ")) and stripped.endswith(":")
        opening |= stripped.startswith('"""') and stripped.count('"""') == 1 and len(stripped) > 3
        inside = line.startswith("    ") and bool(stripped)
        if size >= 60 and (opening if at_opening else inside):
            best = text
            if size >= wanted:
                break
        text += "\n"
    return best.lstrip("\n") if best else None


def write_prompts(records: list[dict], path: Path) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

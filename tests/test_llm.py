"""What LLM makes of a checkpoint: its vocabulary, its eos tokens, its length."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import GenerationConfig

from specpaged import LLM, SamplingParams
from specpaged.engine import kv_memory
from tests import toys

GREEDY = {"temperature": 0, "ignore_eos": True}


def test_a_draft_cannot_shrink_the_targets_vocabulary(toy_pair, tmp_path):
    toys.model(seed=3, vocab_size=200).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"has another vocabulary .*200 and 300 embedding rows"):
        LLM(toy_pair.target, speculative_config={"model": str(tmp_path / "small")}, max_model_len=64)


def test_nor_can_one_whose_tokenizer_promises_more_than_its_embedding_has(tokenizer_pair, tmp_path):
    small = tmp_path / "small"
    toys.model(seed=3, vocab_size=200).save_pretrained(small)
    toys.byte_tokenizer().save_pretrained(small)
    message = r"speculative_config\['model'\]=.* has 200 embedding rows for the target's 300 tokens; allowed: as many"
    with pytest.raises(ValueError, match=message):
        LLM(tokenizer_pair.target, speculative_config={"model": str(small)}, max_model_len=64)


def test_a_padded_embedding_is_cut_to_the_tokenizer(tmp_path):
    toys.model(vocab_size=320).save_pretrained(tmp_path)
    toys.byte_tokenizer().save_pretrained(tmp_path)
    assert LLM(str(tmp_path), max_model_len=64).engine.vocabulary.size == 300


def test_token_ids_may_have_gaps(tokenizer_pair, tmp_path):
    target = shutil.copytree(tokenizer_pair.target, tmp_path / "gap")
    vocabulary = toys.byte_tokenizer().get_vocab()
    unused = max(vocabulary, key=vocabulary.get)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    # An id in the middle is taken out: 299 tokens, the last of which is still 299.
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<unused0>"]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    GenerationConfig(eos_token_id=[0, vocabulary[unused], -1]).save_pretrained(target)
    vocab = LLM(str(target), max_model_len=64).engine.vocabulary
    assert vocab.size == 300
    assert vocab.eos_token_ids == (0, vocabulary[unused])  # no token has the id -1


def test_without_a_length_or_a_memory_a_sequence_is_as_long_as_the_default_memory_allows(toy_pair, monkeypatch):
    monkeypatch.setattr(kv_memory, "DEFAULT_CPU_BYTES", 100 * 512)  # 100 tokens of a toy model
    cut = LLM(toy_pair.target, block_size=16)
    assert cut.config.max_model_len == 96
    assert "6 blocks of 16 tokens" in str(cut.report)
    assert "1 sequences of 96 tokens (max_model_len; the model has 512 positions)" in str(cut.report)
    (output,) = cut.generate(toys.prompts(1), SamplingParams(max_tokens=None, **GREEDY), use_tqdm=False)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 96
    with pytest.raises(ValueError, match="allowed: at least one sequence of max_model_len=512"):
        LLM(toy_pair.target, max_model_len=512)


@pytest.mark.parametrize("length", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_a_sequence_may_be_very_short(toy_pair, length, backend):
    short = LLM(toy_pair.target, max_model_len=length, attention_backend=backend)
    (output,) = short.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=None, **GREEDY), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == length - 1

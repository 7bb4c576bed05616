"""Tokenizers that are trained on one text."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "the cat sat on the mat; größer, naïve café, 東京 and 👩‍🔬 say: STOP the cat stops here. " * 3


@pytest.fixture(scope="session")
def corpus():
    """What the tokenizers are trained on."""
    return TEXT


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE with two special tokens and an added one that is not special."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([TEXT], trainer)
    bpe.add_special_tokens(["<eos>", "<eot>"])
    bpe.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


@pytest.fixture(scope="session")
def metaspace_tokenizer():
    """Llama-like: a space before each word, which the decoder drops at the start of a text."""
    bpe = Tokenizer(models.BPE(byte_fallback=False))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    bpe.train_from_iterator([TEXT] * 2, trainers.BpeTrainer(vocab_size=200))
    bpe.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")

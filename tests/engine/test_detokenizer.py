"""The text that each output token adds."""

from tokenizers import pre_tokenizers

from specpaged.engine.detokenizer import IncrementalDetokenizer
from specpaged.sampling_params import SamplingParams


def pieces(tokenizer, ids, prompt=(), **params):
    """The text that each token adds."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params), prompt)
    return [detokenizer.append(token_id) for token_id in ids]


def text_of(tokenizer, ids, prompt=(), **params):
    return "".join(pieces(tokenizer, ids, prompt, **params))


def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = tokenizer.encode("the<eot> cat<tool> sat")
    assert text_of(tokenizer, ids) == "the cat<tool> sat"
    assert text_of(tokenizer, ids, skip_special_tokens=False) == "the<eot> cat<tool> sat"
    two = tokenizer.encode("<eot><eot> sat")
    shown = text_of(tokenizer, two, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert shown == "<eot><eot> sat"


def test_a_space_at_the_seam_of_prompt_and_output_is_kept(metaspace_tokenizer):
    ids = metaspace_tokenizer.encode("the cat sat on the mat")
    for cut in range(1, len(ids)):
        expected = metaspace_tokenizer.decode(ids)[len(metaspace_tokenizer.decode(ids[:cut])) :]
        assert text_of(metaspace_tokenizer, ids[cut:], prompt=ids[:cut]) == expected


def test_a_space_after_a_skipped_special_token_is_kept(metaspace_tokenizer):
    the, cat = metaspace_tokenizer.encode("the"), metaspace_tokenizer.encode("cat")
    special = metaspace_tokenizer.convert_tokens_to_ids("<s>")
    assert text_of(metaspace_tokenizer, [special, *cat], prompt=the) == " cat"


def test_incomplete_characters_wait_and_are_never_shown_half(tokenizer):
    byte_tokens = list(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("東京")[0][0])
    ids = tokenizer.convert_tokens_to_ids(byte_tokens)
    assert len(ids) == 6
    assert pieces(tokenizer, ids) == ["", "", "東", "", "", "京"]

"""What vLLM is asked for says of drafts what was measured here, or says that it cannot."""

from __future__ import annotations

import pytest

from specpaged.comparison.vllm_arguments import vllm_arguments
from specpaged.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("config", "expected", "options"),
    [
        ({"model": "a/draft"}, {"method": "draft_model", "model": "a/draft"}, None),
        ({"method": "ngram"}, {"method": "ngram"}, None),
        (
            {"method": "ngram", "prompt_lookup_min": 2},
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 2},
            None,
        ),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0},
            {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0},
            None,
        ),
        ({"method": "eagle3", "model": "DIR"}, {"method": "eagle3", "model": "DIR"}, None),
        ({"method": "clover", "model": "DIR"}, {"method": "custom_class", "model": "clover:DIR"}, None),
        (
            {"method": "custom", "drafter": "a.module:Drafter", "drafter_options": {"n": 2}},
            {"method": "custom_class", "model": "a.module:Drafter"},
            {"drafter_options": {"n": 2}},
        ),
        (
            {"method": ["suffix", "draft_model", "ngram"], "model": "a/draft", "kv_cache_dtype": "bfloat16"},
            {"method": "draft_model", "model": "a/draft"},
            {"draft_kv_cache_dtype": "bfloat16", "lookups": "suffix,ngram"},
        ),
    ],
)
def test_each_method_has_vllms_words(config, expected, options):
    asked = vllm_arguments(SpeculativeConfig(**config), 3)
    assert asked.pop("speculative_config") == expected | {"num_speculative_tokens": 3}
    assert asked == ({} if options is None else {"additional_config": {"specpaged": options}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": ["ngram", "suffix"]}, r"method=\['ngram', 'suffix'\] without a model; allowed there: one of them"),
        ({"model": "a/draft", "kv_window": 64}, "kv_window=64; allowed there: the default"),
        ({"model": "a/draft", "device": "cuda:1"}, "device='cuda:1'; allowed"),
        ({"model": "a/draft", "verification": "rejection"}, "verification='rejection'; allowed"),
        ({"method": ["ngram", "draft_model"], "prompt_lookup_max": 3}, "prompt_lookup_min=3 beside a model; allowed"),
    ],
)
def test_what_vllm_has_no_words_for_is_said(config, message):
    with pytest.raises(ValueError, match=f"vLLM has no words for {message}"):
        vllm_arguments(SpeculativeConfig(**config), 3)

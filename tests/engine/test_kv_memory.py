"""How much KV an engine holds: what does not fit is refused, by name."""

import pytest
import torch

from specpaged import LLM
from specpaged.modeling import loading
from tests import toys


def make_llm(pair: toys.Pair, **arguments) -> LLM:
    speculative = {"model": pair.draft, "num_speculative_tokens": 4}
    return LLM(pair.target, speculative_config=speculative, **({"max_model_len": 40, "max_num_seqs": 3} | arguments))


@pytest.mark.parametrize(
    ("rollback", "num_rows", "num_sequences"), [("repad", 3, 3), ("gather", 3, 3), ("group", 3 + 5, 5)]
)
def test_dense_rows_are_as_wide_as_a_sequence_and_its_drafts(toy_pair, rollback, num_rows, num_sequences):
    schedule = {"schedule": "exspec", "window": 5} if rollback == "group" else {}
    columns = 40 + (4 + 4 if rollback == "group" else 4)  # group: drafts run behind drafts, before rows are placed anew
    bytes_of_all = num_rows * columns * 2 * 512  # both models have 512 bytes a token
    llm = make_llm(toy_pair, rollback=rollback, kv_cache_memory_bytes=bytes_of_all, **schedule)
    caches = [llm.engine.target.kv_cache, llm.engine.draft.kv_cache]
    assert sum(cache.num_bytes for cache in caches) == bytes_of_all
    assert f"rollback {rollback}: 3 rows" in str(llm.report)
    assert f"{num_sequences} sequences of 40 tokens" in str(llm.report)
    with pytest.raises(ValueError, match=rf"rollback='{rollback}' keeps 3 rows.* take {bytes_of_all} bytes") as error:
        make_llm(toy_pair, rollback=rollback, kv_cache_memory_bytes=bytes_of_all - 1, **schedule)
    assert ("window=5" in str(error.value)) == (rollback == "group")


def test_a_window_holds_its_sequences_in_pages(toy_pair):
    llm = make_llm(toy_pair, schedule="exspec", window=7)
    assert llm.engine.allocator.num_blocks == 7 * 3  # of 16 tokens


def test_narrower_kv_takes_fewer_bytes(toy_pair):
    def kv_bytes(of_draft: str, **arguments) -> list[int]:
        speculative = {"model": toy_pair.draft, "num_speculative_tokens": 4, "kv_cache_dtype": of_draft}
        llm = LLM(toy_pair.target, speculative_config=speculative, max_model_len=40, **arguments)
        assert ("KV 256 B per token (stored as bfloat16)" in str(llm.report)) == ("bfloat16" in arguments.values())
        return [runner.kv_cache.bytes_per_token for runner in (llm.engine.target, llm.engine.draft)]

    assert kv_bytes("auto") == [512, 512]
    assert kv_bytes("float16") == [512, 256]
    assert kv_bytes("fp8_e4m3") == [512, 128]
    assert kv_bytes("auto", kv_cache_dtype="bfloat16") == [256, 512]


def test_backends_that_read_kv_in_their_own_dtype_alone_say_so():
    assert loading._check_kv_dtype("auto", torch.float32, "triton") == torch.float32
    assert loading._check_kv_dtype("float16", torch.float16, "triton") == torch.float16
    message = r"kv_cache_dtype='float16' beside float32 is for attention_backend cpp and torch; here it is 'triton'"
    with pytest.raises(ValueError, match=message):
        loading._check_kv_dtype("float16", torch.float32, "triton")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rollback": "repad", "enable_prefix_caching": True},
            "enable_prefix_caching=True needs pages; rollback='repad'",
        ),
        ({"rollback": "repad", "attention_backend": "xformers"}, "attention_backend='xformers' reads pages alone"),
        ({"rollback": "unpad"}, "rollback='unpad' is not known; allowed: 'truncate', 'repad'"),
        ({"schedule": "static"}, "schedule='static' is not known; allowed: 'continuous', 'eqspec', 'exspec'"),
        ({"schedule": "exspec", "window": 2}, "window=2 must be at least max_num_seqs=3"),
        ({"schedule": "exspec", "window": 0}, "window=0 must be an int >= 1"),
        ({"schedule": "eqspec", "window": 8}, "window=8 is for schedule='exspec' alone"),
        ({"sort_by_length": True}, "sort_by_length=True is for schedule='exspec' alone"),
        ({"schedule": "exspec", "sort_by_length": "yes"}, "sort_by_length='yes' must be True or False"),
        ({"schedule": "exspec", "rollback": "gather"}, "rollback='gather' keeps one batch together"),
        (
            {"rollback": "repad", "max_model_len": 5},
            r"num_speculative_tokens']=4 must be at most max_model_len - 2 = 3",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(toy_pair, arguments, message):
    with pytest.raises(ValueError) as error:
        make_llm(toy_pair, **arguments)
    assert message in str(error.value)

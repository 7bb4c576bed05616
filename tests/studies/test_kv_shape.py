"""The shape of one model's KV."""

import pytest

from specpaged.studies.kv_shape import KVShape


@pytest.mark.parametrize("text", ["8,4", "8,4,32,float8", "8,0,32", "8,4,x", "8,4,32,float32,1"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ValueError, match=r"--kv-shape='.*' must be L,Hkv,D"):
        KVShape.parse(text)


def test_a_shape_says_what_a_token_takes():
    assert KVShape.parse("8,4,32").bytes_per_token == 8 * 2 * 4 * 32 * 4
    assert KVShape.parse("36,8,128,bfloat16").bytes_per_token == 36 * 2 * 8 * 128 * 2

"""Which configurations of vLLM are run, and beside what."""

from __future__ import annotations

import pytest
from typer import BadParameter

from benchmarks import vllm_equivalence
from benchmarks.vllm_equivalence import CONFIGURATIONS, REFERENCES, configurations


@pytest.fixture
def heads(tmp_path):
    for method in ("eagle3", "clover"):
        (tmp_path / method).mkdir()
        (tmp_path / method / "config.json").write_text("{}")
    return tmp_path


def test_each_configuration_comes_behind_what_it_is_compared_with(heads):
    wanted = configurations(heads, "")
    assert wanted.keys() > CONFIGURATIONS.keys()
    before = set(REFERENCES)
    for name, (*_, compared_with) in wanted.items():
        assert compared_with == name or compared_with in before, name
        before.add(name)


@pytest.mark.parametrize("installed", [True, False])
def test_heads_draft_where_they_are_given_and_suffixes_where_vllm_can(installed, monkeypatch, heads):
    monkeypatch.setattr(vllm_equivalence, "find_spec", lambda name: name if installed else None)
    without_heads = {name for name in configurations(None, "") if name not in CONFIGURATIONS}
    assert without_heads == (set(configurations(None, "suffix")) if installed else set())
    assert set(configurations(heads, "eagle3;clover, decided")) == {
        "eagle3", "eagle3, decided", "eagle3, prefix cache", "eagle3, preemption", "eagle3, sampled",
        "suffix beside eagle3", "clover, decided",
    }  # fmt: skip
    assert configurations(heads, "clover")["clover"][0]["model"] == f"clover:{heads / 'clover'}"


def test_a_configuration_is_refused_if_there_is_none_such_or_nothing_to_compare_it_with(heads):
    (heads / "clover" / "config.json").unlink()
    with pytest.raises(BadParameter, match="has no folder 'clover'"):
        configurations(heads, "eagle3")
    with pytest.raises(BadParameter, match="'medusa' is in no name"):
        configurations(None, "ngram;medusa")
    with pytest.raises(BadParameter, match="'sampled, lookups' is compared with 'sampled, plain'"):
        configurations(None, "sampled, lookups")

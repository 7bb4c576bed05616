"""Methods as the command line names them."""

import re

import pytest

from specpaged.studies.method import Method, check_methods, parse_methods


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("truncate", "continuous/truncate"),
        ("exspec/truncate/sorted", "exspec/truncate/sorted"),
        ("repad", "eqspec/repad"),
        ("group", "exspec/group"),
        ("continuous/gather", "continuous/gather"),
        ("exspec/group/ungrouped/uncached", "exspec/group/uncached/ungrouped"),
        ("repad/uncached", "eqspec/repad/uncached"),
        ("plain", "plain"),
    ],
)
def test_an_arm_alone_has_its_own_schedule(text, name):
    method = Method.parse(text)
    assert method.name == name
    assert Method.parse(name) == method


def test_a_method_that_is_named_twice_runs_once():
    assert [m.name for m in parse_methods("repad, eqspec/repad,truncate")] == ["eqspec/repad", "continuous/truncate"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repat", "'repat' has no rollback method 'repat'; allowed: truncate, repad, gather"),
        ("eqspec", "'eqspec' has no rollback method ''; allowed"),
        ("", "'' has no rollback method ''"),
        ("eqspec/repad/cached", "'eqspec/repad/cached' ends in 'cached'; allowed: uncached, ungrouped"),
        ("repad/ungrouped", "'repad/ungrouped': 'ungrouped' and 'sorted' are for schedule 'exspec'"),
    ],
)
def test_what_is_no_method_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=re.escape(f"--arms: {message}")):
        Method.parse(text)


def test_a_method_that_cannot_run_at_some_batch_size_is_refused_before_any_runs(monkeypatch):
    methods = parse_methods("truncate,exspec/group")
    check_methods(methods, [2, 8], 8, "cpu")
    with pytest.raises(ValueError, match=r"window=8 must be at least max_num_seqs=9"):
        check_methods(methods, [2, 9], 8, "cpu")
    with pytest.raises(ValueError, match=r"rollback='repad' keeps one batch together"):
        check_methods(parse_methods("exspec/repad"), [2], None, "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"rollback='compact' is a Triton kernel and needs a GPU; device='cpu'"):
        check_methods(parse_methods("compact"), [2], None, "cpu")
    check_methods(parse_methods("compact"), [2], None, "cuda:0")

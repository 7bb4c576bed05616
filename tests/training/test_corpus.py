"""The split is a function of the names; windows and documents are packed as described."""

import numpy as np

from specpaged.training.corpus import batch_at, is_held_out, is_wanted, read_documents, split


def test_split_is_disjoint_complete_and_depends_on_names_alone(tmp_path):
    for i in range(200):
        (tmp_path / f"module_{i}.py").write_text("x = 1  # padding\n" * 20)
    first = split(read_documents(tmp_path))
    assert not set(first[0]) & set(first[1])
    assert len(first[0]) + len(first[1]) == 200
    for i in range(0, 200, 2):  # other text, fewer files: every remaining name stays on its side
        (tmp_path / f"module_{i}.py").unlink()
        (tmp_path / f"module_{i + 1}.py").write_text("y = 2  # changed\n" * 30)
    train, held_out = split(read_documents(tmp_path))
    assert set(train) <= set(first[0])
    assert set(held_out) <= set(first[1])


def test_held_out_rule_never_changes():
    # The shipped figures and prompts depend on these.
    assert is_held_out("inspect.py")
    assert is_held_out("test/test_logging.py")
    assert not is_held_out("os.py")


def test_held_out_share_is_about_four_percent():
    assert 0.03 < np.mean([is_held_out(f"package/module_{i}.py") for i in range(20_000)]) < 0.05


def test_junk_is_left_out(tmp_path):
    assert is_wanted("json/decoder.py")
    for name in (
        "encodings/cp037.py",
        "site-packages/numpy/core.py",
        "test/badsyntax_3131.py",
        "pydoc_data/topics.py",
    ):
        assert not is_wanted(name)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" * 100)
    (tmp_path / "plain.py").write_bytes(b"# coffee\n" * 100)
    assert list(read_documents(tmp_path)) == ["plain.py"]


def test_an_epoch_visits_every_window_once():
    stream = np.arange(1000, dtype=np.int32)
    windows = (len(stream) - 1) // 10 - 1
    rows = np.concatenate([batch_at(stream, step, 7, 10) for step in range(windows // 7)])
    assert len(np.unique(rows[:, 0])) == len(rows)
    assert (np.diff(rows, axis=1) == 1).all()
    assert (np.diff(np.sort(rows[:, 0])) % 10 == 0).all()
    again = batch_at(stream, windows // 7 + 1, 7, 10)
    assert not np.array_equal(again, rows[:7])

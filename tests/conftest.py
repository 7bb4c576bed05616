"""One thread, so that the suite does not fight its neighbours; toy checkpoints, made once per session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("specpaged", deadline=None)  # tests never measure time
settings.load_profile("specpaged")

from tests import toys  # noqa: E402


@pytest.fixture(scope="session")
def toy_pair(tmp_path_factory):
    """A target and a draft that agrees with it about half of the time."""
    return toys.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def tokenizer_pair(tmp_path_factory):
    """The same with a tokenizer beside each model."""
    return toys.save_pair(tmp_path_factory.mktemp("pair-with-tokenizer"), with_tokenizer=True)

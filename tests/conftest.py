"""One thread, so that the suite does not fight its neighbours; toy checkpoints, made once per session."""

import logging
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

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from specpaged.testing.heads import write_clover, write_eagle3  # noqa: E402
from tests import toys  # noqa: E402

# A file is one worker's, and the last ones are waited for: those that take longest begin.
LONGEST = ("tests/vllm_plugin/", "tests/kernels/", "tests/modeling/")


def pytest_collection_modifyitems(items):
    def place(item):
        return next((i for i, folder in enumerate(LONGEST) if item.nodeid.startswith(folder)), len(LONGEST))

    items.sort(key=place)  # which leaves the tests of a file together, and in order


class _Failures(logging.Handler):
    """What is said of controllers of drafts that fail, for which nobody else does."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        if "controller of drafts failed" in record.getMessage():
            self.said.append(str(record.exc_info[1]))


@pytest.fixture(autouse=True)
def _no_controller_fails(request):
    """Outputs are the same without one: a test of outputs would not see it."""
    failures, logger = _Failures(), logging.getLogger("specpaged")
    logger.addHandler(failures)
    yield
    logger.removeHandler(failures)
    assert not failures.said or request.node.get_closest_marker("controllers_may_fail")


@pytest.fixture(scope="session")
def toy_pair(tmp_path_factory):
    """A target and a draft that agrees with it about half of the time."""
    return toys.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def tokenizer_pair(tmp_path_factory):
    """The same with a tokenizer beside each model."""
    return toys.save_pair(tmp_path_factory.mktemp("pair-with-tokenizer"), with_tokenizer=True)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A target of six layers, which heads can read: its path, and transformers' own of it."""
    path = tmp_path_factory.mktemp("target")
    toys.model(num_hidden_layers=6, initializer_range=0.2).save_pretrained(path)
    return str(path), AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def heads(target, tmp_path_factory):
    """Heads of each method for it, by name."""
    config, paths = AutoConfig.from_pretrained(target[0]), {}
    paths["eagle3"] = str(write_eagle3(tmp_path_factory.mktemp("eagle3"), config, draft_vocab_size=60))
    paths["clover"] = str(write_clover(tmp_path_factory.mktemp("clover"), config))
    return paths

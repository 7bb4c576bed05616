"""vLLM without our worker is as if we were not installed, whatever is missing here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

SCRIPT = """
import builtins, contextlib, json, logging, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
import vllm
from vllm.engine.arg_utils import EngineArgs
from specpaged.config import EMBEDDED_TARGET
from specpaged.vllm_plugin import register

OURS = "specpaged.vllm_plugin.admission"  # without which an engine is started, as well
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("specpaged").addHandler(Lines())
untouched = EngineArgs.create_engine_config

def again():
    EngineArgs.create_engine_config = untouched
    for name in [name for name in sys.modules if name.startswith("specpaged.") and name != "specpaged.config"]:
        if not name.startswith("specpaged.vllm_plugin") or name.count(".") > 1:
            del sys.modules[name]

@contextlib.contextmanager
def hidden(name):
    kept, sys.modules[name] = sys.modules.get(name), None
    yield
    del sys.modules[name]
    if kept is not None:
        sys.modules[name] = kept

def members():
    "Every name of vLLM's modules and of their classes, and what it stands for."
    found = {}
    for place, module in list(sys.modules.items()):
        if module is not None and place.split(".")[0] == "vllm":
            for name, value in list(vars(module).items()):
                found[place, name] = value
                if isinstance(value, type) and value.__module__ == place:
                    found.update({(place, name, member): of for member, of in list(vars(value).items())})
    return found

def registered():
    "What register has changed of vLLM as it is `known`, and what it has said."
    register()
    changed = [".".join(name) for name, value in members().items() if known.get(name, members) is not value]
    said = lines[:]
    lines.clear()
    return changed, said

def answer():
    "Of vLLM's own worker, in an engine that is started for it and loads its plugins, and so us, anew."
    vllm.plugins.plugins_loaded = False
    llm = vllm.LLM(
        EMBEDDED_TARGET, dtype="float32", max_model_len=64, max_num_seqs=1, kv_cache_memory_bytes=8 << 20,
        enforce_eager=True, disable_log_stats=True,
    )
    params = vllm.SamplingParams(max_tokens=4, temperature=0)
    answered = list(llm.generate("The quick", params, use_tqdm=False)[0].outputs[0].token_ids)
    lines.clear()
    return answered

touched, honest = set(), builtins.__import__
def recording(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and str((globals or {}).get("__name__")).startswith("specpaged"):
        touched.add(name)
    return honest(name, globals, locals, fromlist, level)
again()
builtins.__import__ = recording
register()
builtins.__import__ = honest
assert EngineArgs.create_engine_config is not untouched and not lines
names = sorted(name for name in touched if name.split(".")[0] in ("vllm", "specpaged", "torch", "transformers"))
said, answers = {}, {"nothing": answer()}
again()
known = members()
for name in names:
    again()
    with hidden(name):
        said[name] = registered()
        if name == OURS:
            answers[name] = answer()
            known = members()
again()
version = vllm.__version__
known["vllm", "__version__"] = vllm.__version__ = "0.99.0"
said["another version"] = registered()
known["vllm", "__version__"] = vllm.__version__ = version
again()
said["nothing"] = registered()
print(json.dumps([said, answers]))
"""


def test_whatever_register_cannot_import_is_one_line_and_vllm_is_left_as_it_was_and_answers_as_without_us():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said, answers = json.loads(done.stdout.splitlines()[-1])
    assert {"vllm", "vllm.engine.arg_utils", "specpaged.vllm_plugin.admission"} <= said.keys()
    changed, lines = said.pop("nothing")
    assert (changed, lines) == (["vllm.engine.arg_utils.EngineArgs.create_engine_config"], [])
    for name, (changed, lines) in said.items():
        assert changed == [], name
        (line,) = lines
        assert line.startswith("specpaged's worker cannot be used here: "), name
        assert "\n" not in line
    assert "this is 0.99.0" in said["another version"][1][0]
    with_us, without_us = answers.values()
    assert len(with_us) == 4
    assert without_us == with_us

"""vLLM without our worker is as if we were not installed, whatever is missing here."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import builtins, contextlib, json, logging, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
import vllm
from vllm.engine.arg_utils import EngineArgs
from specpaged.config import EMBEDDED_TARGET
from specpaged.vllm_plugin import register

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

def registered():
    register()
    said = lines[:]
    lines.clear()
    return EngineArgs.create_engine_config is untouched, said

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
said = {"nothing": (True, [], answer())}
for name in sorted(name for name in touched if name.split(".")[0] in ("vllm", "specpaged", "torch", "transformers")):
    again()
    with hidden(name):
        said[name] = registered()
        if not name.startswith("vllm"):
            said[name] += (answer(),)
    if name.startswith("vllm"):  # without which vLLM itself does not start
        said[name] += (answer(),)
again()
version, vllm.__version__ = vllm.__version__, "0.99.0"
said["another version"] = (*registered(), answer())
vllm.__version__ = version
print(json.dumps(said))
"""


def test_whatever_register_cannot_import_is_one_line_and_vllm_starts_and_answers_as_without_us():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert {"vllm", "vllm.engine.arg_utils", "specpaged.vllm_plugin.admission"} <= said.keys()
    _, _, expected = said.pop("nothing")
    assert len(expected) == 4
    for name, (untouched, lines, answered) in said.items():
        assert untouched, name
        assert answered == expected, name
        (line,) = lines
        assert line.startswith("specpaged's worker cannot be used here: "), name
        assert "\n" not in line
    assert "this is 0.99.0" in said["another version"][1][0]

"""vLLM without our worker is as if we were not installed, whatever is missing here."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import builtins, json, logging, sys
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
hidden = sorted(name for name in touched if name.split(".")[0] in ("vllm", "specpaged", "torch", "transformers"))
said = {}
for name in hidden:
    again()
    kept, sys.modules[name] = sys.modules.get(name), None
    register()
    del sys.modules[name]
    if kept is not None:
        sys.modules[name] = kept
    said[name] = (EngineArgs.create_engine_config is untouched, list(lines))
    lines.clear()
again()
version, vllm.__version__ = vllm.__version__, "0.99.0"
register()
said["another version"] = (EngineArgs.create_engine_config is untouched, list(lines))
vllm.__version__ = version
config = EngineArgs(model=EMBEDDED_TARGET, max_model_len=64).create_engine_config()
assert not config.model_config.logits_processors
print(json.dumps(said))
"""


def test_whatever_register_cannot_import_is_one_line_and_nothing_of_vllm_is_touched():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert {"vllm", "vllm.engine.arg_utils", "specpaged.vllm_plugin.admission"} <= said.keys()
    for name, (untouched, lines) in said.items():
        assert untouched, name
        (line,) = lines
        assert line.startswith("specpaged's worker cannot be used here: "), name
        assert "\n" not in line
    assert "this is 0.99.0" in said["another version"][1][0]

"""Read from the source: nothing of ours unpickles or runs what it reads, in no shell (X02, X03)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import slurm_forge

ROOT = Path(slurm_forge.__file__).parent
#: The one whose unpickler knows a handful of instructions, and those that name pickle's exception.
IMPORT_PICKLE = (
    "checkpoint/read/restricted_unpickler.py",
    "checkpoint/read/dcp_metadata.py",
    "checkpoint/read/plain_dcp.py",
)
#: They unpickle, run a text, or give it to a shell; whatever stands in front of them.
FORBIDDEN = {
    "pickle.load", "pickle.loads", "pickle.Unpickler",
    "pandas.read_pickle", "torch.hub.load",
    "torch.jit.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "runpy.run_path", "builtins.eval", "builtins.exec",
}  # fmt: skip
#: Every one of these pickles what another rank sends.
COLLECTIVES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
MODULES = ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib")


def findings(source: str) -> list[str]:
    """What a module does that none may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None) or ""
            found += [f"import {n}" for n in [*names, module] if n.split(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if any(name == bad or name.endswith(f".{bad}") for bad in FORBIDDEN):
            found.append(name)
        if name in ("eval", "exec") or name.split(".")[-1] in COLLECTIVES:
            found.append(name)
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if name.split(".")[-1] == "load" and name.startswith("torch"):
            found += (
                [] if options.get("weights_only") == "True" else [f"{name} without weights_only"]
            )
        found += [f"{name}({key}={value})" for key, value in options.items() if (key, value) in {
            ("shell", "True"), ("weights_only", "False"), ("allow_pickle", "True"),
            ("fallback_to_soft", "True"),
        }]  # fmt: skip
        if name.split(".")[-1] in ("Environment", "NativeEnvironment", "Template"):
            found += [] if "undefined" in options else [f"{name} without undefined"]
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_runs_what_it_reads(path):
    found = findings(path.read_text())
    if str(path.relative_to(ROOT)) in IMPORT_PICKLE:
        found = [each for each in found if each != "import pickle"]
    assert found == [], path


@pytest.mark.parametrize("bad", [
    "import pickle", "from cloudpickle import loads", "pickle.loads(x)", "yaml.load(x)",
    "os.system(x)", "eval(x)", "builtins.eval(x)", "subprocess.run(x, shell=True)", "torch.load(x)",
    "torch.load(x, weights_only=False)", "numpy.load(x, allow_pickle=True)", "exec('1')",
    "torch.distributed.all_gather_object(a, b)", "dist.broadcast_object_list(a)",
    "jinja2.Environment(loader=x)",
])  # fmt: skip
def test_the_gate_sees(bad):
    assert findings(bad)


def test_the_gate_lets_pass_what_is_safe():
    assert findings("torch.load(x, weights_only=True); yaml.safe_load(x); model.eval()") == []

"""What this rank runs on, as facts for the fingerprint of a run: versions, GPU, packages, code.

Rank 0 collects them once per launch.  Nothing here fails: an unavailable fact is omitted and then
counts as no difference.  Everything but git takes milliseconds; git has its own time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from slurm_forge.device.identity import device_versions
from slurm_forge.files import read_bounded
from slurm_forge.recovery.fingerprint import Fingerprint, shown_value
from slurm_forge.slurm.process import Runner, run_command
from slurm_forge.source.work_tree import GitRevision, WorkTree

#: Packages whose versions are listed; the others are combined in a digest.
_NAMED = (
    "accelerate", "apex", "bitsandbytes", "causal-conv1d", "datasets", "deepspeed", "flash-attn",
    "flash-attn-3", "jax", "lightning", "liger-kernel", "mamba-ssm", "megatron-core", "numpy",
    "peft", "pytorch-lightning", "safetensors", "sentencepiece", "slurm-forge", "timm",
    "tokenizers", "torchao", "torchaudio", "torchdata", "torchvision", "transformer-engine",
    "transformers", "triton", "webdataset", "xformers",
)  # fmt: skip
_INFO = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-py[0-9.]+)?\.(dist-info|egg-info)")
#: Variables that change results or their last bits; no others are read.
_VARIABLES = re.compile(
    r"(NCCL|PYTORCH)_[A-Z0-9_]+|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUDA_DEVICE_MAX_CONNECTIONS|PYTHONHASHSEED"
)
#: Different on every node or in every attempt, without effect on results; or possibly a secret.
_PRIVATE = re.compile(r"NCCL_(DEBUG|COMM_ID|HOSTID|.*_FILE|.*IFNAME)|.*(TOKEN|SECRET|PASSW|KEY)")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_LONGEST_PROGRAM = 1 << 22


def collect(
    *,
    device: torch.device,
    folder: Path,
    variables: Mapping[str, str],
    code: GitRevision | None = None,
    program: Path | None = None,
    run: Runner = run_command,
) -> Fingerprint:
    """All facts.  ``folder`` is where the job was submitted, ``variables`` the environment.

    ``code`` is the revision of the snapshot that the run imports from, if any; ``program`` is the
    program's main file, which counts if there is no snapshot.

    Takes at most a few seconds, and those only if git does not answer.
    """
    facts: dict[str, str] = {}
    for key, fact in _versions(device).items():
        with contextlib.suppress(Exception):  # a broken driver shows up elsewhere, too
            value = fact()
            if value:
                facts[key] = shown_value(str(value))
    return (
        Fingerprint(facts)
        | _package_facts(installed_packages(sys.path))
        | variable_facts(variables)
        | (code_facts(folder, variables, run, program) if code is None else revision_facts(code))
    )


def installed_packages(paths: Sequence[str]) -> dict[str, str]:
    """Versions by normalized name of the packages in folders, searched in this order.

    Read from the names of the metadata folders: one listing per folder.
    """
    versions: dict[str, str] = {}
    for path in paths:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(path) if path else []  # noqa: PTH208 (a name each, not a Path)
        for name in sorted(names):
            match = _INFO.fullmatch(name)
            if match is not None:
                plain = re.sub(r"[-_.]+", "-", match["name"]).lower()
                versions.setdefault(plain, match["version"])
    return versions


def variable_facts(variables: Mapping[str, str]) -> Fingerprint:
    """The few variables that change results.  No other variable is read."""
    facts = {
        f"variables.{name}": shown_value(value)
        for name, value in variables.items()
        if _VARIABLES.fullmatch(name) and not _PRIVATE.match(name)
    }
    return Fingerprint(facts, frozenset({"variables"}))


def code_facts(
    folder: Path, variables: Mapping[str, str], run: Runner, program: Path | None = None
) -> Fingerprint:
    """The git revision of the work tree around ``folder``, and a hash of uncommitted changes.

    Untracked files are not part of it, except ``program``, which has a hash of its own; nor are
    changes inside submodules.
    """
    tree = WorkTree.around(folder, variables, run)
    facts = {}
    if program is not None:
        with contextlib.suppress(OSError, ValueError):
            body = read_bounded(program, _LONGEST_PROGRAM)
            facts["code.program"] = hashlib.sha256(body).hexdigest()[:16]
    return Fingerprint(facts) | revision_facts(None if tree is None else tree.revision())


def revision_facts(revision: GitRevision | None) -> Fingerprint:
    """The same for a revision that is known."""
    if revision is None:
        return Fingerprint()
    facts = {"code.revision": revision.commit}
    if revision.changes is not None:
        facts["code.changes"] = revision.changes
    return Fingerprint(facts)


def _versions(device: torch.device) -> dict[str, Callable[[], object]]:
    facts: dict[str, Callable[[], object]] = {
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
    }
    return facts | device_versions(device)


def _package_facts(packages: Mapping[str, str]) -> Fingerprint:
    lines = "\n".join(f"{name}=={version}" for name, version in sorted(packages.items()))
    digest = hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    facts = {f"packages.{name}": packages[name] for name in _NAMED if name in packages}
    facts["packages.all"] = f"{len(packages)} ({digest})"
    return Fingerprint(facts, frozenset({"packages"}))

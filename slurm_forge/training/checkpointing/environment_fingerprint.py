"""What this rank runs on, as facts for the fingerprint of a run: versions, GPU, packages, code.

Rank 0 collects them once per launch.  Nothing here fails: a fact that can't be had is left out,
and is then no difference.  Everything but git takes a few milliseconds; git has its own time limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from slurm_forge.recovery.fingerprint import Fingerprint, shown_value
from slurm_forge.slurm.process import Completed, Runner, run_command

#: Packages whose versions are told one by one; of the others a digest.
_NAMED = (
    "accelerate", "apex", "bitsandbytes", "causal-conv1d", "datasets", "deepspeed", "flash-attn",
    "flash-attn-3", "jax", "lightning", "liger-kernel", "mamba-ssm", "megatron-core", "numpy",
    "peft", "pytorch-lightning", "safetensors", "sentencepiece", "slurm-forge", "timm",
    "tokenizers", "torchao", "torchaudio", "torchdata", "torchvision", "transformer-engine",
    "transformers", "triton", "webdataset", "xformers",
)  # fmt: skip
_INFO = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-py[0-9.]+)?\.(dist-info|egg-info)")
#: Variables that change results or their last bits; nothing else of the environment is read.
_VARIABLES = re.compile(
    r"(NCCL|PYTORCH)_[A-Z0-9_]+|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUDA_DEVICE_MAX_CONNECTIONS|PYTHONHASHSEED"
)
#: Another on every node or of every attempt, without effect on results; or by mistake a secret.
_PRIVATE = re.compile(r"NCCL_(DEBUG|COMM_ID|HOSTID|.*_FILE|.*IFNAME)|.*(TOKEN|SECRET|PASSW|KEY)")
_GIT_WITHIN = timedelta(seconds=3)
#: What a repository's configuration could have run, or changed, by a question of ours.
_OFF = (
    "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
    "-c", "diff.autoRefreshIndex=false",  # the index is somebody else's business
)  # fmt: skip
#: What of a driver counts in a diff (smudge: where files are written).
_FILTERS = r"^filter\..*\.(clean|process|required)$"
#: With whole hashes in it, a changed binary file counts as well.  Work trees of submodules have
#: configurations of their own, so git is kept out of them.
_DIFF = (
    "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short",
    "--ignore-submodules=dirty",
)  # fmt: skip
_DEEPEST = 64
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def collect(
    *,
    device: torch.device,
    folder: Path,
    variables: Mapping[str, str],
    run: Runner = run_command,
) -> Fingerprint:
    """All facts.  ``folder`` is where the job was submitted from, ``variables`` the environment.

    Takes at most a few seconds, and those only where git does not answer.
    """
    facts: dict[str, str] = {}
    for key, fact in _versions(device).items():
        with contextlib.suppress(Exception):  # a broken driver shows up in other places too
            value = fact()
            if value:
                facts[key] = shown_value(str(value))
    return (
        Fingerprint(facts)
        | _package_facts(installed_packages(sys.path))
        | variable_facts(variables)
        | code_facts(folder, variables, run)
    )


def installed_packages(paths: Sequence[str]) -> dict[str, str]:
    """Version by normalised name of what is installed in folders that are searched in this order.

    Read off the names of the metadata folders, which is one listing per folder.
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
    """The few variables that change results.  No other variable is looked at."""
    facts = {
        f"variables.{name}": shown_value(value)
        for name, value in variables.items()
        if _VARIABLES.fullmatch(name) and not _PRIVATE.match(name)
    }
    return Fingerprint(facts, frozenset({"variables"}))


def code_facts(folder: Path, variables: Mapping[str, str], run: Runner) -> Fingerprint:
    """Revision of the git work tree around ``folder``, and a hash of what was changed on top.

    Files that git does not track are not part of it, nor is what was changed inside of submodules.
    Only where the work tree is our own; and no command that its configuration names is run, so
    that a copied repository can do nothing here.
    """
    root = _work_tree(folder)
    if root is None:
        return Fingerprint()
    environment = {
        "PATH": variables.get("PATH", os.defpath),
        "LC_ALL": "C",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        # Nothing is fetched for a diff; git before 2.44 only knows the second one.
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "",
    }
    git = ["git", "--no-pager", "-C", str(root), *_OFF]

    def ask(*words: str) -> Completed | None:
        with contextlib.suppress(OSError, ValueError):  # no git here
            return run([*git, *words], _GIT_WITHIN, environment)
        return None

    answer = ask("rev-parse", "--verify", "HEAD")
    revision = answer.stdout.strip() if answer is not None and answer.returncode == 0 else ""
    if not re.fullmatch(r"[0-9a-f]{40,64}", revision):
        return Fingerprint()
    facts = {"code.revision": revision}
    filters = _without_filters(ask("config", "--name-only", "--null", "--get-regexp", _FILTERS))
    diff = None if filters is None else ask(*filters, "diff", "HEAD", *_DIFF)
    if diff is not None and diff.returncode == 0:
        digest = hashlib.sha256(diff.stdout.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        facts["code.changes"] = digest if diff.stdout else "none"
    return Fingerprint(facts)


def _without_filters(answer: Completed | None) -> list[str] | None:
    """Options of git that turn off the filters it answered with; None where that can't be had."""
    if answer is None or answer.returncode not in (0, 1):  # 1: there are none
        return None
    names = {name.rpartition(".")[0] for name in answer.stdout.split("\0") if name}
    # An option can't name what has a "=" in it; "\\" may stand for a byte that is no text.
    if any("=" in name or "\\" in name for name in names):
        return None
    off = ("clean=", "process=", "required=false")
    return [word for name in sorted(names) for each in off for word in ("-c", f"{name}.{each}")]


def _versions(device: torch.device) -> dict[str, Callable[[], object]]:
    facts: dict[str, Callable[[], object]] = {
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "gpu": lambda: "none",
    }
    if device.type == "cuda":
        hip = getattr(torch.version, "hip", None)
        facts |= {
            "gpu": lambda: torch.cuda.get_device_name(device),
            "cuda": lambda: f"ROCm {hip}" if hip else torch.version.cuda,
            "cudnn": torch.backends.cudnn.version,
            "nccl": _nccl,
            "driver": lambda: driver_version(_DRIVER_FILE.read_text("utf-8", "replace")),
        }
    return facts


def _nccl() -> str:
    parts: tuple[object, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(str(part) for part in parts)


def driver_version(text: str) -> str:
    """``550.54.15`` from what ``/proc/driver/nvidia/version`` says; empty if it does not."""
    match = re.search(r"\s([0-9]{2,}(?:\.[0-9]+)+)\s", text)
    return match[1] if match else ""


def _package_facts(packages: Mapping[str, str]) -> Fingerprint:
    lines = "\n".join(f"{name}=={version}" for name, version in sorted(packages.items()))
    digest = hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    facts = {f"packages.{name}": packages[name] for name in _NAMED if name in packages}
    facts["packages.all"] = f"{len(packages)} ({digest})"
    return Fingerprint(facts, frozenset({"packages"}))


def _work_tree(folder: Path) -> Path | None:
    """The nearest folder upwards that git works in, if it is our own."""
    here = folder.absolute()
    for candidate in [here, *here.parents][:_DEEPEST]:
        with contextlib.suppress(OSError):
            status = (candidate / ".git").lstat()
            # A file in a work tree that was added to another repository, and in a submodule.
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                return None
            owners = {status.st_uid, candidate.stat().st_uid}
            return candidate if owners == {os.geteuid()} else None
    return None

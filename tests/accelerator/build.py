"""Builds the made-up accelerator as a package of its own, outside of the repository.

It is made of ``csrc`` and ``simdev``, once for each version of these and of torch, and installed as
packages for accelerators are: an entry point has torch import it (``torch.backends``), wherever its
folder is on the path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
#: Sources of each library.  Little optimisation: it is built more often than it runs for long.
_LIBRARIES = {"_backend": ("runtime", "backend"), "_group": ("group",)}
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unused-parameter")
_METADATA = "Metadata-Version: 2.1\nName: simdev\nVersion: 0\n"
_ENTRY_POINTS = "[torch.backends]\nsimdev = simdev:register\n"


def cache_folder() -> Path:
    """Where builds are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "slurm_forge-simdev"


def installed() -> Path:
    """The folder to have on the path; what of it isn't there is built first.

    Raises:
        RuntimeError: The compiler's words, where it fails.
    """
    root = cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "lock"), ThreadPoolExecutor() as compiling:
        names = {name for sources in _LIBRARIES.values() for name in sources}
        objects = dict(zip(names, compiling.map(_compiled, names), strict=True))
        python = sorted((_HERE / "simdev").glob("*.py"))
        folder = root / f"installed-{_digest([*python, *objects.values()])}"
        if not folder.exists():
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            _install(building, objects)
            building.rename(folder)
    return folder


def _compiled(name: str) -> Path:
    """The object file of a source."""
    source = _HERE / "csrc" / f"{name}.cpp"
    made = cache_folder() / f"{name}-{_digest([source, *sorted(source.parent.glob('*.h'))])}.o"
    if not made.exists():
        folders = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include"]
        folders.append(Path(sysconfig.get_path("include")))
        headers = [word for folder in folders for word in ("-isystem", str(folder))]
        part = made.with_suffix(".part")
        _run("g++", *_FLAGS, *headers, "-c", str(source), "-o", str(part))
        part.rename(made)
    return made


def _install(folder: Path, objects: Mapping[str, Path]) -> None:
    package = folder / "simdev"
    shutil.copytree(_HERE / "simdev", package, ignore=shutil.ignore_patterns("__pycache__"))
    described = folder / "simdev-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(_METADATA)
    (described / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}"]
    for library, sources in _LIBRARIES.items():
        made = [str(objects[name]) for name in sources]
        with_ = ["-lc10", "-ltorch_cpu"]
        if library == "_group":  # uses the other one
            with_ = [
                f"-L{package}",
                "-l:_backend.so",
                "-Wl,-rpath,$ORIGIN",
                "-ltorch_python",
                *with_,
            ]
        _run("g++", "-shared", "-o", str(package / f"{library}.so"), *made, *paths, *with_)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the made-up accelerator can't be built:\n{done.stderr[-8000:]}")


if __name__ == "__main__":
    print(installed())

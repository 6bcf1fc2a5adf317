# shellcheck shell=bash
# Sourced by the scripts beside it: makes the virtual environment that they run in.
#
# FORGE_VENV names another place for it, FORGE_PYTHON the interpreter to make it with.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${FORGE_VENV:-$PWD/.venv}"
py="$venv/bin/python"
# Thousands of interpreters are started: where nothing compiled may be kept, each of them, and
# pytest for its assertions, would compile everything anew.
unset PYTHONDONTWRITEBYTECODE

need_venv() {
    [ -x "$py" ] && return
    echo "making a virtual environment in $venv" >&2
    local base="${FORGE_PYTHON:-python3}"
    if ! "$base" -m venv "$venv" 2>/dev/null; then
        # Debian and Ubuntu keep the venv module in a package of its own.
        rm -rf "$venv"
        as_root apt-get update -q
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv
        "$base" -m venv "$venv"
    fi
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif sudo -n true 2>/dev/null; then sudo "$@"; else
        echo "this needs root once: $*" >&2
        return 1
    fi
}

has_nvidia() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# An accelerator of whatever kind that the torch in $venv was built for.
torch_sees_gpu() {
    "$py" -c 'from slurm_forge.device.accelerator import kind; raise SystemExit(kind() is None)'
}

# Gigabytes of CUDA libraries serve nobody on a machine without a GPU of NVIDIA's.  Torch for other
# kinds is on indexes of its own, by versions of their drivers: FORGE_VENV names where it is.
need_torch() {
    "$py" -c 'import torch' 2>/dev/null && return
    echo "installing PyTorch into $venv (a minute or two)" >&2
    if has_nvidia; then
        "$py" -m pip install -q -c constraints-dev.txt torch numpy
    else
        "$py" -m pip install -q "torch==2.13.0+cpu" numpy 2>/dev/null ||
            "$py" -m pip install -q --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0"
        "$py" -m pip install -q -c constraints-dev.txt numpy
        "$py" - <<'PYTHON'
import sys
import torch
if torch.version.cuda is not None:
    sys.exit(f"this machine has no NVIDIA GPU, and torch {torch.__version__} is a GPU build")
PYTHON
    fi
}

# need_packages [dev]: slurm_forge itself, editable, with the versions of constraints-dev.txt.
# shellcheck disable=SC2120 # without an argument the base package
need_packages() {
    local extra="${1:+[$1]}" stamp="$venv/.forge-${1:-base}"
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints-dev.txt -nt "$stamp" ]; then
        grep -v '^torch==' constraints-dev.txt > "$venv/constraints.txt"
        "$py" -m pip install -q -c "$venv/constraints.txt" -e ".$extra"
        touch "$stamp"
    fi
}

# Reports are looked at in a browser; false where there is none, and none may be installed.
need_chromium() {
    if command -v chromium >/dev/null; then return; fi
    as_root apt-get update -q && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium
}

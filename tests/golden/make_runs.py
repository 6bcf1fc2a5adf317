"""``python -m tests.golden.make_runs FOLDER``: the run directories that are kept in ``runs/``.

They are of the version that wrote them, and later ones must list, explain and resume them: never
write the kept ones anew; a format that changed gets a folder of its own beside them.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "acceptance" / "project"
#: Stands for the interpreter in what is kept; the folder is FOLDER.
INTERPRETER = "/golden/bin/python"
_CHECKPOINTS = "checkpoint: {every_steps: 10, every_minutes: null, keep_last: 2}\n"
JOBS = {
    "finished": f"""name: finished
entry: train.py:train
args: {{steps: 40}}
resources: {{tasks_per_node: 2}}
{_CHECKPOINTS}inject: [term@15:rank1, nan@25]
""",
    "interrupted": f"""name: interrupted
entry: train.py:train
args: {{steps: 40, pace: 0.3}}
{_CHECKPOINTS}""",
}


def main() -> None:
    """Make both, and stop the second one once it has saved something."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    shutil.copy(PROJECT / "train.py", folder)
    for name, job in JOBS.items():
        (folder / f"{name}.yaml").write_text(job)
    verb = [sys.executable, "-m", "slurm_forge", "run"]
    subprocess.run([*verb, "finished.yaml"], cwd=folder, check=True)
    with subprocess.Popen([*verb, "interrupted.yaml"], cwd=folder) as interrupted:
        until = time.monotonic() + 600
        while not list(folder.glob("runs/interrupted/checkpoints/step-*10.*/manifest.json")):
            assert time.monotonic() < until, "it never saved"
            assert interrupted.poll() is None, "it ended by itself"
            time.sleep(0.1)
        interrupted.send_signal(signal.SIGTERM)
    for file in folder.glob("runs/*/run.yaml"):
        file.write_text(file.read_text().replace(sys.executable, INTERPRETER))
    sys.stdout.write(json.dumps(sorted(str(path) for path in folder.glob("runs/*"))) + "\n")


if __name__ == "__main__":
    main()

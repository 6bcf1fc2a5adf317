"""A Slurm that answers what a real one of that version has answered (``data/``)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

DATA = Path(__file__).parent / "data"


def recorded(version: str) -> dict[str, str]:
    def text(name: str) -> str:
        return (DATA / version / name).read_text()

    config = text("config.txt") if version == "v26" else (DATA / "config.txt").read_text()
    partitions = (
        text("partition.txt") if version == "v26" else (DATA / "partitions.txt").read_text()
    )
    return {
        "scontrol show config": config,
        "scontrol -a show partition": partitions,
        "sinfo": text("sinfo.txt"),
        "scontrol show node": "NodeName=n1 Arch=aarch64 CoresPerSocket=2\n",
        "sacctmgr --noheader --parsable2 show qos": text("qos.txt"),
        "sacctmgr --noheader --parsable2 show assoc": text("assoc.txt"),
        "sacctmgr --noheader --parsable2 show user": text("user.txt"),
    }


class Recorded:
    """Answers as recorded; ``broken`` maps the beginning of a command to what it raises."""

    def __init__(self, answers: dict[str, str], broken: dict[str, Exception] | None = None) -> None:
        self.answers = answers
        self.broken = broken or {}
        self.asked: list[str] = []

    def answer(self, *argv: str) -> str:
        line = " ".join(argv)
        self.asked.append(line)
        for start, error in self.broken.items():
            if line.startswith(start):
                raise error
        return next(text for start, text in self.answers.items() if line.startswith(start))

    def with_timeout(self, timeout: timedelta) -> Recorded:
        return self

"""What the main thread's Python stack reveals about a rank: text in, facts out.

Formats: ``faulthandler`` of CPython 3.10 to 3.14 (all threads, the main one last) and
``py-spy dump`` (threads by name).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MOST_FRAMES = 100
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+[^\n]{0,120}\(most recent call first\)")
_FRAME = re.compile(r'  File "([^"\n]{1,1000})", line ([0-9]{1,9}),? in (.{1,200})')
_SPY_THREAD = re.compile(r'Thread [^\n]{1,80}"([^"\n]{0,200})"')
_SPY_FRAME = re.compile(r"    (.{1,300}?) \(([^()\n]{1,1000}?)(?::([0-9]{1,9}))?\)")
#: Where a rank waits for others.  Backward is one of these: DDP's all-reduce runs at its end.
_TOGETHER = ("torch/distributed/", "torch/nn/parallel/distributed.py", "checkpoint/collectives.py")
_BACKWARD = "_engine_run_backward"
_COMPILING = ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/", "triton/compiler/")
_SAVING = (
    "slurm_forge/checkpoint/",
    "slurm_forge/store/",
    "slurm_forge/files/",
    "torch/serialization.py",
)
#: Carries out a save on its own thread while the main thread waits for it.
_AWAITS_SAVE = "slurm_forge/checkpoint/write/pending_save.py"
_LOADING = ("slurm_forge/training/data/loader.py", "torch/utils/data/")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: file, line (0: unknown), function."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """``forward (model.py:12)``."""
        name = self.file.rpartition("/")[2]
        return f"{self.function} ({name}{f':{self.line}' if self.line else ''})"


@dataclass(frozen=True, slots=True)
class Where:
    """``together``: inside a collective operation.  ``call`` is its name."""

    together: bool = False
    compiling: bool = False
    saving: bool = False
    loading: bool = False
    call: str = ""
    top: str = ""


def threads(text: str) -> tuple[tuple[Frame, ...], ...]:
    """The frames of every thread, innermost first; the main thread comes last."""
    stacks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append(("", []))
        elif (heading := _SPY_THREAD.match(line)) is not None:
            stacks.append((heading[1], []))
        elif stacks and len(stacks[-1][1]) < _MOST_FRAMES:
            frame = _FRAME.match(line)
            if frame is not None:
                stacks[-1][1].append(Frame(frame[1], int(frame[2]), frame[3]))
            elif (spied := _SPY_FRAME.match(line)) is not None:
                name = spied[1].rpartition(".")[2]  # newer versions print the class, too
                stacks[-1][1].append(Frame(spied[2], int(spied[3] or 0), name))
    stacks.sort(key=lambda each: each[0] == "MainThread")  # stable: the others keep their order
    return tuple(tuple(frames) for _, frames in stacks if frames)


def essence(text: str) -> str:
    """The part that ``where`` reads, as the text of a dump of bounded length."""
    everything = threads(text)
    parts = [*_savers(everything[:-1]), *everything[-1:]]
    return "".join(
        "Thread 0x0 (most recent call first)\n"
        + "".join(
            f'  File "{f.file[-200:]}", line {f.line} in {f.function[:100]}\n' for f in each[:40]
        )
        for each in parts
    )


def where(text: str) -> Where:
    """What the main thread's innermost frames mean.

    If it waits for its own save, the thread that carries out the save is read instead: that one may
    wait for other ranks, or for the file system.
    """
    everything = threads(text)
    if not everything:
        return Where()
    main = everything[-1]
    if any(_AWAITS_SAVE in f.file for f in main):
        return _of_frames(next(iter(_savers(everything[:-1])), main))
    return _of_frames(main)


def _savers(others: tuple[tuple[Frame, ...], ...]) -> list[tuple[Frame, ...]]:
    return [
        frames
        for frames in others
        if any(_AWAITS_SAVE in f.file for f in frames)
        and any(f.function == "run_to_end" for f in frames)
    ][:2]


def _of_frames(frames: tuple[Frame, ...]) -> Where:
    # Skip Python's own wrappers (threading, selectors, contextlib): they say nothing.
    first = next((f for f in frames if "/" in f.file and not _is_python(f.file)), frames[0])
    near = frames[:12]
    together = any(part in first.file for part in _TOGETHER) or first.function == _BACKWARD
    call = ""
    if together:
        call = next(
            (
                f.function
                for f in near
                if any(part in f.file for part in _TOGETHER) and not f.function.startswith("_")
                and f.function not in ("wrapper", "inner")
            ),
            "backward" if first.function == _BACKWARD else first.function,
        )  # fmt: skip
    return Where(
        together=together,
        compiling=any(part in f.file for f in near for part in _COMPILING),
        saving=not together and any(part in f.file for f in frames for part in _SAVING),
        loading=not together and any(part in f.file for f in near for part in _LOADING),
        call=call,
        top=frames[0].text if frames[0] == first else f"{frames[0].text} in {first.text}",
    )


def _is_python(file: str) -> bool:
    return "/lib/python3" in file and "site-packages" not in file and "dist-packages" not in file

"""The process that checks a node for its rank: forked, connected by pipes, killed when it hangs.

Whatever may block for ever (a GPU, a file system, a collective) happens here, and leaves nothing
behind in the rank that trains: no GPU context, no thread, no descriptor.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch

from slurm_forge.control.messages.preflight import Check, CheckVerdict
from slurm_forge.descendants import die_with_parent
from slurm_forge.device.accelerator import choose_device, kind
from slurm_forge.signals import SAVE_SIGNALS, signal_name
from slurm_forge.training.core.process_group import connect_store, host_store
from slurm_forge.training.preflight.group_test import GroupTest, try_together
from slurm_forge.training.preflight.node_checks import (
    NodeRequirements,
    run_checks,
)

_LIMIT = 1 << 20
_POLL_S = 0.002
_GONE_WITHIN_S = 2.0
#: How much later than its own deadline the child may answer.
_TO_SAY_SO_S = 0.7
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTestRequest:
    """A collective to take part in, as number ``rank`` of ``size``.

    ``hosts`` and ``port`` are where the first rank listens, which chooses them itself.
    """

    nonce: str
    rank: int
    size: int
    backend: str
    within_s: float
    hosts: tuple[str, ...] = ()
    port: int = 0
    one_node: bool = False


class Looker:
    """The child, as the rank sees it.  ``begin`` creates a new one after one had to be killed.

    ``may_use_gpu`` is False if this process has used a GPU: its forks can't.
    """

    def __init__(
        self, requirements: NodeRequirements, environ: Mapping[str, str], *, may_use_gpu: bool
    ) -> None:
        self._requirements = requirements
        self._environ = environ
        self._may_use_gpu = may_use_gpu
        self._pid = 0
        self._asks = self._answers = -1
        self._buffer = b""
        #: Whether it ended by itself, and how.
        self._child_gone = False
        self._how = ""
        #: What it would compute on: only the child may ask the driver.
        self.device = _CPU
        #: In the child: groups that others may still be reading from.
        self._held_memory: list[object] = []

    def begin(self) -> None:
        """Fork it."""
        ask_reader, self._asks = os.pipe2(os.O_CLOEXEC)
        self._answers, answer_writer = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        # Slurm signals every process of a step: the rank decides what a stop means, and a child
        # that died of it would be evidence against its node.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *SAVE_SIGNALS})
        try:
            pid = os.fork()
            if pid == 0:
                os.close(self._asks)
                os.close(self._answers)
                _be_it(parent, ask_reader, answer_writer, self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._pid, self._child_gone, self._how = pid, False, ""
        os.close(ask_reader)
        os.close(answer_writer)
        self._buffer = b""

    def checks(self, within_s: float) -> tuple[Check, ...]:
        """Its findings on the node; bad if it does not answer in time, nor a second one.

        A process forked from one with threads may, very rarely, wait for a lock that none of its
        own threads will ever release: that is no fault of the node.
        """
        started_at = time.monotonic()
        body, place = self._run_checks(within_s)
        if body is None:
            self.begin()
            body, place = self._run_checks(within_s)
        if body is None:
            how = self._how or f"no answer within {within_s:.0f} s"
            text = f"{how}, in {place or 'its start'}; twice"
            seconds = round(time.monotonic() - started_at, 4)
            return (Check(name="answer", verdict=CheckVerdict.BAD, text=text, seconds=seconds),)
        self.device = torch.device(body["device"])
        return tuple(
            Check(
                name=each["name"],
                verdict=CheckVerdict(each["verdict"]),
                text=each["text"],
                seconds=each["seconds"],
            )
            for each in body["checks"]
        )

    def _run_checks(self, within_s: float) -> tuple[dict[str, Any] | None, str]:
        """Its answer, and the last check that began; it is killed if there is no answer."""
        self._ask({"do": "look"})
        until, place = time.monotonic() + within_s, ""
        while (body := self._answer(until)) is not None and "begun" in body:
            place = str(body["begun"])
        if body is None:
            self.end()
        return body, place

    def trial(self, request: GroupTestRequest, published: Callable[[int], None]) -> GroupTest:
        """Take part in a collective; ``published`` gets the port if this rank is the first.

        Fails after ``within_s``; then the child is killed, which frees its GPU memory.
        """
        if not self._pid:
            self.begin()
        self._ask({"do": "try", "asked": asdict(request)})
        started_at = time.monotonic()
        until = started_at + request.within_s + _TO_SAY_SO_S
        body = self._answer(until)
        if body is not None and "port" in body:
            published(int(body["port"]))
            body = self._answer(until)
        if body is None:
            self.end()
            took = time.monotonic() - started_at
            return GroupTest(
                ok=False, seconds=took, text=self._how or f"no answer within {took:.0f} s"
            )
        return GroupTest(**body["trial"])

    def end(self) -> None:
        """Kill and reap it; one that is stuck in the kernel is left to the agent."""
        pid, self._pid = self._pid, 0
        for descriptor in (self._asks, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._asks = self._answers = -1
        if not pid:
            return
        with contextlib.suppress(ChildProcessError):
            if self._child_gone and (status := _collected(pid, _GONE_WITHIN_S)) is not None:
                self._how = _how(status)
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _collected(pid, _GONE_WITHIN_S)

    def _ask(self, body: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it is gone, and will not answer either
            os.write(self._asks, json.dumps(body).encode() + b"\n")

    def _answer(self, until: float) -> dict[str, Any] | None:
        """The next line from it; None if there is none in time, or it is gone."""
        while b"\n" not in self._buffer:
            remaining_s = until - time.monotonic()
            if remaining_s <= 0 or not _readable(self._answers, remaining_s):
                return None
            data = os.read(self._answers, 1 << 16)
            if not data or len(self._buffer) > _LIMIT:
                self._child_gone = not data
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        body: dict[str, Any] = json.loads(line)
        return body

    # -- in the child ------------------------------------------------------------------------

    def serve(self, asks: int, answers: int) -> None:
        """Answer requests until there are no more."""

        def say(body: Mapping[str, Any]) -> None:
            os.write(answers, json.dumps(body).encode() + b"\n")

        with os.fdopen(asks, "rb") as reader:
            for line in reader:
                body = json.loads(line)
                if body["do"] == "look":
                    checks = run_checks(
                        self._requirements,
                        self._environ,
                        may_use_gpu=self._may_use_gpu,
                        on_check_started=lambda name: say({"begun": name}),
                    )
                    used = any(check.name == "gpu memory" for check in checks)
                    device = (kind() if used else None) or _CPU
                    say({"checks": [asdict(check) for check in checks], "device": device.type})
                else:
                    fields = body["asked"]
                    fields["hosts"] = tuple(fields["hosts"])
                    say({"trial": asdict(self._try(GroupTestRequest(**fields), say))})

    def _try(
        self, request: GroupTestRequest, say: Callable[[Mapping[str, Any]], None]
    ) -> GroupTest:
        within = timedelta(seconds=request.within_s)
        device = _CPU
        if request.backend != "gloo":
            device = choose_device(self._requirements.local_rank)
        try:
            if request.rank == 0:
                store = host_store(request.size, within, one_node=request.one_node)
                say({"port": store.port})
            else:
                store = connect_store(
                    request.hosts, request.port, request.size, within, answer_within=within / 2
                )
        except RuntimeError as error:
            return GroupTest(ok=False, seconds=0.0, text=str(error).splitlines()[0][:300])
        if self._requirements.broken == "silent":
            while True:  # a node that takes part in nothing
                time.sleep(60)
        return try_together(
            store,
            nonce=request.nonce,
            rank=request.rank,
            size=request.size,
            backend=request.backend,
            device=device,
            within=within,
            keep=self._held_memory.append,
            spoil=_spoil if self._requirements.broken == "sums" else lambda _: None,
        )


def _readable(descriptor: int, within_s: float) -> bool:
    # Not select(2), which is limited to the first 1024 descriptors of a process.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(within_s * 1000)))


def _collected(pid: int, within_s: float) -> int | None:
    """How a child ended (a wait status); None if it lives on for that long."""
    until = time.monotonic() + within_s
    while True:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            return status
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_S)


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"the process of the check was killed ({signal_name(os.WTERMSIG(status))})"
    return f"the process of the check ended with {os.WEXITSTATUS(status)}"


def _spoil(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _be_it(parent: int, asks: int, answers: int, looker: Looker) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        # Locks that the rank's threads held at the fork are held for ever in here: so one thread,
        # and nothing of theirs is used.
        torch.set_num_threads(1)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)  # what a killed group prints is no output of the program
        os.dup2(quiet, 2)
        looker.serve(asks, answers)
        code = 0
    finally:
        os._exit(code)

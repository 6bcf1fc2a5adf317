"""A rank's part in checking all nodes before a launch: report findings, take part in trials.

It reports over the control channel and continues when the hub allows it; the hub's side is
``launch.conductor.preflight_monitor``.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from slurm_forge.control import Member
from slurm_forge.control.addresses import format_addresses, parse_addresses
from slurm_forge.control.messages.hub import Publish
from slurm_forge.control.messages.preflight import (
    Check,
    CheckVerdict,
    NodeReport,
    PreflightReport,
    PreflightRound,
    PreflightTried,
    Thoroughness,
    round_key,
    store_key,
)
from slurm_forge.device.accelerator import in_use
from slurm_forge.device.groups import backend_for
from slurm_forge.errors import ControlChannelError
from slurm_forge.json_codec import parse
from slurm_forge.run_directory import RunDirectory
from slurm_forge.spec.faults import FaultKind
from slurm_forge.spec.run_file import RunFile
from slurm_forge.training.core.process_group import store_hosts
from slurm_forge.training.core.rank_info import RankPlace
from slurm_forge.training.faults.injector import (
    FOLDER,
    StruckFaults,
)
from slurm_forge.training.preflight.child import (
    GroupTestRequest,
    Looker,
)
from slurm_forge.training.preflight.group_test import GroupTest
from slurm_forge.training.preflight.node_checks import NodeRequirements

#: Longer than the hub waits for ranks that never join: it can name them, and this rank can't.
_MEET_WITHIN = timedelta(minutes=20)
#: A collective gets at least this long, however late the first of its ranks was.
_LEAST_S = 0.5
_TIMES_WITHIN = 6
#: More names do not fit on a line of the channel; by then everybody is affected anyway.
_MOST_NAMED = 4096


class Preflight:
    """One rank's part.  ``run`` returns when training may begin; otherwise the hub ends the launch.

    ``own_address`` is this node's on the network that the site prefers.
    """

    def __init__(
        self,
        member: Member,
        place: RankPlace,
        requirements: NodeRequirements,
        *,
        nonce: str,
        environ: Mapping[str, str],
        within: timedelta,
        meet_within: timedelta = _MEET_WITHIN,
        own_address: str | None = None,
    ) -> None:
        self._member = member
        self._place = place
        self._requirements = requirements
        self._nonce = nonce
        self._within_s = within.total_seconds()
        # The hub waits several times as long for missing ranks, and names them.
        self._meet_s = meet_within.total_seconds() + _TIMES_WITHIN * self._within_s
        self._own_address = own_address
        self._may_use_gpu = in_use() is None
        self._looker = Looker(requirements, environ, may_use_gpu=self._may_use_gpu)

    def run(self) -> None:
        """Check, report, and take part in the hub's trials until there are no more."""
        if self._requirements.thoroughness is Thoroughness.OFF:
            return
        started_at = time.monotonic()
        try:
            self._looker.begin()
            checks = self._looker.checks(self._within_s)
        except OSError as error:  # no process, no pipe: no verdict on the node
            text = f"can't be checked: {error}"
            checks = (Check(name="preflight", verdict=CheckVerdict.SKIPPED, text=text),)
        try:
            self._say(checks, time.monotonic() - started_at)
            number = 1
            while (groups := self._round(number)).groups:
                self._take_part(number, groups)
                number += 1
        finally:
            self._looker.end()

    def _say(self, checks: tuple[Check, ...], seconds: float) -> None:
        place = self._place
        device = self._looker.device
        report = NodeReport(
            rank=place.rank,
            host=place.host,
            local_rank=place.local_rank,
            device=device.type,
            backend=backend_for(device),
            python=platform.python_version(),
            torch=torch.__version__,
            full=self._requirements.thoroughness is Thoroughness.FULL,
            seconds=round(seconds, 4),
            checks=checks,
        )
        report = replace(report, sent=time.time())
        self._member.send(PreflightReport(body=report.to_text()))

    def _round(self, number: int) -> PreflightRound:
        return parse(PreflightRound, self._member.published(round_key(number), self._meet_s))

    def _take_part(self, number: int, groups: PreflightRound) -> None:
        rank = self._place.rank
        index = next((i for i, group in enumerate(groups.groups) if rank in group), None)
        if index is None:
            return
        group, key = groups.groups[index], store_key(number, index)
        request = GroupTestRequest(
            nonce=f"{self._nonce}/{key}",
            rank=group.index(rank),
            size=len(group),
            backend=groups.backend,
            within_s=groups.within_s,
            one_node=self._place.one_node,
        )
        started_at = time.monotonic()
        try:
            if request.rank:
                hosts, port = parse_addresses(self._member.published(key, groups.within_s))
                request = replace(request, hosts=hosts, port=port)
                # One deadline for both: a rank that is late here misses the next round's beginning.
                remaining_s = groups.within_s - (time.monotonic() - started_at)
                request = replace(request, within_s=max(_LEAST_S, remaining_s))
            trial = self._looker.trial(request, lambda port: self._publish(key, port, group[1:]))
        except (ControlChannelError, OSError, ValueError) as error:
            took = time.monotonic() - started_at
            trial = GroupTest(ok=False, seconds=took, text=str(error).splitlines()[0][:300])
        self._member.send(
            PreflightTried(
                round=number,
                ok=trial.ok,
                seconds=round(trial.seconds, 4),
                bytes_per_s=round(trial.bytes_per_s, 1),
                text=trial.text,
            )
        )

    def _publish(self, key: str, port: int, others: Sequence[int]) -> None:
        # To these ranks only: of a thousand nodes, five hundred pairs publish at once.
        hosts = store_hosts(self._own_address, one_node=self._place.one_node)
        value = format_addresses(hosts, port)
        to = () if len(others) > _MOST_NAMED else tuple(others)
        self._member.send(Publish(key=key, value=value, to=to))


def requirements_of_run(
    directory: RunDirectory,
    file: RunFile,
    place: RankPlace,
    *,
    attempt: int,
    launch: int,
    thoroughness: Thoroughness,
    on_hang: bool,
) -> NodeRequirements:
    """What the node of a rank of this run is checked for."""
    resources = file.job.resources
    gpus = None
    if resources.gpus_per_task is not None:
        gpus = resources.gpus_per_task.count
    elif resources.gpus_per_node is not None:
        gpus = min(1, resources.gpus_per_node.count)  # a rank may see only its own GPU
    return NodeRequirements(
        thoroughness=thoroughness,
        gpus=gpus,
        local_rank=place.local_rank,
        ranks=place.world_size,
        memory=resources.mem or None,
        folder=_folder(directory, attempt) if place.local_rank == 0 else None,
        sets=file.sets,
        on_hang=on_hang,
        broken=_broken(directory, file, place, attempt, launch)
        if thoroughness is Thoroughness.FULL
        else "",
    )


def _folder(directory: RunDirectory, attempt: int) -> Path:
    return directory.attempt(attempt)


_BROKEN = {
    FaultKind.BAD_NODE: "computes",
    FaultKind.BAD_LINK: "silent",
    FaultKind.BAD_SUM: "sums",
}


def _broken(
    directory: RunDirectory, file: RunFile, place: RankPlace, attempt: int, launch: int
) -> str:
    """The injected fault of this node, to rehearse a launch."""
    for fault in file.job.inject:
        applies = fault.rank in (None, place.rank) and fault.host in (None, place.host)
        if fault.kind not in _BROKEN or not applies or fault.attempt not in (None, attempt):
            continue
        struck = StruckFaults(
            directory.path / FOLDER, launch=f"{attempt}.{launch}", rank=place.rank
        )
        try:
            if fault.deterministic or struck.may(fault, 0):
                return _BROKEN[fault.kind]
        except OSError:
            continue  # an unrecorded fault would strike for ever
    return ""

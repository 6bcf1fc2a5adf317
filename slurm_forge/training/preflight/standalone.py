"""A node's part in ``slurm-forge probe``: the process ``preflight_node FOLDER``.

Like the rank of a run it checks its node and takes part in collectives, and is then done.
``--busy``: somebody trains there.  ``--place I/N`` gives its place if there is no Slurm.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm_forge.control import Member
from slurm_forge.control.addresses import parse_addresses
from slurm_forge.control.handshake import Credentials
from slurm_forge.control.messages.preflight import Thoroughness
from slurm_forge.errors import ForgeError
from slurm_forge.knobs import Knobs, process_environ
from slurm_forge.training.core.rank_info import (
    RankPlace,
    place_from_environ,
)
from slurm_forge.training.preflight.main import Preflight
from slurm_forge.training.preflight.node_checks import NodeRequirements


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node; 0 once the hub has all reports, 1 if it can't be reached."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--within", type=float, default=60.0)
    parser.add_argument("--gpus", type=int, default=None)
    parser.add_argument("--place", default=None)
    parser.add_argument("--broken", default="")
    options = parser.parse_args(argv)
    environ = process_environ()
    knobs = Knobs.from_environ(environ)
    place = place_from_environ(environ)
    if options.place is not None:
        rank, _, world = options.place.partition("/")
        place = replace(
            place,
            rank=int(rank),
            local_rank=int(rank),
            world_size=int(world),
            node=f"{socket.gethostname()}/{rank}",
        )
    try:
        member = _join(place, knobs)
    except (ForgeError, ValueError) as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1
    requirements = NodeRequirements(
        thoroughness=Thoroughness.FULL,
        gpus=options.gpus,
        every_gpu=options.place is None,
        local_rank=place.local_rank,
        folder=options.folder,
        busy=options.busy,
        broken=_on(place, options.broken),
    )
    try:
        Preflight(
            member,
            place,
            requirements,
            nonce=knobs.nonce,
            environ=environ,
            within=timedelta(seconds=options.within),
        ).run()
    except ForgeError as error:
        sys.stderr.write(f"slurm_forge: {error}\n")
        return 1
    finally:
        member.close()
    return 0


def _on(place: RankPlace, broken: str) -> str:
    """``n2=computes``: the injected fault, if this is that node."""
    host, _, how = broken.partition("=")
    return how if host == place.host else ""


def _join(place: RankPlace, knobs: Knobs) -> Member:
    hosts, port = parse_addresses(knobs.channel or "")
    return Member(
        rank=place.rank,
        world_size=place.world_size,
        credentials=Credentials(knobs.nonce, knobs.secret),
        hosts=hosts,
        port=port,
        host=place.host,
        pid=os.getpid(),
        on_abort=lambda _: os._exit(0),
    )


if __name__ == "__main__":
    sys.exit(main())

"""Meet the other ranks: one process group for training, one on the CPU, one for the probe.

Rank 0 of this launch chooses the port, which is sent over the control channel, and every key is
below the launch's nonce: a rank left over from an older launch can neither find nor join.  Torch's
store authenticates nobody, and shows its keys to everybody: nothing in them is secret.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from slurm_forge.control import Member
from slurm_forge.control.addresses import (
    answering_first,
    candidates,
    format_addresses,
    parse_addresses,
)
from slurm_forge.control.messages.hub import Publish
from slurm_forge.device.groups import backends_for, bound_device, small_group
from slurm_forge.errors import ConfigError, ControlChannelError

_STORE_KEY = "store"
#: Thread blocks of a probe: its kernel must find room beside training's.
_PROBE_CTAS = 2
#: How long one of rank 0's addresses may take to answer before the next one is tried.
_ANSWER = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups beside the default one; all None for a single process."""

    cpu: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None
    probe: dist.ProcessGroup | None = None


def join(
    member: Member,
    *,
    rank: int,
    world_size: int,
    nonce: str,
    device: torch.device,
    wait: timedelta,
    collective_timeout: timedelta,
    own_address: str | None = None,
    one_node: bool = False,
    probe_timeout: timedelta | None = None,
) -> ProcessGroups:
    """Initialize torch.distributed and the groups beside it; collective over all ranks.

    ``own_address`` is this node's on the network that the site prefers; ``one_node``: all ranks are
    on this node, and no other needs to reach it.
    """
    backend = backends_for(device)
    if world_size == 1:
        # No other rank, but a program that wraps its model for many ranks must run on one, too.
        if not dist.is_initialized():  # by the previous attempt, if it ran in this process
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return ProcessGroups()
    if dist.is_initialized():
        refuse_another(rank, world_size)
    else:
        store = PrefixStore(nonce, _store(member, rank, world_size, wait, own_address, one_node))
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=collective_timeout,
            device_id=bound_device(device),
        )
    # Barriers and gathers of a save use a separate group: never the training group.
    cpu = dist.new_group(backend="gloo", timeout=collective_timeout, group_desc="forge_cpu")
    probe = small_group(
        device,
        timeout=probe_timeout or collective_timeout,
        ctas=_PROBE_CTAS,
        description="forge_probe",
    )
    # A background save has its exchange while training uses the other groups.
    saving = dist.new_group(backend="gloo", timeout=collective_timeout, group_desc="forge_save")
    return ProcessGroups(cpu=cpu, saving=saving, probe=probe)


def refuse_another(rank: int, world_size: int) -> None:
    """A default group made by the script is used if it has all ranks, with the same numbers.

    Its timeout and backend are the script's; our groups beside it are created as usual.  For a
    single rank any group will do.  Raises ``ConfigError``.
    """
    if world_size == 1 or not dist.is_initialized():
        return
    theirs = dist.get_rank(), dist.get_world_size()
    if theirs != (rank, world_size):
        raise ConfigError(
            f"torch.distributed is initialised as rank {theirs[0]} of {theirs[1]}, and this is "
            f"rank {rank} of {world_size} by its environment",
            next_step="Let init_process_group take rank and world size from the environment, or "
            "call slurm_forge.attach before it: attach makes the group where there is none.",
        )


def host_store(size: int, within: timedelta, *, one_node: bool = False) -> TCPStore:
    """The store of ``size`` processes, on a free port of this machine, which it knows.

    Torch makes it listen on every interface, except for ``one_node``, where the loopback suffices.
    """
    if one_node:
        listening = socket.create_server(("127.0.0.1", 0), backlog=size)
        with contextlib.suppress(NotImplementedError, RuntimeError):  # torch's backends differ
            return TCPStore(
                "127.0.0.1",
                listening.getsockname()[1],
                size,
                is_master=True,
                timeout=within,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
                use_libuv=False,  # which accepts no socket in torch 2.6
            )
    return TCPStore(
        "0.0.0.0",  # noqa: S104  torch listens on every interface whatever it is given
        0,
        size,
        is_master=True,
        timeout=within,
        wait_for_workers=False,
    )


def store_hosts(own_address: str | None, *, one_node: bool) -> tuple[str, ...]:
    """The addresses at which the others reach it."""
    return candidates(own_address)[-1:] if one_node else candidates(own_address)


def connect_store(
    hosts: Sequence[str], port: int, size: int, within: timedelta, *, answer_within: timedelta
) -> TCPStore:
    """The store for the others; ``RuntimeError`` if none of the hosts answers."""
    error: Exception = RuntimeError("no address")
    for host in answering_first(hosts, port, answer_within.total_seconds()):
        try:
            return TCPStore(
                host, port, size, is_master=False, timeout=within, wait_for_workers=False
            )
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as failed:
            error = failed
    raise RuntimeError(f"no store can be reached at {','.join(hosts)}:{port}: {error}")


def _store(
    member: Member,
    rank: int,
    world_size: int,
    wait: timedelta,
    own_address: str | None,
    one_node: bool,
) -> Store:
    if rank == 0:
        store = host_store(world_size, wait, one_node=one_node)
        hosts = store_hosts(own_address, one_node=one_node)
        member.send(Publish(key=_STORE_KEY, value=format_addresses(hosts, store.port)))
        return store
    hosts, port = parse_addresses(member.published(_STORE_KEY, wait.total_seconds()))
    try:
        return connect_store(hosts, port, world_size, wait, answer_within=_ANSWER * len(hosts))
    except RuntimeError as error:
        raise ControlChannelError(
            f"rank {rank} can't meet rank 0: {error}",
            next_step="Can compute nodes open TCP connections to each other?  A site file can name "
            "the interface (socket_interface).",
        ) from error

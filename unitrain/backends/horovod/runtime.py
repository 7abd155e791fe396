"""Starting Horovod under any launcher, also under those that know nothing of it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import horovod.torch as hvd
import torch.distributed as dist
from horovod.runner.common.util.hosts import SlotInfo
from horovod.torch import mpi_lib_v2  # noqa: F401 (Horovod itself only prints that it is missing)

from unitrain.backends.capabilities import Tunable
from unitrain.bootstrap import environment
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.horovodrun import BoundRendezvousServer
from unitrain.bootstrap.network import LOOPBACK, address_towards, interface_of, own_addresses, reachable_addresses
from unitrain.bootstrap.rendezvous import (
    NodePosition,
    Rendezvous,
    connect_ranks,
    open_tcp_store,
    raise_descriptor_limit,
)
from unitrain.errors import BackendUnavailableError, LauncherMismatchError

CYCLE = Tunable(
    "HOROVOD_CYCLE_TIME", "ms between two looks of Horovod at what is to be done", "0.5", ("0.1", "1", "2", "5")
)
FUSION = Tunable(
    "HOROVOD_FUSION_THRESHOLD", "bytes up to which Horovod puts buckets together", "16777216", ("0", "134217728")
)
_ANSWER_SECONDS = 3.0  # a host answers without its processes; one lost packet is sent again after a second
_servers: list[Any] = []  # rank 0's rendezvous server, kept alive as long as the process


def start_horovod(rank_info: RankInfo, rendezvous: Rendezvous) -> None:
    """Initialise Horovod with the launcher's ranks, unless it is. All ranks call it.

    Raises BackendUnavailableError when this Horovod cannot do that, and LauncherMismatchError when it comes up with
    other ranks than the launcher's: under torchrun, say, a plain `hvd.init()` makes every rank the only one.
    """
    if not hvd.is_initialized():
        # Horovod's own 1 ms is as long as a small model's step (benchmarks/step_overhead.py). With its own 128 MiB it
        # puts whole buckets together that wait for each other, and copies them there and back, which takes longer than
        # to send them one by one. What is set, Horovod's own tuning leaves alone.
        chosen = (CYCLE, FUSION) if environment.setting("HOROVOD_AUTOTUNE") in (None, "0") else ()
        environment.export_defaults(
            {
                # Horovod's own limit is 30 s, and passing it aborts the process without an exception, or ends Horovod
                # without saying whom it waited for: unitrain's own limit is to come first.
                "HOROVOD_GLOO_TIMEOUT_SECONDS": str(round(rendezvous.timeout.total_seconds()) + 5),
                **{tunable.variable: tunable.default for tunable in chosen},
            }
        )
        if rank_info.launcher not in ("none", "horovodrun", "mpirun"):
            _lead_to_each_other(rank_info, rendezvous)
        hvd.init()
    if (hvd.rank(), hvd.size()) != (rank_info.rank, rank_info.size):
        raise LauncherMismatchError(
            f"{rank_info.source} said rank {rank_info.rank} of {rank_info.size}, but Horovod came up as "
            f"rank {hvd.rank()} of {hvd.size()}. "
            f"Do not call hvd.init() yourself; start with: unitrain launch --backend horovod "
            f"-np {rank_info.size} ..."
        )


def meet_with_horovod(rank_info: RankInfo, timeout: timedelta) -> Rendezvous:
    """Bring the ranks together with Horovod running; under mpirun it is Horovod that brings them together."""
    if rank_info.launcher != "mpirun" or environment.setting("MASTER_ADDR"):
        rendezvous = connect_ranks(
            rank_info, timeout
        )  # first, because Horovod aborts the process when it waits for ranks in vain
        start_horovod(rank_info, rendezvous)
        return rendezvous
    raise_descriptor_limit(rank_info)
    nowhere = Rendezvous(rank_info, dist.HashStore(), "127.0.0.1", timeout)
    start_horovod(rank_info, nowhere)
    store, host = _store_through_horovod(rank_info, timeout)
    return Rendezvous(rank_info, dist.PrefixStore("unitrain", store), host, timeout)


def tell_torch_where(rank_info: RankInfo) -> None:
    """Set the variables that torch's own rendezvous reads, where the launcher has not. All ranks call it.

    They are agreed over Horovod itself, which horovodrun and mpirun always let start.
    """
    environment.export_defaults(
        {"RANK": str(rank_info.rank), "WORLD_SIZE": str(rank_info.size), "LOCAL_RANK": str(rank_info.local_rank)}
        | {name: value for name in ("MASTER_ADDR", "MASTER_PORT") if (value := environment.setting(name))}
    )
    if rank_info.launcher not in ("horovodrun", "mpirun", "none") or environment.setting("MASTER_ADDR"):
        return
    start_horovod(rank_info, Rendezvous(rank_info, dist.HashStore(), "127.0.0.1", timedelta(minutes=5)))
    host, port = _free_address(rank_info)
    environment.export_defaults({"MASTER_ADDR": host, "MASTER_PORT": str(port)})


def _lead_to_each_other(rank_info: RankInfo, rendezvous: Rendezvous) -> None:
    """Do what horovodrun does for its workers: rank 0 serves the addresses, and every rank is told its place."""
    if not hvd.gloo_built():
        raise BackendUnavailableError(
            f"This Horovod was built without Gloo, which it needs where {rank_info.source} said "
            f"rank {rank_info.rank} of {rank_info.size}. "
            "Build it with both controllers: unitrain horovod build --force"
        )
    seats = rendezvous.node_positions
    address = rendezvous.own_address or address_towards(rendezvous.host)
    own = ""
    if rank_info.rank == 0:
        server = BoundRendezvousServer(address)
        port = server.start()
        server.init([_slot(seats, rank) for rank in range(rank_info.size)])
        _servers.append(server)
        own = f"{address}:{port}"
    host, _, port_text = rendezvous.allgather("horovod_server", own)[0].rpartition(":")
    slot = _slot(seats, rank_info.rank)
    environment.export(
        {
            environment.HOROVOD_SET_BY_UNITRAIN: "1",
            "HOROVOD_HOSTNAME": slot.hostname,
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port_text,
            # Both: a Horovod with MPI built in otherwise asks MPI, which nobody started.
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    )
    if interface := interface_of(address):
        environment.export_defaults({"HOROVOD_GLOO_IFACE": interface})


def _slot(seats: list[NodePosition], rank: int) -> SlotInfo:
    """Return a rank's place in Horovod's terms: "cross" counts the ranks with the same local_rank on other hosts."""
    own = seats[rank]
    peers = [seat for seat in seats if seat.local_rank == own.local_rank]
    return SlotInfo(
        hostname=f"node{own.node_rank}",
        rank=rank,
        local_rank=own.local_rank,
        cross_rank=peers.index(own),
        size=len(seats),
        local_size=own.local_size,
        cross_size=len(peers),
    )


def _store_through_horovod(rank_info: RankInfo, timeout: timedelta) -> tuple[dist.Store, str]:
    host, port = _free_address(rank_info)
    served = open_tcp_store(host, port, rank_info, timeout, is_server=True) if rank_info.rank == 0 else None
    hvd.broadcast_object(None, 0, name="unitrain.served")  # the others connect once rank 0 listens
    return served or open_tcp_store(host, port, rank_info, timeout, is_server=False), host


def _free_address(rank_info: RankInfo) -> tuple[str, int]:
    """Return an address of rank 0 by which all ranks reach it, and a port that is free there. All ranks call it, with
    Horovod running."""
    if rank_info.rank != 0:
        return _agreed_address(None)
    # Which address the others reach is not known yet: this socket listens on all while they try, and takes no data.
    with socket.create_server((LOOPBACK if rank_info.local_size == rank_info.size else "", 0)) as free:
        return _agreed_address(free.getsockname()[1], [LOOPBACK] if rank_info.local_size == rank_info.size else None)


def _agreed_address(port: int | None, addresses: list[str] | None = None) -> tuple[str, int]:
    """Return an address of rank 0, where it listens at `port`, by which all ranks reach it.

    It is one of `addresses`, or of all addresses that rank 0 has, where it does not know which of its networks leads to
    the others. All ranks call it, with Horovod running, the others without a port.

    Raises LauncherMismatchError where there is none.
    """
    own = None if port is None else (addresses or own_addresses(), port)
    addresses, port = hvd.broadcast_object(
        own, 0, name="unitrain.addresses"
    )  # unnamed it would hang: type(own) differs
    reached = hvd.allgather_object(reachable_addresses(addresses, port, _ANSWER_SECONDS), name="unitrain.reached")
    for address in addresses:
        if all(address in one for one in reached):
            return address, port
    missing = [rank for rank, one in enumerate(reached) if not one] or list(range(1, len(reached)))
    raise LauncherMismatchError(
        f"Rank 0 has the addresses {', '.join(addresses)}, but "
        f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} reach it at none that all reach. "
        "Open the ports between the hosts, or say where to meet: "
        "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
    )

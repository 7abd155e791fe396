"""Start Horovod under any launcher, including those without support for Horovod."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import horovod.torch as hvd
import torch.distributed as dist
from horovod.runner.common.util.hosts import SlotInfo
from horovod.torch import mpi_lib_v2  # noqa: F401 (raises ImportError if missing; hvd only prints a message)

from unitrain.backends.capabilities import Tunable
from unitrain.backends.horovod.horovodrun import BoundRendezvousServer
from unitrain.backends.horovod.process_sets import forget_process_sets
from unitrain.bootstrap import environment
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.network import (
    LOOPBACK,
    find_free_port,
    find_reachable_addresses,
    interface_with_address,
    is_loopback,
    local_address_for,
    own_addresses,
)
from unitrain.bootstrap.rendezvous import (
    NodePosition,
    Rendezvous,
    connect_ranks,
    open_tcp_store,
    raise_descriptor_limit,
)
from unitrain.bootstrap.responsive_store import StoreNotRespondingError, call_with_limit
from unitrain.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    EnvironmentVariableError,
    LauncherMismatchError,
    UnsupportedError,
)
from unitrain.torch_compat import store_host

_ResultT = TypeVar("_ResultT")

CYCLE_TIME = Tunable(
    "HOROVOD_CYCLE_TIME", "ms between two cycles in which Horovod starts operations", "0.5", ("0.1", "1", "2", "5")
)
FUSION_THRESHOLD = Tunable(
    "HOROVOD_FUSION_THRESHOLD", "bytes up to which Horovod fuses buckets", "16777216", ("0", "134217728")
)
# Milliseconds after which Horovod starts a cycle if no operation is enqueued. All ranks exchange messages in a cycle,
# which takes CPU time from the training. A Horovod without unitrain's patches ignores this setting.
_IDLE_CYCLE_MS = "50"
# Timeout for a connection to rank 0. It is longer than one second, after which the kernel retransmits a lost packet.
_CONNECT_TIMEOUT_SECONDS = 3.0
_servers: list[BoundRendezvousServer] = []  # rank 0's rendezvous server, which runs as long as Horovod
_exported_settings: dict[str, str] = {}  # environment variables that `_export_settings` has set, with their values
_group_numbers: Counter[tuple[int, ...]] = Counter()  # number of groups per list of ranks since Horovod started
_own_address = LOOPBACK
_EXTERNAL_START_ID = "external"
# Identifies the start of the running Horovod, and is equal on all ranks that took part in it. `start_for_group` sets a
# new ID. If Horovod was started in another way, this is _EXTERNAL_START_ID.
_start_id = _EXTERNAL_START_ID


def start_horovod(rank_info: RankInfo, rendezvous: Rendezvous) -> None:
    """Initialize Horovod with the launcher's ranks unless it is already initialized. All ranks must call this function.

    Raises BackendUnavailableError if this Horovod does not support the launcher, and LauncherMismatchError if Horovod's
    ranks differ from the launcher's: under torchrun, a plain `hvd.init()` would start a separate job of size 1 on every
    rank.
    """
    if not hvd.is_initialized():
        # Horovod's default cycle time of 1 ms is as long as a step of a small model (benchmarks/step_overhead.py). With
        # its default fusion threshold of 128 MiB, Horovod fuses entire buckets, which then wait for each other and are
        # copied twice. Separate transfers are faster. With HOROVOD_AUTOTUNE, both variables remain unset, because
        # Horovod tunes only unset variables.
        chosen = (CYCLE_TIME, FUSION_THRESHOLD) if environment.get_variable("HOROVOD_AUTOTUNE") in (None, "0") else ()
        _export_settings(
            {
                # After this timeout, 30 s by default, Horovod aborts the process or shuts down without naming the
                # missing ranks. unitrain's timeout must expire first.
                "HOROVOD_GLOO_TIMEOUT_SECONDS": str(round(rendezvous.timeout.total_seconds()) + 5),
                **{tunable.variable: tunable.default for tunable in chosen},
                "HOROVOD_IDLE_CYCLE_TIME": _IDLE_CYCLE_MS,
            }
        )
        if rank_info.launcher not in ("none", "horovodrun", "mpirun"):
            _serve_horovod_rendezvous(rank_info, rendezvous)
        hvd.init()
    if (hvd.rank(), hvd.size()) != (rank_info.rank, rank_info.size):
        raise LauncherMismatchError(
            f"{rank_info.source} sets rank {rank_info.rank} of {rank_info.size}, but Horovod started as "
            f"rank {hvd.rank()} of {hvd.size()}. "
            f"Do not call hvd.init() yourself; start with: unitrain launch --backend horovod "
            f"-np {rank_info.size} ..."
        )


def start_for_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Initialize Horovod with the rank and size passed to torch's `init_process_group`. All ranks must call this
    function.

    If Horovod already runs with these ranks, it is used. If Horovod is not running, the ranks start it: under the
    launcher if the launcher has set the same ranks, or else through `store`. If an earlier call has started it with
    other ranks through a store, it is shut down and started again: ranks of the earlier group may be missing now, and
    others may be new. Raises UnsupportedError on every rank if Horovod runs with other ranks and cannot be restarted:
    the launcher, `unitrain.init` or `hvd.init()` has started it, or it lacks the patch `repeated-settings`.
    """
    global _own_address, _start_id
    host = store_host(store) or environment.get_variable("MASTER_ADDR") or LOOPBACK
    is_reusable = hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)
    rank_info = _launcher_rank_info()
    rendezvous = Rendezvous(RankInfo("init_process_group", rank, size, rank), store, host, timeout)
    matches_launcher = rank_info is not None and (rank_info.rank, rank_info.size) == (rank, size)
    own = [
        _start_id if is_reusable else None, _can_start(), matches_launcher, uuid.uuid4().hex, socket.gethostname(),
        own_addresses()[0],
    ]  # fmt: skip
    start_ids, can_start, ranks_match_launcher, new_ids, hostnames, addresses = zip(
        *rendezvous.allgather("starts", own), strict=True
    )
    if None in start_ids or len(set(start_ids)) > 1:
        if not all(can_start):
            raise UnsupportedError(
                f"A default group with rank {rank} of {size} was requested, but Horovod already runs with other ranks. "
                "Start new processes, for example with torch.multiprocessing.spawn, or use the same ranks again."
            )
        if hvd.is_initialized():
            _shut_down_horovod()
        _start_id = new_ids[0]
        if len(set(hostnames)) > 1 and is_loopback(host):
            host = addresses[0]
        if not all(ranks_match_launcher) or rank_info is None:
            rank_info = RankInfo("init_process_group", rank, size, hostnames[:rank].count(hostnames[rank]))
        _group_numbers.clear()
        start_horovod(rank_info, Rendezvous(rank_info, store, host, timeout))
    _own_address = _find_own_address(rendezvous if rendezvous.host == host else replace(rendezvous, host=host))


def _can_start() -> bool:
    """Return whether this process can start Horovod: it is not running, or an earlier group has started it through a
    store and it has the patch `repeated-settings`.

    MPI can start only once in a process, and a Horovod that was started in another way may have other users. Without
    the patch, the second start ends with a segmentation fault.
    """
    if not hvd.is_initialized():
        return True
    is_served_by_unitrain = environment.get_variable(environment.HOROVOD_SET_BY_UNITRAIN) is not None
    if not is_served_by_unitrain or _start_id == _EXTERNAL_START_ID:
        return False
    try:
        record = json.loads(Path(hvd.__file__).parents[1].joinpath("unitrain_build.json").read_text())
    except (OSError, ValueError):  # this Horovod was not built by unitrain
        return False
    return "repeated-settings" in record.get("runtime_fixes", ())


def _shut_down_horovod() -> None:
    """Shut down Horovod, which an earlier, already destroyed default group has started. This shuts down Horovod on all
    ranks of that group."""
    hvd.shutdown()
    forget_process_sets()
    while _servers:
        _servers.pop().stop()


def _launcher_rank_info() -> RankInfo | None:
    """Return the rank and size that the launcher has set for this process, or None if Horovod cannot be started with
    them."""
    # After the first start, the variables contain the ranks of that start.
    if environment.get_variable(environment.HOROVOD_SET_BY_UNITRAIN) is not None:
        return None
    try:
        rank_info = environment.detect()
    except EnvironmentVariableError:  # the arguments of init_process_group are used instead
        return None
    # Without a launcher, Horovod would use MPI, which can start only once in a process.
    return None if rank_info.launcher == "none" and hvd.gloo_built() else rank_info


def own_address() -> str:
    """Return the address of this host for the other ranks of the default group, or "" if it is not known."""
    return _own_address


def next_group_number(ranks: Sequence[int]) -> int:
    """Return the number of the next group of `ranks`, which is the same on all its members.

    torch's group names cannot be used instead: they differ between ranks after some ranks have created a group with
    `use_local_synchronization`, or after the creation of a group has failed.
    """
    return _group_numbers[tuple(ranks)]


def count_group(ranks: Sequence[int]) -> None:
    """Count a group of `ranks` that all its members have joined."""
    _group_numbers[tuple(ranks)] += 1


def _find_own_address(rendezvous: Rendezvous) -> str:
    """Return this host's address for the other ranks, or "" if it is not known. A name may resolve to a loopback
    address on the host with this name, so the ranks compare their addresses if the host of the rendezvous is a name."""
    try:
        socket.inet_aton(rendezvous.host)
    except OSError:
        return rendezvous.own_address or ""
    return local_address_for(rendezvous.host)


def connect_ranks_and_horovod(rank_info: RankInfo, timeout: timedelta) -> Rendezvous:
    """Connect the ranks and start Horovod. Under mpirun, unless MASTER_ADDR and MASTER_PORT are set, the ranks connect
    through Horovod."""
    if rank_info.launcher != "mpirun" or _has_rendezvous_address():
        # The ranks connect before Horovod starts, because Horovod aborts the process if ranks are missing.
        rendezvous = connect_ranks(rank_info, timeout, "horovod")
        start_horovod(rank_info, rendezvous)
        return rendezvous
    raise_descriptor_limit(rank_info)
    local_rendezvous = Rendezvous(rank_info, dist.HashStore(), "127.0.0.1", timeout)
    _call_with_limit(partial(start_horovod, rank_info, local_rendezvous), rank_info, timeout)
    store, host = _connect_store_through_horovod(rank_info, timeout)
    return Rendezvous(rank_info, dist.PrefixStore("unitrain", store), host, timeout)


def export_torch_variables(rank_info: RankInfo) -> None:
    """Set the variables that torch's rendezvous reads, unless the launcher has set them. All ranks must call this
    function.

    Under horovodrun and mpirun, unless MASTER_ADDR and MASTER_PORT are set, this starts Horovod, through which the
    ranks choose the address.
    """
    environment.export_defaults(
        {"RANK": str(rank_info.rank), "WORLD_SIZE": str(rank_info.size), "LOCAL_RANK": str(rank_info.local_rank)}
        | {name: value for name in ("MASTER_ADDR", "MASTER_PORT") if (value := environment.get_variable(name))}
    )
    if rank_info.launcher == "none" and not environment.get_variable("MASTER_ADDR"):
        host, port = LOOPBACK, find_free_port()  # this may be the parent of the ranks, so Horovod is not started
    elif rank_info.launcher in ("horovodrun", "mpirun") and not _has_rendezvous_address():
        start_horovod(rank_info, Rendezvous(rank_info, dist.HashStore(), "127.0.0.1", timedelta(minutes=5)))
        host, port = _find_free_address(rank_info)
    else:
        return
    environment.export_defaults({"MASTER_ADDR": host, "MASTER_PORT": str(port)})


def _has_rendezvous_address() -> bool:
    return all(environment.get_variable(name) for name in ("MASTER_ADDR", "MASTER_PORT"))


def _serve_horovod_rendezvous(rank_info: RankInfo, rendezvous: Rendezvous) -> None:
    """Emulate horovodrun: rank 0 starts a rendezvous server for Horovod, and every rank exports Horovod's variables."""
    if not hvd.gloo_built():
        raise BackendUnavailableError(
            f"This Horovod was built without Gloo, which it needs if {rank_info.source} sets the ranks: this is "
            f"rank {rank_info.rank} of {rank_info.size}. "
            "Build it with both controllers: unitrain horovod build --force"
        )
    positions = rendezvous.node_positions
    address = rendezvous.own_address or local_address_for(rendezvous.host)
    own = ""
    if rank_info.rank == 0:
        server = BoundRendezvousServer(address)
        port = server.start()
        server.init([_slot_info(positions, rank) for rank in range(rank_info.size)])
        _servers.append(server)
        own = f"{address}:{port}"
    host, _, port_text = rendezvous.allgather("horovod_server", own)[0].rpartition(":")
    slot = _slot_info(positions, rank_info.rank)
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
            # Otherwise a Horovod that was built with MPI would use MPI, which is not running.
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    )
    if interface := interface_with_address(address):
        _export_settings({"HOROVOD_GLOO_IFACE": interface})


def _export_settings(values: Mapping[str, str]) -> None:
    """Set the variables that the user has not set. Values of an earlier start of Horovod are replaced."""
    chosen = {
        name: value
        for name, value in values.items()
        if environment.get_variable(name) in (None, _exported_settings.get(name))
    }
    environment.export(chosen)
    _exported_settings.update(chosen)


def _slot_info(positions: list[NodePosition], rank: int) -> SlotInfo:
    """Return Horovod's ranks and sizes for a rank. "cross" refers to the ranks with the same local rank on all
    hosts."""
    own = positions[rank]
    peers = [position for position in positions if position.local_rank == own.local_rank]
    return SlotInfo(
        hostname=f"node{own.node_rank}",
        rank=rank,
        local_rank=own.local_rank,
        cross_rank=peers.index(own),
        size=len(positions),
        local_size=own.local_size,
        cross_size=len(peers),
    )


def _call_with_limit(function: Callable[[], _ResultT], rank_info: RankInfo, timeout: timedelta) -> _ResultT:
    """Call `function`, which waits for other ranks in MPI or Horovod without a time limit, and return its result.

    Raises CollectiveTimeoutError if `function` does not return within `timeout`. The call then remains blocked in
    another thread. Horovod's shutdown at the exit of the process would also wait for the other ranks, so it is skipped.
    """
    try:
        return call_with_limit(function, timeout.total_seconds())
    except StoreNotRespondingError:
        atexit.register(_exit_without_shutdown)
        raise CollectiveTimeoutError(
            f"Rank {rank_info.rank} of {rank_info.size} could not start Horovod within {timeout.total_seconds():g} s: "
            "another rank has not called unitrain.init, is stopped, or cannot be reached. Check the first error that "
            "the ranks logged, or raise the limit with unitrain.init(timeout_seconds=...). If the address of rank 0 is "
            "set, the error names the missing ranks: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
        ) from None


def _exit_without_shutdown() -> None:
    """Terminate this process with exit code 1. Registered after Horovod's shutdown, and therefore called before it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def _connect_store_through_horovod(rank_info: RankInfo, timeout: timedelta) -> tuple[dist.Store, str]:
    host, port = _call_with_limit(partial(_find_free_address, rank_info), rank_info, timeout)
    own_store = open_tcp_store(host, port, rank_info, timeout, is_server=True) if rank_info.rank == 0 else None
    wait_until_served = partial(hvd.broadcast_object, None, 0, name="unitrain.served")
    _call_with_limit(wait_until_served, rank_info, timeout)
    return own_store or open_tcp_store(host, port, rank_info, timeout, is_server=False), host


def _find_free_address(rank_info: RankInfo) -> tuple[str, int]:
    """Return an address of rank 0 that all ranks can reach, and a free port. All ranks must call this function; Horovod
    must be running."""
    if rank_info.rank != 0:
        return _choose_address(None)
    # With several hosts, the reachable address is not known yet, so this socket listens on all addresses. It receives
    # no data.
    with socket.create_server((LOOPBACK if rank_info.local_size == rank_info.size else "", 0)) as free:
        return _choose_address(free.getsockname()[1], [LOOPBACK] if rank_info.local_size == rank_info.size else None)


def _choose_address(port: int | None, addresses: list[str] | None = None) -> tuple[str, int]:
    """Return an address of rank 0 that all ranks can reach, and the port on which rank 0 listens.

    The returned address is one of `addresses`, by default all addresses of rank 0. All ranks must call this function;
    only rank 0 passes a port. Horovod must be running. Raises LauncherMismatchError if no address is reachable from all
    ranks.
    """
    own = None if port is None else (addresses or own_addresses(), port)
    # Without a name, the operation would hang, because Horovod's default name contains type(own), which differs between
    # ranks.
    addresses, port = hvd.broadcast_object(own, 0, name="unitrain.addresses")
    reachable = find_reachable_addresses(addresses, port, _CONNECT_TIMEOUT_SECONDS)
    reached = hvd.allgather_object(reachable, name="unitrain.reached")
    for address in addresses:
        if all(address in reached_addresses for reached_addresses in reached):
            return address, port
    unreachable_ranks = [rank for rank, reached_addresses in enumerate(reached) if not reached_addresses] or list(
        range(1, len(reached))
    )
    raise LauncherMismatchError(
        f"No address of rank 0 ({', '.join(addresses)}) is reachable from all ranks. Check "
        f"{'rank' if len(unreachable_ranks) == 1 else 'ranks'} {', '.join(map(str, unreachable_ranks))}. "
        "Open the ports between the hosts, or set the address: "
        "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
    )

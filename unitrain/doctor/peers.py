"""Checks between the ranks of a job: reachability, clocks and a shared working directory."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unitrain.bootstrap.network import own_addresses
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.threads import start_thread

_CONNECT_TIMEOUT_SECONDS = 5.0
_MAX_CONCURRENT_CONNECTIONS = 64


@dataclass(frozen=True, kw_only=True)
class PeerCheckResults:
    """The peer-check results of one rank.

    `address` is the address of this host on the route to the other hosts. `unreachable` maps each unreachable host to
    its address and the connection error; only the first rank per host connects. `clock_offset_seconds` is the clock of
    this host minus the clock of rank 0, with an error of at most one message latency. `shares_folder` is true if a file
    that rank 0 creates in its working directory is visible in the working directory of this rank.
    """

    address: str
    unreachable: dict[str, str]
    clock_offset_seconds: float
    shares_folder: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return vars(self)


def check_peers(rendezvous: Rendezvous) -> PeerCheckResults:
    """Run all checks. All ranks must call this function. Each connection attempt times out after a few seconds."""
    # The address of the route to the other hosts is unknown if the rendezvous has an IPv6 address.
    address = rendezvous.own_address or own_addresses()[0]
    clock_offset_seconds = _measure_clock_offset(rendezvous)
    return PeerCheckResults(
        address=address,
        unreachable=_connect_hosts(rendezvous, address),
        clock_offset_seconds=clock_offset_seconds,
        shares_folder=_check_shared_folder(rendezvous),
    )


def _measure_clock_offset(rendezvous: Rendezvous) -> float:
    store, rank = rendezvous.store, rendezvous.rank_info.rank
    rendezvous.allgather("doctor/ready", None)
    if rank == 0:
        time.sleep(0.1)  # so that all other ranks are already waiting when the time is stored
        store.set("doctor/time", repr(time.time()))
        return 0.0
    time_of_rank_zero = float(store.get("doctor/time"))
    return time.time() - time_of_rank_zero


def _connect_hosts(rendezvous: Rendezvous, address: str) -> dict[str, str]:
    """Connect the first ranks of all hosts to each other, and return the failures by host. All ranks must call this
    function."""
    is_first_on_host = rendezvous.rank_info.local_rank == 0
    with contextlib.ExitStack() as stack:
        port = 0
        if is_first_on_host:
            listener = stack.enter_context(socket.create_server((address, 0), backlog=128))
            port = listener.getsockname()[1]
            start_thread(_accept_connections, listener, name="unitrain doctor")
        gathered = rendezvous.allgather("doctor/listens", [socket.gethostname(), address, port])
        own_rank = rendezvous.rank_info.rank
        others = [
            (host, peer_address, port)
            for rank, (host, peer_address, port) in enumerate(gathered)
            if is_first_on_host and port and rank != own_rank
        ]
        failed: dict[str, str] = {}
        # Connect concurrently, because sequential attempts to connect to unreachable hosts could exceed the timeout of
        # the rendezvous.
        with ThreadPoolExecutor(_MAX_CONCURRENT_CONNECTIONS) as pool:
            errors = pool.map(lambda other: _try_connection(*other[1:]), others)
            for (host, peer_address, port), error in zip(others, errors, strict=True):
                if error is not None:
                    failed[host] = f"{peer_address}:{port}: {error}"
        rendezvous.allgather("doctor/tried", None)
    return failed


def _try_connection(address: str, port: int) -> str | None:
    """Connect to `port` of `address`, and return the error, or None."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def _accept_connections(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the listener was closed after all attempts
        while True:
            listener.accept()[0].close()


def _check_shared_folder(rendezvous: Rendezvous) -> bool:
    """Create a file in the working directory of rank 0, and return whether it is visible in the working directory of
    this rank. All ranks must call this function."""
    marker = Path.cwd() / f".unitrain-doctor-{secrets.token_hex(8)}"
    has_created = False
    if rendezvous.rank_info.rank == 0:
        with contextlib.suppress(OSError):
            marker.touch()
            has_created = True
    try:
        name, is_created = rendezvous.allgather("doctor/left", [marker.name, has_created])[0]
        is_visible = is_created and (Path.cwd() / name).exists()
        rendezvous.allgather("doctor/looked", None)
    finally:
        if has_created:
            with contextlib.suppress(OSError):
                marker.unlink()
    return bool(is_visible)

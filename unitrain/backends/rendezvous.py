"""How ranks that any launcher started find each other: a torch Store they all reach, and what they tell each other
there."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore

from unitrain import environment
from unitrain.backends.network import address_towards
from unitrain.environment import Placement
from unitrain.errors import CollectiveTimeoutError, LauncherMismatchError

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Seat:
    """Where a rank sits, agreed by all ranks: its number on its host, and its host's number among the hosts."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


@dataclass(frozen=True)
class Meeting:
    """The ranks' meeting place: `store` is shared by all, `host` is an address by which all reach rank 0's host."""

    placement: Placement
    store: Store
    host: str
    timeout: timedelta

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Return every rank's JSON-able `value`, in rank order; `key` is used once in a run. All ranks call it.

        It works while the backend itself is not up, or is stuck. Raises CollectiveTimeoutError naming who did not come.
        """
        self.store.set(f"{key}/{self.placement.rank}", json.dumps(value))
        missing = self.wait_for(key)
        if missing:
            names = ", ".join(map(str, missing))
            raise CollectiveTimeoutError(
                f"{self.placement.size} ranks should meet for {key!r}, but after {self.timeout.total_seconds():g} s "
                f"{'rank' if len(missing) == 1 else 'ranks'} {names} had not come. "
                "Look at the first error they logged, or give them more time: unitrain.init(timeout_seconds=...)."
            )
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.placement.size)]

    def wait_for(self, key: str, timeout: timedelta | None = None) -> list[int]:
        """Wait until every rank has set its part of `key`; return the ranks that had not done so in time."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        missing = list(range(self.placement.size))
        while True:
            missing = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_SECONDS)

    @cached_property
    def seats(self) -> list[Seat]:
        """Every rank's seat, from what all ranks tell about themselves. All ranks ask for it.

        No launcher's own node number is trusted alone: Horovod's differs on uneven hosts, and Open MPI has none.
        """
        own = environment.setting("HOROVOD_HOSTNAME") or socket.gethostname()
        told = self.exchange("seat", [own, self.placement.node_rank, self.placement.local_rank])
        hosts = [(host, node_rank) for host, node_rank, _ in told]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return [
            Seat(local_rank, hosts.count(host), numbers[host], len(numbers))
            for host, (_, _, local_rank) in zip(hosts, told, strict=True)
        ]


def meet(placement: Placement, timeout: timedelta) -> Meeting:
    """Bring the ranks of any launcher together, and return when all have come. All ranks call it, once.

    Raises LauncherMismatchError where the launcher gives no address to meet at, CollectiveTimeoutError naming who is
    missing.
    """
    store, host = _shared_store(placement, timeout)
    attempt = (
        environment.setting("TORCHELASTIC_RESTART_COUNT") or "0"
    )  # a restarted run must not read the last one's keys
    meeting = Meeting(placement, PrefixStore(f"unitrain/{attempt}", store), host, timeout)
    assert len(meeting.seats) == placement.size
    return meeting


def _shared_store(placement: Placement, timeout: timedelta) -> tuple[Store, str]:
    if placement.launcher == "none" or (placement.size == 1 and environment.setting("MASTER_ADDR") is None):
        return HashStore(), "127.0.0.1"
    if (host := environment.setting("MASTER_ADDR")) and (port := environment.setting("MASTER_PORT")):
        # torchrun may serve the store itself; otherwise rank 0 does.
        serves = placement.rank == 0 and environment.setting("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return tcp_store(host, int(port), placement, timeout, serves=serves), host
    if environment.setting("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        return _store_through_horovodrun(placement, timeout)
    raise LauncherMismatchError(
        f"{placement.launcher} started rank {placement.rank} of {placement.size} without an address to meet at. "
        "Use --backend horovod, which brings its own, or give one: "
        "-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 (mpirun), export MASTER_ADDR MASTER_PORT (others)."
    )


def tcp_store(host: str, port: int, placement: Placement, timeout: timedelta, *, serves: bool) -> TCPStore:
    """Serve, or reach, the store at an address; who is missing is found out later, by name."""
    try:
        return TCPStore(
            host, port, placement.size, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except DistError as error:
        raise CollectiveTimeoutError(
            f"Rank {placement.rank} could not {'listen' if serves else 'reach rank 0'} at {host}:{port} within "
            f"{timeout.total_seconds():g} s: {str(error).splitlines()[0]} "
            "Look at the first error that rank 0 logged, or choose another address with MASTER_ADDR and MASTER_PORT."
        ) from error


def _store_through_horovodrun(placement: Placement, timeout: timedelta) -> tuple[Store, str]:
    """horovodrun serves a key-value store over HTTP in which anybody may open a scope: rank 0 leaves its address
    there."""
    server = environment.setting("HOROVOD_GLOO_RENDEZVOUS_ADDR") or ""
    address = f"http://{server}:{environment.setting('HOROVOD_GLOO_RENDEZVOUS_PORT')}/unitrain/master"
    if placement.rank == 0:
        host = address_towards(server)
        store = tcp_store(host, 0, placement, timeout, serves=True)
        request = urllib.request.Request(address, data=json.dumps([host, store.port]).encode(), method="PUT")
        urllib.request.urlopen(request, timeout=timeout.total_seconds()).close()
        return store, host
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as reply:
                host, port = json.loads(reply.read())
            break
        except urllib.error.HTTPError as error:  # 404 until rank 0 has been there
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"Rank 0 had not left its address at horovodrun's server {server} after "
                    f"{timeout.total_seconds():g} s. "
                    "Look at the first error that rank 0 logged."
                ) from error
            time.sleep(_POLL_SECONDS)
    return tcp_store(host, port, placement, timeout, serves=False), host

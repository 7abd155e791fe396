"""How ranks that any launcher started find each other: a torch Store they all reach, and what they tell each other
there."""

from __future__ import annotations

import http.client
import itertools
import json
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from unitrain.bootstrap import environment
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.network import address_towards, is_loopback, listen
from unitrain.errors import CollectiveTimeoutError, ConfigError, EnvironmentVariableError, LauncherMismatchError

_POLL_SECONDS = 0.02
_POLL_SECONDS_PER_RANK = 0.0001  # so that all ranks together ask 10,000 times a second at most
_CONNECT_PERIOD_SECONDS = 0.1
_GROUPS = 2
_SERVED_PER_RANK = 5  # connections of each rank to rank 0's process, besides those of the process group
_SPARE_DESCRIPTORS = 512  # for the data, its workers and files
_meetings = itertools.count()
# A proxy for the outside world knows nothing of the hosts of a job.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_served: list[TCPStore] = []  # rank 0's stores, kept alive as long as the process: others may still ask


@dataclass(frozen=True)
class NodePosition:
    """Where a rank sits, agreed by all ranks: its number on its host, and its host's number among the hosts."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


@dataclass(frozen=True)
class Rendezvous:
    """The ranks' meeting place: `store` is shared by all, `host` is an address by which all reach rank 0's host."""

    rank_info: RankInfo
    store: Store
    host: str
    timeout: timedelta

    def allgather(self, key: str, value: Any) -> list[Any]:
        """Return every rank's JSON-able `value`, in rank order; `key` is used once in a run. All ranks call it.

        It works while the backend itself is not up, or is stuck. Raises CollectiveTimeoutError naming missing ranks.
        """
        self.post(key, value)
        if missing := self.missing_ranks(key):
            names = ", ".join(map(str, missing))
            raise CollectiveTimeoutError(
                f"{self.rank_info.size} ranks should meet for {key!r}, but after {self.timeout.total_seconds():g} s "
                f"{'rank' if len(missing) == 1 else 'ranks'} {names} had not come. "
                "Look at the first error they logged, or give them more time: unitrain.init(timeout_seconds=...)."
            )
        posted = self._posted(key)
        return [posted[rank] for rank in range(self.rank_info.size)]

    @cached_property
    def messages(self) -> MessageStore:
        """The store for messages between ranks, signed with the job's key."""
        return MessageStore(self.store, "meeting")

    def post(self, key: str, value: Any = None) -> None:
        """Add this rank's JSON-able `value` to those that are posted under `key`; a second call does nothing.

        The store appends all of them to one value, so that a rank sends and receives a number of requests that does not
        depend on the number of ranks.
        """
        if self.store.add(f"{key}/{self.rank_info.rank}", 1) > 1:
            return
        self.messages.append(f"{key}/posted", json.dumps([self.rank_info.rank, value]))
        if self.store.add(f"{key}/count", 1) == self.rank_info.size:
            self.messages.set(f"{key}/complete", "1")

    def missing_ranks(self, key: str, timeout: timedelta | None = None) -> list[int]:
        """Wait until every rank has posted under `key`; return the ranks that have not done so in time."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        pause = max(_POLL_SECONDS, self.rank_info.size * _POLL_SECONDS_PER_RANK)
        while not self.messages.check([f"{key}/complete"]):
            if time.monotonic() > deadline:
                posted = self._posted(key)
                return [rank for rank in range(self.rank_info.size) if rank not in posted]
            time.sleep(pause)
        return []

    def _posted(self, key: str) -> dict[int, Any]:
        return dict(json.loads(line) for line in self.messages.lines(f"{key}/posted"))

    @cached_property
    def node_positions(self) -> list[NodePosition]:
        """Every rank's seat, from what all ranks tell about themselves. All ranks ask for it.

        No launcher's own node number is trusted alone: Horovod's differs on uneven hosts, and Open MPI has none.
        """
        own = environment.setting("HOROVOD_HOSTNAME") or socket.gethostname()
        told = self.allgather("seat", [own, self.rank_info.node_rank, self.rank_info.local_rank])
        hosts = [(host, node_rank) for host, node_rank, _ in told]
        sizes = Counter(hosts)
        numbers = {host: number for number, host in enumerate(sizes)}
        return [
            NodePosition(local_rank, sizes[host], numbers[host], len(numbers))
            for host, (_, _, local_rank) in zip(hosts, told, strict=True)
        ]

    @cached_property
    def own_address(self) -> str | None:
        """This rank's address as the other hosts reach it, or None when it cannot be told. All ranks ask for it."""
        try:
            own = address_towards(self.host)
        except OSError:
            own = None
        told = self.allgather("address", own)
        if own is None or not is_loopback(own):
            return own
        # The first host may know its own name as 127.0.1.1, as Debian's installer sets it up.
        elsewhere = [address for address in told if address is not None and not is_loopback(address)]
        return address_towards(elsewhere[0]) if elsewhere else own


def connect_ranks(rank_info: RankInfo, timeout: timedelta) -> Rendezvous:
    """Bring the ranks of any launcher together, and return when all have come. All ranks call it, equally often.

    Raises LauncherMismatchError where the launcher gives no address to meet at, CollectiveTimeoutError naming who is
    missing.
    """
    raise_descriptor_limit(rank_info)
    # Neither a restarted run nor a second meeting of the same processes may read the keys of the one before. The
    # number of restarts is torchrun's on this host: one that came later has seen fewer, but in no store that is shared.
    shared = environment.setting("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = (environment.setting("TORCHELASTIC_RESTART_COUNT") if shared else None) or "0"
    name = f"unitrain/{attempt}/{next(_meetings)}"
    store, host = _shared_store(rank_info, timeout, name)
    rendezvous = Rendezvous(rank_info, PrefixStore(name, store), host, timeout)
    _ = rendezvous.node_positions  # to ask for them is to wait for all ranks
    return rendezvous


def _shared_store(rank_info: RankInfo, timeout: timedelta, name: str) -> tuple[Store, str]:
    if rank_info.launcher == "none" or (rank_info.size == 1 and environment.setting("MASTER_ADDR") is None):
        return HashStore(), "127.0.0.1"
    if (host := environment.setting("MASTER_ADDR")) and (port := environment.setting("MASTER_PORT")):
        # torchrun may serve the store itself; otherwise rank 0 does.
        is_server = rank_info.rank == 0 and environment.setting("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
            raise EnvironmentVariableError(
                f"MASTER_PORT must be a port from 1 to 65535, got {port!r}. Use: export MASTER_PORT=29500"
            )
        return open_tcp_store(host, int(port), rank_info, timeout, is_server=is_server), host
    if environment.setting("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        return _store_through_horovodrun(rank_info, timeout, name)
    remedy = {
        "mpirun": "Use --backend horovod, which brings its own, or give one: "
        "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        "mpiexec": "Give one: mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ...",
        "mpirun_rsh": "Give one before the program: mpirun_rsh ... MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 "
        "python ...",
        "jsrun": "Give one: jsrun -E MASTER_ADDR=<host of rank 0> -E MASTER_PORT=29500 ...",
        "srun": "Give one before srun: "
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500',
    }.get(rank_info.launcher, "Give one to every rank: export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500")
    raise LauncherMismatchError(
        f"{rank_info.source} said rank {rank_info.rank} of {rank_info.size}, but gave no address to meet at. {remedy}"
    )


def raise_descriptor_limit(rank_info: RankInfo) -> None:
    """Raise this process's soft limit of file descriptors to what its connections to the other ranks need.

    Raises ConfigError where the hard limit does not allow it.
    """
    # Rank 0 serves three connections of each rank to the store, one that reports the end of its process, and one of the
    # store's own users in torch. Besides, every rank has a connection to each other one in two groups, or in three.
    others = rank_info.size - 1
    least = (_SERVED_PER_RANK * (rank_info.rank == 0) + _GROUPS) * others + sum(1 for _ in Path("/dev/fd").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if hard != resource.RLIM_INFINITY else 2**20
    if limit < least:
        raise ConfigError(
            f"Rank {rank_info.rank} of {rank_info.size} needs at least {least} file descriptors for its connections, "
            f"and the hard limit on this host is {limit}. Raise it before the launcher starts: ulimit -Hn {2 * least}, "
            "or LimitNOFILE= of the service that starts ranks on this host, such as slurmd or sshd."
        )
    wanted = min(limit, least + others + _SPARE_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_tcp_store(host: str, port: int, rank_info: RankInfo, timeout: timedelta, *, is_server: bool) -> TCPStore:
    """Serve, or reach, the store at an address; who is missing is found out later, by name.

    The store that is served listens on one address if `host` determines it (`network.listen`). Raises ConfigError if
    rank 0 cannot listen there, CollectiveTimeoutError if no store answers in time.
    """
    if not is_server:
        return _reached_store(host, port, rank_info, timeout)
    descriptor: int | None = None
    try:
        if port not in {store.port for store in _served}:
            listener = listen(host, port)
            port, descriptor = listener.getsockname()[1], listener.detach()
        store = TCPStore(
            host,
            port,
            rank_info.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )
    except (RuntimeError, OSError) as error:
        in_use = "EADDRINUSE" in str(error) or "ddress already in use" in str(error)
        why = "another program listens there" if in_use else str(error).splitlines()[0]
        raise ConfigError(
            f"Rank {rank_info.rank} could not listen at {host}:{port}: {why}. "
            "Choose a free port of the host of rank 0 and set it for every rank: export MASTER_PORT=<port>"
        ) from error
    _served.append(store)
    return store


def _reached_store(host: str, port: int, rank_info: RankInfo, timeout: timedelta) -> TCPStore:
    """Return a connection to rank 0's store. Raises CollectiveTimeoutError where no store answers in time."""
    deadline = time.monotonic() + timeout.total_seconds()
    reached: list[TCPStore] = []
    refusals: list[Exception] = []
    accepted = threading.Event()

    def reach() -> None:
        try:
            while time.monotonic() < deadline:
                try:
                    # Until somebody listens, TCPStore's constructor would log every attempt with a stack of C++.
                    socket.create_connection((host, port), max(deadline - time.monotonic(), _POLL_SECONDS)).close()
                    break
                except OSError as error:
                    refusals[:] = [error]
                    time.sleep(_CONNECT_PERIOD_SECONDS)
            else:
                return
            accepted.set()
            left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
            store = TCPStore(
                host, port, rank_info.size, is_master=False, timeout=left, wait_for_workers=False, multi_tenant=True
            )
            store.set_timeout(timeout)
            reached.append(store)
        except Exception as error:
            refusals[:] = [error]

    # The constructor waits for the answer of a program that accepts the connection without a limit.
    thread = threading.Thread(target=reach, name="unitrain rendezvous", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if reached:
        return reached[0]
    error = refusals[0] if refusals else None
    found = "nothing accepts connections there" if error is None else str(error).splitlines()[0]
    if accepted.is_set():
        found = "the program that listens there does not answer as rank 0 does"
    raise CollectiveTimeoutError(
        f"Rank {rank_info.rank} could not reach rank 0 at {host}:{port} within {timeout.total_seconds():g} s: {found}. "
        "Look at the first error that rank 0 logged, or choose another address for every rank: "
        "export MASTER_ADDR=<host of rank 0> MASTER_PORT=<free port>"
    ) from error


def _store_through_horovodrun(rank_info: RankInfo, timeout: timedelta, name: str) -> tuple[Store, str]:
    """horovodrun serves a key-value store over HTTP in which anybody may open a scope: rank 0 leaves its address
    there."""
    server = environment.setting("HOROVOD_GLOO_RENDEZVOUS_ADDR") or ""
    key = name.replace("/", ".")  # a path there has two parts only, a scope and a key
    address = f"http://{server}:{environment.setting('HOROVOD_GLOO_RENDEZVOUS_PORT')}/unitrain/{key}"
    if rank_info.rank == 0:
        host = address_towards(server)
        store = open_tcp_store(host, 0, rank_info, timeout, is_server=True)
        own = json.dumps([host, store.port]).encode()
        _ask_horovodrun(urllib.request.Request(address, data=own, method="PUT"), "leave its address", timeout)
        return store, host
    began = time.monotonic()
    answer = _ask_horovodrun(urllib.request.Request(address), "find the address of rank 0", timeout)
    try:
        host, port = json.loads(answer)
    except (ValueError, TypeError):
        raise LauncherMismatchError(
            f"HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT name {address.split('/')[2]}, where a "
            f"program listens that is not horovodrun's server: it answered {answer[:60]!r}. "
            "Clear what is left over: unset HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT"
        ) from None
    left = max(timeout - timedelta(seconds=time.monotonic() - began), timedelta(seconds=_POLL_SECONDS))
    store = open_tcp_store(host, port, rank_info, left, is_server=False)
    store.set_timeout(timeout)
    return store, host


def _ask_horovodrun(request: urllib.request.Request, purpose: str, timeout: timedelta) -> bytes:
    """Return what horovodrun's server answers, asking again until it does."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            with _DIRECT.open(request, timeout=max(deadline - time.monotonic(), _POLL_SECONDS)) as reply:
                answer: bytes = reply.read()
                return answer
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):  # 404 until rank 0 has been there
                error.close()
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"This rank could not {purpose} at horovodrun's server {request.host} within "
                    f"{timeout.total_seconds():g} s: {error}. "
                    "Look at the first error that rank 0 or horovodrun logged."
                ) from error
            time.sleep(_POLL_SECONDS)

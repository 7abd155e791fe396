"""Rendezvous of the ranks under any launcher via a torch Store, and exchange of small values via that store."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from unitrain.bootstrap import environment
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.network import is_loopback, limit_wait, listen, local_address_for
from unitrain.errors import CollectiveTimeoutError, ConfigError, EnvironmentVariableError, LauncherMismatchError
from unitrain.threads import start_thread
from unitrain.torch_compat import serving_options

_POLL_SECONDS = 0.02
_POLL_SECONDS_PER_RANK = 0.0001  # limits the total request rate of all ranks to 10,000 per second
_CONNECT_PERIOD_SECONDS = 0.1
_EXITS_PERIOD_SECONDS = 1.0
_MAX_REFUSED_SECONDS = 5.0  # time for which the address of horovodrun's server may refuse connections
_MIN_PROCESS_GROUPS = 2
_SERVED_CONNECTIONS_PER_RANK = 5  # connections to rank 0, in addition to those of process groups
_SPARE_DESCRIPTORS = 512  # file descriptors reserved for data, DataLoader workers and files
# Process groups of further models and of Horovod, for which the limit is raised if possible.
_FURTHER_PROCESS_GROUPS = 14
_POSITIONS, _EXITS = "positions", "exits"  # keys
_rendezvous_numbers = itertools.count()
# Proxies are not used, because all hosts belong to the job.
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Stores that this process serves, by address. They are kept open until the process exits, because other ranks may use
# them. A later rendezvous uses the same store, with other keys.
_served_stores: dict[tuple[str, int], TCPStore] = {}


@dataclass(frozen=True)
class NodePosition:
    """Local rank and node rank of one rank, and the corresponding sizes. All ranks compute the same positions."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


@dataclass(frozen=True)
class Rendezvous:
    """A set of connected ranks. All ranks share `store`, and can reach rank 0's host at the address `host`.

    `backend` is the name of the backend that this rank starts, if known. `exits` contains the ranks that have exited
    with status 0, one line per rank, if the launcher reports them; see `report_normal_exit`. `posted_keys` contains the
    keys of unfinished exchanges under which this rank has posted a value.
    """

    rank_info: RankInfo
    store: Store
    host: str
    timeout: timedelta
    backend: str | None = None
    exits: MessageStore | None = None
    posted_keys: set[str] = field(default_factory=set, compare=False)

    def allgather(self, key: str, value: Any, likely_timeout_cause: str = "") -> list[Any]:
        """Return every rank's JSON-serializable `value`, in rank order. All ranks must call this method. The last rank
        to read the values deletes the keys of the exchange from the store.

        Works before the backend is started and while the backend is stuck. Raises CollectiveTimeoutError, which names
        the missing ranks, and LauncherMismatchError if the ranks have different world sizes. If a missing rank has
        exited with status 0 and the launcher reports it, the error is raised before the timeout. `likely_timeout_cause`
        describes the likely cause of a timeout, in complete sentences, for the error message.
        """
        self.post(key, value)
        posted = self._wait_until_complete(key, self.timeout, self._check_no_exit)
        if posted is None:
            published = json.loads(self.messages.get(_complete_list_key(key)))
            if isinstance(published, str):  # an error message
                raise LauncherMismatchError(published)
            values: list[Any] = published
            self._delete_after_last_read(key)
            return values
        if (mismatch := _find_size_mismatch(self._posted_lines(key))) is not None:
            raise LauncherMismatchError(mismatch)
        if missing_ranks := self._missing_ranks(posted):
            names = _format_ranks(missing_ranks)
            signature_text, cause_text = "", f"{likely_timeout_cause} " if likely_timeout_cause else ""
            if self.messages.has_rejected_lines(_posted_values_key(key)):
                signature_text = (
                    "The store also contains messages that are not signed with the UNITRAIN_JOB_KEY of this rank: set "
                    "the same key on every rank, or unset it on every rank. "
                )
            is_torch = self.rank_info.launcher == "init_process_group"
            setting = "init_process_group(timeout=...)" if is_torch else "unitrain.init(timeout_seconds=...)"
            raise CollectiveTimeoutError(
                f"The rendezvous of {self.rank_info.size} ranks timed out after {self.timeout.total_seconds():g} s, at "
                f"{key!r}. Missing: {names}. {cause_text}{signature_text}"
                f"Check the first error that the missing ranks logged, or raise the limit with {setting}."
            )
        # All ranks have posted, but the last rank failed before it published the list.
        return [posted[rank] for rank in range(self.rank_info.size)]

    @cached_property
    def messages(self) -> MessageStore:
        """Store for messages between ranks, which are signed with the job's key."""
        return MessageStore(self.store, "rendezvous")

    def post(self, key: str, value: Any = None) -> None:
        """Add this rank's JSON-serializable `value` to the list under `key`. A second call has no effect.

        The store appends all values to one entry. The last rank to post verifies them and publishes the complete list
        as one message. Every other rank therefore sends and verifies a number of messages that does not depend on the
        number of ranks.
        """
        if key in self.posted_keys:
            return
        self.posted_keys.add(key)
        self.messages.append(_posted_values_key(key), json.dumps([self.rank_info.rank, value, self.rank_info.size]))
        # Any program can change the counter, so it may be too high.
        if self.store.add(f"{key}/count", 1) >= self.rank_info.size:
            lines = self._posted_lines(key)
            if (mismatch := _find_size_mismatch(lines)) is not None:
                self.messages.set(_complete_list_key(key), json.dumps(mismatch))
            elif len(values := _values_by_rank(lines)) == self.rank_info.size:
                self.messages.set(_complete_list_key(key), json.dumps([values[rank] for rank in sorted(values)]))

    def _delete_after_last_read(self, key: str) -> None:
        self.posted_keys.discard(key)
        num_reads = f"{key}/reads"
        if self.store.add(num_reads, 1) == self.rank_info.size:
            for name in (_complete_list_key(key), _posted_values_key(key), f"{key}/count", num_reads):
                self.store.delete_key(name)

    def wait_for_missing_ranks(self, key: str, timeout: timedelta | None = None) -> list[int]:
        """Wait until every rank has posted under `key`; return the ranks that have not done so within the timeout."""
        posted = self._wait_until_complete(key, timeout or self.timeout)
        return [] if posted is None else self._missing_ranks(posted)

    def _wait_until_complete(
        self, key: str, timeout: timedelta, while_waiting: Callable[[str], object] | None = None
    ) -> dict[int, Any] | None:
        """Wait until the complete list is published, and return None; after `timeout`, return the posted values by
        rank. `while_waiting` is called with the key once per second."""
        start_time = next_call = time.monotonic()
        deadline = start_time + timeout.total_seconds()
        poll_seconds = max(_POLL_SECONDS, self.rank_info.size * _POLL_SECONDS_PER_RANK)
        while not self.messages.check([_complete_list_key(key)]):
            if time.monotonic() > deadline:
                return _values_by_rank(self._posted_lines(key))
            if while_waiting is not None and time.monotonic() >= next_call:
                while_waiting(key)
                next_call = time.monotonic() + _EXITS_PERIOD_SECONDS
            time.sleep(poll_seconds)
        return None

    def _check_no_exit(self, key: str) -> None:
        """Raise CollectiveTimeoutError if a rank has exited with status 0 and has not posted under `key`."""
        if self.exits is None or not (lines := self.exits.lines(_EXITS)):
            return
        # Read the exits before the posted values: a rank that has exited has already posted all its values.
        missing_ranks = set(map(int, lines)) & set(self._missing_ranks(_values_by_rank(self._posted_lines(key))))
        if missing_ranks:
            names = _format_ranks(sorted(missing_ranks))
            raise CollectiveTimeoutError(
                f"The rendezvous of {self.rank_info.size} ranks failed: {names} exited with status 0 "
                f"{'before' if key == _POSITIONS else 'during'} unitrain.init(). Call unitrain.init() on every rank "
                "before its program ends, or start fewer ranks."
            )

    def _missing_ranks(self, posted: dict[int, Any]) -> list[int]:
        return [rank for rank in range(self.rank_info.size) if rank not in posted]

    def _posted_lines(self, key: str) -> list[tuple[int, Any, int]]:
        """Return a tuple (rank, value, world size) for each rank that has posted under `key`."""
        lines = map(json.loads, self.messages.lines(_posted_values_key(key)))
        return [(rank, value, size) for rank, value, size in lines]

    @cached_property
    def node_positions(self) -> list[NodePosition]:
        """Position of every rank on its host, in rank order. The first access communicates, so all ranks must read it.
        Raises ConfigError on every rank if the ranks start different backends.

        The node ranks are derived from the values of all ranks, because launchers do not provide a reliable node rank:
        Horovod's is wrong if hosts have different numbers of ranks, and Open MPI provides none.
        """
        host_name = socket.gethostname()
        if environment.get_variable(environment.HOROVOD_SET_BY_UNITRAIN) is None:
            host_name = environment.get_variable("HOROVOD_HOSTNAME") or host_name
        own = [host_name, self.rank_info.node_rank, self.rank_info.local_rank, self.backend]
        values = self.allgather(_POSITIONS, own)
        _check_same_backend([backend for *_, backend in values])
        hosts = [(host, node_rank) for host, node_rank, *_ in values]
        local_sizes = Counter(hosts)
        node_ranks = {host: number for number, host in enumerate(local_sizes)}
        return [
            NodePosition(local_rank, local_sizes[host], node_ranks[host], len(node_ranks))
            for host, (_, _, local_rank, _) in zip(hosts, values, strict=True)
        ]

    @cached_property
    def own_address(self) -> str | None:
        """Address at which other hosts reach this host, or None if it is unknown. The first access communicates, so all
        ranks must read it."""
        try:
            own = local_address_for(self.host)
        except OSError:
            own = None
        addresses = self.allgather("address", own)
        if own is None or not is_loopback(own):
            return own
        # On rank 0's host, its own name may resolve to a loopback address: Debian's installer maps the host name to
        # 127.0.1.1.
        remote = [address for address in addresses if address is not None and not is_loopback(address)]
        return local_address_for(remote[0]) if remote else own


def report_normal_exit(store: Store, variables: Mapping[str, str]) -> None:
    """Report that a rank with the environment `variables` has exited with status 0. The launcher, which serves the
    ranks' `store`, calls it. Ranks that wait for this rank in their rendezvous then raise CollectiveTimeoutError."""
    _open_exits(store, variables.get("TORCHELASTIC_RESTART_COUNT") or "0").append(_EXITS, variables["RANK"])


def _open_exits(store: Store, attempt: str) -> MessageStore:
    return MessageStore(PrefixStore(f"unitrain/{attempt}", store), "exits")


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _complete_list_key(key: str) -> str:
    return f"{key}/complete"


def _posted_values_key(key: str) -> str:
    return f"{key}/posted"


def _values_by_rank(lines: Sequence[tuple[int, Any, int]]) -> dict[int, Any]:
    return {rank: value for rank, value, _ in lines}


def _find_size_mismatch(lines: Sequence[tuple[int, Any, int]]) -> str | None:
    """Return an error message if ranks have posted different world sizes, else None."""
    first_ranks: dict[int, int] = {}
    for rank, _, size in sorted(lines, key=lambda line: line[0]):
        first_ranks.setdefault(size, rank)
    if len(first_ranks) < 2:
        return None
    sizes = ", ".join(f"{size} on rank {rank}" for size, rank in first_ranks.items())
    return (
        f"The ranks have different world sizes: {sizes}. Start all ranks with the same WORLD_SIZE, or pass the same "
        "world_size to init_process_group on all ranks."
    )


def _check_same_backend(names: Sequence[str | None]) -> None:
    """Raise ConfigError unless all ranks start the same backend. The error is the same on every rank."""
    other_rank = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if other_rank is not None:
        raise ConfigError(
            f"The ranks start different backends: {names[0]!r} on rank 0, {names[other_rank]!r} on rank {other_rank}. "
            "Pass the same backend to unitrain.init on every rank, or set UNITRAIN_BACKEND to the same value on every "
            "host."
        )


def connect_ranks(rank_info: RankInfo, timeout: timedelta, backend: str | None = None) -> Rendezvous:
    """Connect the ranks of any launcher, and return when all are connected. All ranks must call this function the same
    number of times.

    Raises LauncherMismatchError if the launcher provides no rendezvous address, or if the ranks have different world
    sizes. Raises EnvironmentVariableError for an invalid address. Raises ConfigError if this rank needs too many file
    descriptors or cannot listen on the address. Raises ConfigError on every rank if the ranks pass different values of
    `backend`. Raises CollectiveTimeoutError, which names the missing ranks, after `timeout`. Under
    `unitrain.bootstrap.torchrun`, this error is raised within seconds if a missing rank has exited with status 0.
    """
    environment.check_not_in_step_shell(rank_info)
    raise_descriptor_limit(rank_info)
    # A restarted job, or a second rendezvous of the same processes, must not read the keys of the previous rendezvous.
    # If torchrun serves the store, the store outlives a restart, so the keys contain torchrun's restart count. Without
    # such a store, each attempt creates a new one. The count is then not used, because torchrun counts restarts per
    # host: hosts that joined later have different counts.
    is_shared = environment.get_variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = (environment.get_variable("TORCHELASTIC_RESTART_COUNT") if is_shared else None) or "0"
    name = f"unitrain/{attempt}/{next(_rendezvous_numbers)}"
    store, host = _open_shared_store(rank_info, timeout, name)
    exits = _open_exits(store, attempt) if is_shared else None  # torchrun's process reports exits to its own store
    rendezvous = Rendezvous(rank_info, PrefixStore(name, store), host, timeout, backend, exits)
    _ = rendezvous.node_positions  # waits for all ranks
    return rendezvous


def _open_shared_store(rank_info: RankInfo, timeout: timedelta, name: str) -> tuple[Store, str]:
    """Return the store that all ranks share, and an address of rank 0's host."""
    if rank_info.launcher == "none" or (rank_info.size == 1 and environment.get_variable("MASTER_ADDR") is None):
        return HashStore(), "127.0.0.1"
    if (host := environment.get_variable("MASTER_ADDR")) and (port := environment.get_variable("MASTER_PORT")):
        # torchrun may serve the store itself; otherwise rank 0 does.
        is_server = rank_info.rank == 0 and environment.get_variable("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
            raise EnvironmentVariableError(
                f"MASTER_PORT must be a port from 1 to 65535, got {port!r}. Use: export MASTER_PORT=29500"
            )
        _check_is_resolvable(host)
        return open_tcp_store(host, int(port), rank_info, timeout, is_server=is_server), host
    if environment.get_variable("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        return _open_store_through_horovodrun(rank_info, timeout, name)
    fix = {
        "mpirun": "Use --backend horovod, which needs none, or set one: "
        "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        "mpiexec": "Set one: mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ...",
        "mpirun_rsh": "Set one before the program: mpirun_rsh ... MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 "
        "python ...",
        "jsrun": "Set one: jsrun -E MASTER_ADDR=<host of rank 0> -E MASTER_PORT=29500 ...",
        "srun": "Set one before srun: "
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500',
    }.get(rank_info.launcher, "Set one on every rank: export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500")
    raise LauncherMismatchError(
        f"{rank_info.source} set rank {rank_info.rank} of {rank_info.size}, but no rendezvous address. {fix}"
    )


def _check_is_resolvable(host: str) -> None:
    """Raise EnvironmentVariableError if MASTER_ADDR is a name that does not resolve.

    In Kubernetes, this check is skipped, because the name of a pod may become resolvable only after other pods have
    started. The connection to the store is then retried until the timeout.
    """
    if environment.get_variable("KUBERNETES_SERVICE_HOST") is not None:
        return
    try:
        socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EnvironmentVariableError(
            f"MASTER_ADDR={host!r} cannot be resolved on host {socket.gethostname()!r}: {reason}. "
            "Set the name or IP address of rank 0's host on every rank: export MASTER_ADDR=<host of rank 0>"
        ) from error


def raise_descriptor_limit(rank_info: RankInfo) -> None:
    """Raise this process's soft limit of file descriptors to the number required for connections to other ranks.

    Raises ConfigError if the hard limit is lower.
    """
    # Rank 0 serves five connections per rank: three to the store, one for the liveness check, and one for torch's own
    # use of the store. Every rank has a connection to every other rank in two or more process groups.
    num_peers = rank_info.size - 1
    num_open = sum(1 for _ in Path("/dev/fd").iterdir())
    num_needed = (_SERVED_CONNECTIONS_PER_RANK * (rank_info.rank == 0) + _MIN_PROCESS_GROUPS) * num_peers + num_open
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_limit = hard_limit if hard_limit != resource.RLIM_INFINITY else 2**20
    if max_limit < num_needed:
        raise ConfigError(
            f"Rank {rank_info.rank} of {rank_info.size} needs at least {num_needed} file descriptors for its "
            f"connections, and the hard limit on this host is {max_limit}. Raise it before the launcher starts: "
            f"ulimit -Hn {2 * num_needed}, or with LimitNOFILE= of the service that starts ranks on this host, such as "
            "slurmd or sshd."
        )
    limit = min(max_limit, num_needed + _FURTHER_PROCESS_GROUPS * num_peers + _SPARE_DESCRIPTORS)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def check_free_descriptors(num_peers: int) -> None:
    """Raise ConfigError if this process cannot open a connection to each of `num_peers` ranks, for a further process
    group."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(1 for _ in Path("/dev/fd").iterdir())
    if limit != resource.RLIM_INFINITY and limit < num_open + num_peers:
        raise ConfigError(
            f"The process group of this model needs {num_peers} file descriptors, but this process has {num_open} open "
            f"files and a limit of {limit}. Raise the limit before the launcher starts: "
            f"ulimit -Hn {2 * (num_open + num_peers)}, or put several models into one module."
        )


def open_tcp_store(host: str, port: int, rank_info: RankInfo, timeout: timedelta, *, is_server: bool) -> TCPStore:
    """Return the store at an address. If `is_server`, this process serves the store. Does not wait for other ranks.

    A served store listens on one address, or on all interfaces if `host` does not determine the address; see
    `network.listen`. Raises ConfigError if rank 0 cannot listen there, and CollectiveTimeoutError if no store responds
    within the timeout.
    """
    if not is_server:
        return _connect_to_store(host, port, rank_info, timeout)
    if (served := _served_stores.get((host, port))) is not None:
        served.set_timeout(timeout)
        return served
    try:
        listener = listen(host, port)
        port_to_serve, descriptor = listener.getsockname()[1], listener.detach()
        store = TCPStore(
            host,
            port_to_serve,
            rank_info.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            **serving_options(descriptor),
        )
    except (RuntimeError, OSError) as error:
        is_in_use = "EADDRINUSE" in str(error) or "ddress already in use" in str(error)
        reason = "another program listens there" if is_in_use else str(error).splitlines()[0]
        raise ConfigError(
            f"Rank {rank_info.rank} could not listen on {host}:{port}: {reason}. "
            "Choose a free port on rank 0's host and set it on every rank: export MASTER_PORT=<port>"
        ) from error
    _served_stores[host, port] = store
    return store


def _connect_to_store(host: str, port: int, rank_info: RankInfo, timeout: timedelta) -> TCPStore:
    """Return a connection to rank 0's store. Raises CollectiveTimeoutError if no store responds within the timeout."""
    deadline = time.monotonic() + timeout.total_seconds()
    stores: list[TCPStore] = []
    errors: list[Exception] = []
    is_accepted = threading.Event()

    def connect() -> None:
        try:
            while time.monotonic() < deadline:
                try:
                    # While no program listens, TCPStore's constructor would log a C++ stack for every attempt.
                    remaining = limit_wait(max(deadline - time.monotonic(), _POLL_SECONDS))
                    socket.create_connection((host, port), remaining).close()
                    break
                except OSError as error:
                    errors[:] = [error]
                    time.sleep(_CONNECT_PERIOD_SECONDS)
            else:
                return
            is_accepted.set()
            store = TCPStore(
                host,
                port,
                rank_info.size,
                is_master=False,
                timeout=timedelta(seconds=limit_wait(max(deadline - time.monotonic(), 1.0))),
                wait_for_workers=False,
                multi_tenant=True,
            )
            store.set_timeout(timeout)
            stores.append(store)
        except Exception as error:
            errors[:] = [error]

    # In a thread, because the constructor waits without a limit if a different program accepts the connection.
    start_thread(connect, name="unitrain rendezvous").join(timeout.total_seconds())
    if stores:
        return stores[0]
    error = errors[0] if errors else None
    reason = "no program accepts connections there" if error is None else str(error).splitlines()[0]
    if is_accepted.is_set():
        reason = "the program that listens there does not respond like rank 0"
    raise CollectiveTimeoutError(
        f"Rank {rank_info.rank} could not reach rank 0 at {host}:{port} within {timeout.total_seconds():g} s: "
        f"{reason}. "
        "Check the first error that rank 0 logged, or choose another address on every rank: "
        "export MASTER_ADDR=<host of rank 0> MASTER_PORT=<free port>"
    ) from error


def _open_store_through_horovodrun(rank_info: RankInfo, timeout: timedelta, name: str) -> tuple[Store, str]:
    """Return the store that all ranks share. Rank 0 serves it, and publishes the address in horovodrun's HTTP store."""
    server = environment.get_variable("HOROVOD_GLOO_RENDEZVOUS_ADDR") or ""
    key = name.replace("/", ".")  # a path has exactly two parts, a scope and a key
    url = f"http://{server}:{environment.get_variable('HOROVOD_GLOO_RENDEZVOUS_PORT')}/unitrain/{key}"
    if rank_info.rank == 0:
        host = local_address_for(server)
        store = open_tcp_store(host, 0, rank_info, timeout, is_server=True)
        address = json.dumps([host, store.port]).encode()
        _request_horovodrun(
            urllib.request.Request(url, data=address, method="PUT"),
            "publish its address on horovodrun's server",
            timeout,
        )
        return store, host
    start_time = time.monotonic()
    answer = _request_horovodrun(
        urllib.request.Request(url), "get the address of rank 0 from horovodrun's server", timeout
    )
    try:
        host, port = json.loads(answer)
    except (ValueError, TypeError):
        raise LauncherMismatchError(
            f"HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT contain {url.split('/')[2]}, where a "
            f"program listens that is not horovodrun's server: it answered {answer[:60]!r}. "
            "Clear the stale variables: unset HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT"
        ) from None
    remaining = max(timeout - timedelta(seconds=time.monotonic() - start_time), timedelta(seconds=_POLL_SECONDS))
    store = open_tcp_store(host, port, rank_info, remaining, is_server=False)
    store.set_timeout(timeout)
    return store, host


def _request_horovodrun(request: urllib.request.Request, purpose: str, timeout: timedelta) -> bytes:
    """Return the response of horovodrun's server. Repeat the request until it succeeds or times out.

    The server listens before horovodrun starts any rank. If its address refuses connections for 5 seconds, horovodrun
    has probably ended, and this function raises CollectiveTimeoutError before the timeout. `purpose` completes the
    error message "This rank could not ...".
    """
    start_time = last_not_refused = time.monotonic()
    while True:
        try:
            remaining = start_time + timeout.total_seconds() - time.monotonic()
            with _WITHOUT_PROXY.open(request, timeout=limit_wait(max(remaining, _POLL_SECONDS))) as reply:
                answer: bytes = reply.read()
                return answer
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):  # 404 until rank 0 has published its address
                error.close()
            now = time.monotonic()
            if not isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                last_not_refused = now
            has_ended = now - last_not_refused > _MAX_REFUSED_SECONDS
            if has_ended or now - start_time > timeout.total_seconds():
                cause = " horovodrun has probably ended." if has_ended else ""
                raise CollectiveTimeoutError(
                    f"This rank could not {purpose} {request.host} within {now - start_time:.0f} s: {error}.{cause} "
                    "Check the first error that rank 0 or horovodrun logged."
                ) from error
            time.sleep(_POLL_SECONDS)

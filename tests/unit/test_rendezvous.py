"""Rendezvous of ranks and its errors. In many tests, one rank waits for a peer that never responds."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore

from unitrain.bootstrap import environment, messages, network, torchrun
from unitrain.bootstrap.authentication import unseal
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.rendezvous import Rendezvous, connect_ranks, report_normal_exit
from unitrain.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    ConfigError,
    EnvironmentVariableError,
    LauncherMismatchError,
)

RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def clear_rendezvous_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RENDEZVOUS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        (
            "mpirun",
            "mpirun set rank 1 of 2, but no rendezvous address. Use --backend horovod, which needs none, or "
            "set one: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        ),
        (
            "mpiexec",
            "mpiexec set rank 1 of 2, but no rendezvous address. "
            "Set one: mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ...",
        ),
        (
            "srun",
            "srun set rank 1 of 2, but no rendezvous address. Set one before srun: export "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500',
        ),
        (
            "env",
            "RANK and WORLD_SIZE set rank 1 of 2, but no rendezvous address. "
            "Set one on every rank: export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500",
        ),
    ],
)
def test_missing_rendezvous_address_is_reported_with_a_fix(launcher: str, message: str) -> None:
    with pytest.raises(LauncherMismatchError) as caught:
        connect_ranks(RankInfo(launcher, 1, 2, 1), timedelta(seconds=1))
    assert str(caught.value) == message


class NoAddressHandler(BaseHTTPRequestHandler):
    """Handles requests like horovodrun's server before rank 0 publishes its address. Does not respond after
    `silent_from`."""

    def do_GET(self) -> None:
        if time.monotonic() > self.server.silent_from:  # type: ignore[attr-defined]
            self.server.over.wait(60)  # type: ignore[attr-defined]
        else:
            self.send_error(404)

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["has no address", "stops responding", "has exited"])
def horovodrun_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "has exited":
        with socket.socket() as held:  # bound but not listening
            held.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{held.getsockname()[1]}"
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoAddressHandler)
    server.over = Event()  # type: ignore[attr-defined]
    server.daemon_threads = False  # server_close waits for the remaining requests
    server.silent_from = time.monotonic() + (1.6 if request.param == "stops responding" else 60)  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.over.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("rank", "purpose"), [(0, "publish its address on"), (1, "get the address of rank 0 from")])
def test_timeout_limits_the_total_wait_for_horovodruns_server(
    horovodrun_server: str, rank: int, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = horovodrun_server.partition(":")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", host)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", port)
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        connect_ranks(RankInfo("horovodrun", rank, 2, rank), timedelta(seconds=2))
    assert 1.9 < time.monotonic() - began < 20
    assert str(caught.value).startswith(
        f"This rank could not {purpose} horovodrun's server {horovodrun_server} within 2 s: "
    )
    assert str(caught.value).endswith(". Check the first error that rank 0 or horovodrun logged.")


def test_only_addresses_with_a_listener_are_reachable() -> None:
    """No program listens at 127.0.0.2, which is an address of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.find_reachable_addresses(["127.0.0.2", "127.0.0.1"], port, 2.0) == ["127.0.0.1"]
    own = network.own_addresses()
    assert own[-1] == "127.0.0.1"
    assert [network.is_loopback(address) for address in own] == [False] * (len(own) - 1) + [True]


@contextlib.contextmanager
def start_other_program(behavior: str) -> Iterator[int]:
    """Simulate a program other than rank 0. It accepts connections, and then is silent, closes them or sends HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if behavior == "http":
                        held[-1].sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    if behavior in ("http", "closes"):
                        held.pop().close()

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


NOT_RANK_ZERO = "the program that listens there does not respond like rank 0"


@pytest.mark.parametrize("behavior", ["silent", "closes", "http"])
def test_another_program_on_the_port_is_reported_within_the_timeout(
    behavior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_other_program(behavior) as port:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            connect_ranks(RankInfo("env", 1, 2, 1), timedelta(seconds=3))
        assert time.monotonic() - began < 20
        assert str(caught.value).startswith(
            f"Rank 1 could not reach rank 0 at 127.0.0.1:{port} within 3 s: {NOT_RANK_ZERO}."
        )
        assert str(caught.value).endswith("export MASTER_ADDR=<host of rank 0> MASTER_PORT=<free port>")
        with pytest.raises(ConfigError) as rejected:
            connect_ranks(RankInfo("env", 0, 2, 0), timedelta(seconds=3))
        assert str(rejected.value).startswith(
            f"Rank 0 could not listen on 127.0.0.1:{port}: another program listens there. Choose a free port"
        )


def test_port_without_a_listener_is_reported_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = r"within 2 s: \[Errno 111\] Connection refused\. Check the first"
    with network.reserve_port() as reservation:
        port = reservation.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=expected):
            connect_ranks(RankInfo("env", 1, 2, 1), timedelta(seconds=2))
        assert time.monotonic() - began < 20
    assert f"{port})" not in capfd.readouterr().err  # torch does not log a C++ stack for each attempt


def test_host_that_drops_packets_is_reported_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is simulated by a listener whose queue is full, because such a listener drops packets."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(full.getsockname()[1]))
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"Rank 1 could not reach rank 0 at .* within 2 s: "):
            connect_ranks(RankInfo("env", 1, 2, 1), timedelta(seconds=2))
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1"])
def test_invalid_port_is_rejected(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(EnvironmentVariableError, match=f"MASTER_PORT must be a port from 1 to 65535, got '{port}'"):
        connect_ranks(RankInfo("env", 1, 2, 1), timedelta(seconds=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_address_that_cannot_be_resolved_is_reported_immediately(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    began = time.monotonic()
    with pytest.raises(EnvironmentVariableError) as caught:
        connect_ranks(RankInfo("env", rank, 2, rank), timedelta(seconds=60))
    assert str(caught.value).startswith("MASTER_ADDR='no-such-host.invalid' cannot be resolved on host ")
    assert str(caught.value).endswith("on every rank: export MASTER_ADDR=<host of rank 0>")
    assert time.monotonic() - began < 30


def test_pods_wait_until_an_address_can_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Kubernetes, other pods may start before the name of the first pod can be resolved."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(CollectiveTimeoutError, match=r"Rank 1 could not reach rank 0 at no-such-host\.invalid"):
        connect_ranks(RankInfo("kubernetes", 1, 2, 0), timedelta(seconds=1))


def test_another_program_instead_of_horovodruns_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_other_program("closes") as port:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
        with pytest.raises(CollectiveTimeoutError, match="This rank could not get the address of rank 0 from horovodr"):
            connect_ranks(RankInfo("horovodrun", 1, 2, 1), timedelta(seconds=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_does_not_wait_for_a_horovodrun_that_has_ended(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """horovodrun cannot end a rank on another host if the connection to this host is lost."""
    with network.listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"Connection refused>\. horovodrun has probably ended\."):
        connect_ranks(RankInfo("horovodrun", rank, 2, rank), timedelta(seconds=120))
    assert time.monotonic() - began < 60


def test_process_exits_after_a_timeout_although_a_thread_waits_for_a_response() -> None:
    """The program at the rendezvous address does not respond."""
    with start_other_program("silent") as port:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run(
            [sys.executable, "-c", "import unitrain; unitrain.init('ddp', device='cpu', timeout_seconds=3)"],
            env=environment.without_launcher_variables() | variables,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
        )
    assert done.returncode == 1
    assert NOT_RANK_ZERO in done.stderr, done.stderr


class CountingStore:
    """A store that counts requests by name and forwards them to another store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.requests[name] += 1
            return getattr(self._store, name)(*args)

        return request


@pytest.mark.ci
def test_number_of_requests_per_rank_does_not_depend_on_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 40
    verified: list[str] = []

    def count_signatures(sealed: bytes, purpose: str) -> str:
        verified.append(purpose)
        return unseal(sealed, purpose)

    monkeypatch.setattr(messages, "unseal", count_signatures)
    served = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    stores = [
        CountingStore(TCPStore("127.0.0.1", served.port, size, is_master=False, wait_for_workers=False))
        for _ in range(size)
    ]

    def gather(rank: int) -> list[Any]:
        rendezvous = Rendezvous(RankInfo("env", rank, size, rank), stores[rank], "127.0.0.1", timedelta(seconds=60))  # type: ignore[arg-type]
        return [rendezvous.allgather("one", {"of": rank}), rendezvous.allgather("two", f"line\n{rank}")]

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(gather, range(size)))
    expected = [[{"of": rank} for rank in range(size)], [f"line\n{rank}" for rank in range(size)]]
    assert all(result == expected for result in results)
    for store in stores:
        del store.requests["check"]  # ranks poll with `check`
    assert sum((store.requests for store in stores), Counter()) == {
        "append": 2 * size, "add": 4 * size, "set": 2, "get": 2 + 4 * size,
        "delete_key": 8,  # the last reader removes the keys of an exchange
    }  # fmt: skip
    # For each of two keys, the last rank to post verifies each value, and each rank verifies the complete list twice,
    # in `check` and in `get`.
    assert len(verified) == 2 * (size + 2 * size)


def test_timeout_names_every_missing_rank() -> None:
    store = HashStore()
    ranks = [Rendezvous(RankInfo("env", rank, 4, rank), store, "127.0.0.1", timedelta(seconds=1)) for rank in (1, 2)]
    for rendezvous in ranks:  # before the timeout of either rank starts
        rendezvous.post("key", rendezvous.rank_info.rank)

    def error_of(rendezvous: Rendezvous) -> str:
        with pytest.raises(CollectiveTimeoutError) as caught:
            rendezvous.allgather("key", rendezvous.rank_info.rank)
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(error_of, ranks))
    assert texts[0] == texts[1]
    assert texts[0].startswith("The rendezvous of 4 ranks timed out after 1 s, at 'key'. Missing: ranks 0, 3. ")


def test_ranks_do_not_wait_for_a_rank_that_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setattr("unitrain.bootstrap.rendezvous._open_shared_store", lambda *_: (store, "127.0.0.1"))
    report_normal_exit(store, {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"})
    report_normal_exit(store, {"RANK": "2", "TORCHELASTIC_RESTART_COUNT": "1"})  # in an earlier attempt
    with pytest.raises(CollectiveTimeoutError) as caught:
        connect_ranks(RankInfo("torchrun", 0, 4, 0), timedelta(seconds=300))
    assert str(caught.value).startswith(
        "The rendezvous of 4 ranks failed: rank 1 exited with status 0 before unitrain.init(). "
    )


def test_values_of_a_rank_that_has_exited_are_returned() -> None:
    """A rank may exit as soon as it has posted its value."""
    store = HashStore()
    exits = MessageStore(store, "exits")
    for rank in (1, 2):
        exits.append("exits", str(rank))
    ranks = [
        Rendezvous(RankInfo("torchrun", rank, 3, rank), store, "127.0.0.1", timedelta(seconds=60), exits=exits)
        for rank in range(3)
    ]
    ranks[1].post("key", 1)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2 exited with status 0 during unitrain\.init\(\)"):
        ranks[0].allgather("key", 0)
    ranks[2].post("key", 2)
    assert ranks[0].allgather("key", 0) == [0, 1, 2]


def test_values_are_returned_if_the_last_rank_failed_before_it_published_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    first, last = (
        Rendezvous(RankInfo("env", rank, 2, rank), store, "127.0.0.1", timedelta(seconds=0.5)) for rank in range(2)
    )
    first.post("key", "first")
    monkeypatch.setattr(last.messages, "set", lambda *_: None)
    last.post("key", "last")
    assert first.wait_for_missing_ranks("key") == []
    assert first.allgather("key", "first") == ["first", "last"]


def test_timeout_reports_messages_with_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    rendezvous = Rendezvous(RankInfo("env", 1, 2, 1), store, "127.0.0.1", timedelta(seconds=0.5))
    monkeypatch.setenv("UNITRAIN_JOB_KEY", "aaaa")
    rendezvous.post("positions", 1)
    monkeypatch.setenv("UNITRAIN_JOB_KEY", "bbbb")
    other = Rendezvous(RankInfo("env", 0, 2, 0), store, "127.0.0.1", timedelta(seconds=0.5))
    with pytest.raises(CollectiveTimeoutError, match=r"messages that are not signed with the UNITRAIN_JOB_KEY of t"):
        other.allgather("positions", 0)


def test_different_backends_on_ranks_are_reported() -> None:
    store = HashStore()
    ranks = [
        Rendezvous(RankInfo("env", rank, 3, rank), store, "127.0.0.1", timedelta(seconds=20), backend)
        for rank, backend in enumerate(("ddp", "ddp", "horovod"))
    ]
    for rank, rendezvous in enumerate(ranks[1:], start=1):
        rendezvous.post("positions", ["host", None, rank, rendezvous.backend])
    for rendezvous in ranks:
        with pytest.raises(ConfigError) as caught:
            _ = rendezvous.node_positions
        assert str(caught.value) == (
            "The ranks start different backends: 'ddp' on rank 0, 'horovod' on rank 2. Pass the same backend to "
            "unitrain.init on every rank, or set UNITRAIN_BACKEND to the same value on every host."
        )


@pytest.mark.parametrize(("first", "timeout_seconds"), [(1, 60.0), (0, 1.0)])
def test_different_world_sizes_on_ranks_are_reported(first: int, timeout_seconds: float) -> None:
    """The error is raised immediately if the rank that posts last has the smallest world size, otherwise at the
    timeout."""
    store = HashStore()
    ranks = [
        Rendezvous(RankInfo("env", rank, rank + 2, rank), store, "127.0.0.1", timedelta(seconds=timeout_seconds))
        for rank in range(2)
    ]
    ranks[first].post("key", first)
    began = time.monotonic()
    for rank in (1 - first, first):
        with pytest.raises(LauncherMismatchError) as caught:
            ranks[rank].allgather("key", rank)
        assert str(caught.value).startswith(
            "The ranks have different world sizes: 2 on rank 0, 3 on rank 1. Start all ranks with the same WORLD_SIZE, "
        )
    assert time.monotonic() - began < 20


def test_bytes_that_are_not_text_are_rejected_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNITRAIN_JOB_KEY", raising=False)
    with pytest.raises(AuthenticationError, match="it is not text"):
        unseal(b"u\xff\xfe", "key")


def test_rank_that_posts_twice_is_counted_once() -> None:
    rendezvous = Rendezvous(RankInfo("env", 0, 2, 0), HashStore(), "127.0.0.1", timedelta(seconds=1))
    for _ in range(2):
        rendezvous.post("stuck", None)
        assert rendezvous.wait_for_missing_ranks("stuck", timedelta(seconds=0.1)) == [1]


LIMITS = """
import json, resource, sys
from unitrain.bootstrap.rendezvous import raise_descriptor_limit
from unitrain.bootstrap.environment import RankInfo
from unitrain.errors import ConfigError
for rank, size in ((0, 2), (0, 500), (5, 1024), (0, 1024)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4000))
    refused = ""
    try:
        raise_descriptor_limit(RankInfo("env", rank, size, 0))
    except ConfigError as error:
        refused = str(error)
    print(json.dumps([*resource.getrlimit(resource.RLIMIT_NOFILE), refused]))
"""


def test_descriptor_limit_is_raised_or_an_error_names_the_required_limit() -> None:
    """The soft limit is 200 and the hard limit is 4,000, for rank 0 of 2, 0 of 500, 5 of 1,024 and 0 of 1,024 ranks."""
    lines = subprocess.check_output([sys.executable, "-c", LIMITS], text=True).splitlines()
    two, many, other, too_many = (json.loads(line) for line in lines)
    assert 200 <= two[0] < 1000
    assert 7 * 499 <= many[0] <= 4000
    assert 2046 <= other[0] <= 4000
    assert [hard for _, hard, _ in (two, many, other, too_many)] == [4000] * 4
    assert [rejected for _, _, rejected in (two, many, other)] == [""] * 3
    soft, _, rejected = too_many
    assert soft == 200
    assert rejected.startswith("Rank 0 of 1024 needs at least 71")
    assert "and the hard limit on this host is 4000. Raise it before the launcher starts: ulimit -Hn " in rejected


FURTHER_GROUP = """
import resource
from unitrain.bootstrap.rendezvous import check_free_descriptors
from unitrain.errors import ConfigError
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
check_free_descriptors(100)
try:
    check_free_descriptors(500)
except ConfigError as error:
    print(error)
"""


def test_process_group_that_exceeds_the_descriptor_limit_is_refused() -> None:
    output = subprocess.check_output([sys.executable, "-c", FURTHER_GROUP], text=True)
    assert output.startswith("The process group of this model needs 500 file descriptors, but this process has ")
    assert "and a limit of 200. Raise the limit before the launcher starts: ulimit -Hn 10" in output


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [
        ("--master-addr a", "a:29500"),
        ("--master-addr a --master-port 1234", "a:1234"),
        ("--rdzv-endpoint a", "a:29500"),
        ("--rdzv-endpoint a --master-port 1234", "a:1234"),
        ("--rdzv-endpoint a:1234", "a:1234"),
        ("--rdzv-endpoint [::1]", "[::1]:29500"),
        ("--nnodes 1 --rdzv-endpoint a", "a:0"),  # a free port suffices on one host
    ],
)
def test_endpoint_of_a_static_rendezvous_gets_a_port(
    options: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The static rendezvous of torchrun raises an error for an endpoint without a port."""
    used = []
    monkeypatch.setattr(torchrun.run, "run", lambda options: used.append(options.rdzv_endpoint))
    torchrun._run(torchrun.run.parse_args(["--nnodes", "2", *options.split(), "train.py"]))
    assert used == [endpoint]


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("a:0", r"--rdzv-endpoint a:0 selects a free port, which other hosts cannot know\. Use the same address and"),
        ("a:x", r"port number of the rendezvous endpoint 'a:x' must be an integer .*--rdzv-endpoint node1:29500"),
        ("a b", r"hostname of the rendezvous endpoint 'a b' must be .*--rdzv-endpoint node1:29500"),
    ],
)
def test_invalid_endpoints_of_a_static_rendezvous_are_reported(endpoint: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        torchrun._run(torchrun.run.parse_args(["--nnodes", "2", "--rdzv-endpoint", endpoint, "train.py"]))

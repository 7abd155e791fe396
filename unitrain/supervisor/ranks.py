"""The supervisor's connections to the ranks of a job, which detect exits of ranks and request checkpoints or exits.

The standby ranks of the next attempt, which are started in advance, also wait on these connections for the message that
starts their script.
"""

from __future__ import annotations

import errno
import json
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from unitrain.bootstrap.authentication import authenticate
from unitrain.errors import AuthenticationError
from unitrain.monitoring.peer_connection import PREEMPTED_MESSAGE, DisconnectReason, PeerConnection
from unitrain.monitoring.supervisor_client import (
    CHECK,
    CONNECTION_PURPOSE,
    EXIT,
    READY,
    RESPONDING,
    RUNNING,
    SAVE_AND_EXIT,
    SHUT_DOWN,
    START,
    AttemptInfo,
)
from unitrain.threads import start_thread

# TCP keepalive detects an unresponsive host after 5 + 3 x 5 seconds.
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 5, 5, 3
_GREETING_TIMEOUT_SECONDS = 10.0
# Each rank needs one connection, and the soft limit on open file descriptors is usually 1,024.
_NUM_DESCRIPTORS = 2**16
# Each connection has a thread. Any process that can reach the address can connect, so the oldest unauthenticated
# connection is closed when this number is reached.
MAX_UNAUTHENTICATED = 1024
# Transient errors of `accept`, and the delay before the next call.
_TEMPORARY_ERRORS = (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_SECONDS = 0.1
# Maximum delay between the launcher's exit and the detection that its ranks have exited.
_EXIT_DETECTION_SECONDS = 1.0


class RankConnections:
    """Server for the connections of all ranks in one attempt of the job `job_name`. The ranks connect to `address`.

    `crashed_ranks` lists the killed or crashed ranks in chronological order, and `unreachable_ranks` the ranks on
    unresponsive hosts. `is_preempted` is true if ranks exited after a requested checkpoint. Ranks authenticate with
    `key`. With `is_standby`, the ranks wait until `start` is called. As a context manager, it closes the connections on
    exit without waiting for ranks.
    """

    def __init__(
        self, job_name: str, key: str | None, listen_on: str, advertised_host: str, *, is_standby: bool = False
    ) -> None:
        self._job_name, self._key = job_name, key
        self.describe_attempt: Callable[[], AttemptInfo] | None = None
        """Returns the description of the attempt, which is sent to rank 0 when it calls `unitrain.init`. Set it before
        the ranks are started."""
        self._is_started = not is_standby
        self._ready: set[int] = set()
        self._responding: set[int] = set()
        self._running: set[int] = set()
        _raise_descriptor_limit()
        self._listener = socket.create_server((listen_on, 0), backlog=1024)
        self.address = f"{advertised_host}:{self._listener.getsockname()[1]}"
        self.crashed_ranks: list[int] = []
        self.unreachable_ranks: list[int] = []
        self.is_preempted = self.is_exit_requested = False
        self.has_running_rank_crashed = False
        """Whether a rank was killed or crashed between `unitrain.init` and the shutdown of its backend."""
        self._first_exit_was_normal = self._lost_host_first = self._is_exiting = False
        self._connections: dict[int, PeerConnection] = {}
        self._unauthenticated: list[socket.socket] = []  # oldest first
        self._state_changed = threading.Condition()
        start_thread(self._accept, name="unitrain ranks", restarts=True)

    def __enter__(self) -> RankConnections:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections without waiting for ranks."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._state_changed:
            for connection in self._connections.values():
                connection.interrupt()
            self._connections.clear()  # a rank that is disconnected here has not crashed

    @property
    def first_crashed_rank(self) -> int | None:
        """The rank that was killed or crashed before any other rank exited, or None."""
        is_first = not (self._first_exit_was_normal or self._lost_host_first)
        return self.crashed_ranks[0] if self.crashed_ranks and is_first else None

    @property
    def num_ready(self) -> int:
        """The number of standby ranks that have imported their modules."""
        return len(self._ready)

    @property
    def num_running(self) -> int:
        """The number of ranks that have called `unitrain.init` and have not shut their backend down."""
        return len(self._running)

    @property
    def have_exited_after_crash(self) -> bool:
        """Whether no rank is connected any more, and a rank was killed or crashed between `unitrain.init` and the
        shutdown of its backend."""
        return self.has_running_rank_crashed and not self._connections

    @property
    def has_disconnected_ranks(self) -> bool:
        """Whether any rank has exited, or the host of any rank does not respond."""
        return bool(self.crashed_ranks or self.unreachable_ranks or self._first_exit_was_normal)

    def wait_for_responses(self, timeout_seconds: float) -> bool:
        """Request a response from all connected ranks. Return whether they respond within the timeout.

        A stopped rank does not respond.
        """
        with self._state_changed:
            self._responding.clear()
            for connection in self._connections.values():
                connection.send(CHECK)
            return self._state_changed.wait_for(lambda: self._connections.keys() <= self._responding, timeout_seconds)

    def start(self) -> None:
        """Start the standby ranks. Ranks that connect later start immediately."""
        with self._state_changed:
            self._is_started = True
            for connection in self._connections.values():
                connection.send(START)

    def request_exit(self) -> None:
        """Request that the job save a checkpoint and exit. The request is sent to rank 0 as soon as it is connected."""
        with self._state_changed:
            self.is_exit_requested = True
            self._send_save_and_exit()

    def save_after_end_of_launcher(self, timeout_seconds: float) -> None:
        """Request that the job save a checkpoint and exit, because its launcher was killed. Wait until all connected
        ranks have exited, for at most `timeout_seconds`. This does not count as a preemption."""
        with self._state_changed:
            is_preempted = self.is_preempted
            self._send_save_and_exit()
            self._state_changed.wait_for(self._all_disconnected, timeout_seconds)
            self.is_preempted = is_preempted

    def _send_save_and_exit(self) -> None:
        if 0 in self._connections:
            self._connections[0].send(SAVE_AND_EXIT)

    def exit_all_ranks(self, timeout_seconds: float) -> None:
        """Wait briefly for the exit of all ranks, then request an immediate exit of the remaining ones. Ranks still
        connected at the timeout count as unreachable."""
        with self._state_changed:
            self._is_exiting = True  # ranks that connect later also receive the request
            self._state_changed.wait_for(self._all_disconnected, _EXIT_DETECTION_SECONDS)
        if not self.exit_remaining_ranks(timeout_seconds):
            self.unreachable_ranks += sorted(self._connections)

    def exit_remaining_ranks(self, timeout_seconds: float) -> bool:
        """Request an immediate exit of all connected ranks, and return whether they have exited within the timeout."""
        with self._state_changed:
            self._is_exiting = True
            for connection in self._connections.values():
                connection.send(EXIT)
            return self._state_changed.wait_for(self._all_disconnected, timeout_seconds)

    def wait_for_exit(self, timeout_seconds: float) -> None:
        """Wait until the next exit of a rank, for at most `timeout_seconds`."""
        with self._state_changed:
            self._state_changed.wait(timeout_seconds)

    def _all_disconnected(self) -> bool:
        return not self._connections

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in _TEMPORARY_ERRORS:  # the listener is closed
                    return
                time.sleep(_RETRY_SECONDS)
                continue
            with self._state_changed:
                if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                    oldest = self._unauthenticated.pop(0)
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # ends its thread
                self._unauthenticated.append(connection)
            start_thread(self._serve, connection, name="unitrain rank connection")

    def _serve(self, accepted: socket.socket) -> None:
        """Authenticate a connection, and process its messages until it is closed."""
        with accepted:
            accepted.settimeout(_GREETING_TIMEOUT_SECONDS)
            try:
                authenticate(accepted, self._key, CONNECTION_PURPOSE, is_server=True)
            except (OSError, AuthenticationError):
                return
            finally:
                with self._state_changed, suppress(ValueError):
                    self._unauthenticated.remove(accepted)
            connection = PeerConnection(accepted)
            greeting = self._parse_greeting(connection.receive())
            if greeting is None:
                return
            rank, is_standby = greeting
            connection.set_timeout(None)
            connection.enable_keepalive(_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES)
            with self._state_changed:
                self._connections[rank] = connection
                if not is_standby:
                    self._set_running(rank, connection)
                if self._is_exiting:
                    connection.send(EXIT)
                else:
                    if is_standby and self._is_started:
                        connection.send(START)
                    if self.is_exit_requested and rank == 0:
                        connection.send(SAVE_AND_EXIT)
            message = ""
            while isinstance(received := connection.receive(), str):
                message = received
                with self._state_changed:
                    if message == READY:
                        self._ready.add(rank)
                    elif message == RESPONDING:
                        self._responding.add(rank)
                        self._state_changed.notify_all()
                    elif message == RUNNING:
                        self._set_running(rank, connection)
                    elif message == SHUT_DOWN:
                        self._running.discard(rank)
            with self._state_changed:
                if self._connections.get(rank) is connection:
                    self._record_disconnect(rank, received, message)

    def _set_running(self, rank: int, connection: PeerConnection) -> None:
        self._running.add(rank)
        if rank == 0 and self.describe_attempt is not None:
            for message in self.describe_attempt().to_messages():
                connection.send(message)

    def _parse_greeting(self, greeting: str | DisconnectReason) -> tuple[int, bool] | None:
        """Return the rank from a greeting and whether it is a standby rank; None if it is not a rank of this job."""
        try:
            content = json.loads(greeting) if isinstance(greeting, str) else None
            is_known = content["job"] == self._job_name  # type: ignore[index]
            return (int(content["rank"]), content.get("standby") is True) if is_known else None  # type: ignore[index,union-attr]
        except (ValueError, TypeError, KeyError):
            return None

    def _record_disconnect(self, rank: int, reason: DisconnectReason, final_message: str) -> None:
        del self._connections[rank]
        if reason is DisconnectReason.UNREACHABLE:
            self.unreachable_ranks.append(rank)
            # Later, the launcher kills the ranks on the other hosts.
            self._lost_host_first |= not self.crashed_ranks
        elif reason is DisconnectReason.ORDERLY:
            self.is_preempted |= final_message == PREEMPTED_MESSAGE
            self._first_exit_was_normal |= not self.crashed_ranks
        else:
            self.has_running_rank_crashed |= rank in self._running
            self.crashed_ranks.append(rank)
        self._state_changed.notify_all()


def _raise_descriptor_limit() -> None:
    """Raise the soft limit on open file descriptors to `_NUM_DESCRIPTORS`, or to the hard limit if that is lower."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _NUM_DESCRIPTORS if hard_limit == resource.RLIM_INFINITY else min(_NUM_DESCRIPTORS, hard_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))

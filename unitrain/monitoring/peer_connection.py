"""Connection between two processes of a job that distinguishes a normal exit of the peer from a crash.

When a process terminates for any reason, the operating system closes its connections. At a normal exit, the process
first sends a final message. The liveness check uses such connections between ranks, and the supervisor uses them to
monitor its ranks.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import socket
from contextlib import suppress
from enum import Enum
from weakref import WeakSet

from typing_extensions import Self

from unitrain.bootstrap.authentication import authenticate, job_key

# Final messages of a process: normal exit, or exit with a checkpoint after a preemption.
ORDERLY_EXIT_MESSAGE, PREEMPTED_MESSAGE = "orderly exit", "preempted"
_FINAL_MESSAGES = (ORDERLY_EXIT_MESSAGE, PREEMPTED_MESSAGE)
# Errors of a connection that the peer or this process has closed. All other errors are network errors.
_CLOSED_ERRORS = (errno.ECONNRESET, errno.EPIPE, errno.EBADF)
_MAX_MESSAGE_BYTES = 1000
_open_connections: WeakSet[PeerConnection] = WeakSet()


class DisconnectReason(Enum):
    """Reason why a connection was closed."""

    ORDERLY = "the peer sent a final message"
    UNEXPECTED = "the peer's process was killed or crashed"
    UNREACHABLE = "the peer's host does not respond"


class PeerConnection:
    """A connection that transfers lines of text. It takes ownership of an authenticated socket, which is blocking or
    has a timeout.

    At a normal exit, this process sends `final_message`. Forked processes, such as DataLoader workers, close their copy
    of the connection, so that it does not remain open after this process has terminated.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.final_message = ORDERLY_EXIT_MESSAGE
        self._socket = connection
        self._received = b""
        self._latest_message = ""
        _open_connections.add(self)
        _register_process_hooks()

    @classmethod
    def connect(cls, host: str, port: int, purpose: str, timeout_seconds: float) -> Self:
        """Connect to `port` of `host` and authenticate. Raises OSError or AuthenticationError."""
        connection = socket.create_connection((host, port), timeout=timeout_seconds)
        try:
            authenticate(connection, job_key(), purpose, is_server=False)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def fileno(self) -> int:
        """Return the file descriptor, for select and poll."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time for which `send` and `receive` may block; None removes the limit."""
        self._socket.settimeout(seconds)

    def enable_keepalive(self, idle_seconds: int, interval_seconds: int, probes: int) -> None:
        """Close the connection if the peer's host has not responded for `idle_seconds + interval_seconds * probes`.

        TCP keepalive detects this on an idle connection, and TCP_USER_TIMEOUT while sent data is not acknowledged.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
        timeout_milliseconds = 1000 * (idle_seconds + interval_seconds * probes)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_milliseconds)

    def send(self, message: str) -> None:
        """Send a line of text. Errors are ignored, because `receive` reports a closed connection."""
        with suppress(OSError):
            self._socket.sendall(f"{message}\n".encode())

    def receive(self) -> str | DisconnectReason:
        """Return the next message, or the reason why the connection was closed.

        A timeout counts as UNREACHABLE. A line of more than _MAX_MESSAGE_BYTES is handled as if the peer had closed the
        connection.
        """
        while b"\n" not in self._received:
            try:
                part = self._socket.recv(64)
            except OSError as error:
                return DisconnectReason.UNEXPECTED if error.errno in _CLOSED_ERRORS else DisconnectReason.UNREACHABLE
            if not part or len(self._received) > _MAX_MESSAGE_BYTES:
                return (
                    DisconnectReason.ORDERLY if self._latest_message in _FINAL_MESSAGES else DisconnectReason.UNEXPECTED
                )
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        self._latest_message = line.decode(errors="replace").strip()
        return self._latest_message

    def send_final_message(self) -> None:
        """Send `final_message`, which announces the exit of this process."""
        self.send(self.final_message)

    def close(self) -> None:
        """Close the connection without a final message."""
        _open_connections.discard(self)
        self._socket.close()

    def interrupt(self) -> None:
        """Unblock `receive` in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


@functools.cache
def _register_process_hooks() -> None:
    def send_final_messages() -> None:
        for connection in list(_open_connections):
            connection.send_final_message()

    def close_copies() -> None:
        for connection in list(_open_connections):
            connection.close()

    atexit.register(send_final_messages)
    os.register_at_fork(after_in_child=close_copies)

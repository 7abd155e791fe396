"""Authenticated TCP connections between the ranks of a job.

The rank that accepts connections publishes its port and a random token in the rendezvous store. Both peers prove that
they have the job's key, if there is one. The connecting rank also sends the token, which proves that it has access to
the store.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Generator

from unitrain.bootstrap.authentication import authenticate, handshake, job_key, receive_exactly
from unitrain.errors import AuthenticationError

_ACCEPTED = b"accepted\n"
_TOKEN_BYTES, _RANK_DIGITS = 16, 8
# Maximum number of unauthenticated connections in addition to the connections of the ranks; the oldest is closed first.
_MAX_EXTRA_PENDING = 64


def new_token() -> str:
    """Return a random token, as text."""
    return secrets.token_hex(_TOKEN_BYTES)


def connect_to_rank(
    host: str, port: int, token: str, own_rank: int, purpose: str, timeout_seconds: float
) -> socket.socket:
    """Return a connection to the rank that calls `accept_ranks` with the same `token` and `purpose`. Operations on the
    connection block for at most `timeout_seconds`.

    Raises OSError if an operation takes longer or the connection is not accepted, and AuthenticationError if the peer
    has a different key.
    """
    connection = socket.create_connection((host, port), timeout=timeout_seconds)
    try:
        authenticate(connection, job_key(), purpose, is_server=False)
        connection.sendall(f"{token} {own_rank:0{_RANK_DIGITS}d}\n".encode())
        if receive_exactly(connection, len(_ACCEPTED)) != _ACCEPTED:
            raise ConnectionError(f"the rank at {host}:{port} did not accept the connection")
    except BaseException:
        connection.close()
        raise
    return connection


def accept_ranks(
    server: socket.socket, token: str, ranks: Collection[int], purpose: str, timeout_seconds: float
) -> dict[int, socket.socket]:
    """Return a connection to each of `ranks`, except the ranks that have not connected within `timeout_seconds`.
    Operations on the connections also block for at most `timeout_seconds`.

    All connections are authenticated concurrently, so a program that connects without sending data does not delay the
    ranks.
    """
    deadline = time.monotonic() + timeout_seconds
    accepted: dict[int, socket.socket] = {}
    pending: dict[socket.socket, _PendingConnection] = {}
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def close_pending(connection: socket.socket) -> None:
            selector.unregister(connection)
            del pending[connection]
            connection.close()

        while len(accepted) < len(ranks) and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        connection, _ = server.accept()
                        if len(pending) >= len(ranks) + _MAX_EXTRA_PENDING:
                            close_pending(next(iter(pending)))
                        pending[connection] = _PendingConnection(connection, token, purpose)
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                if connection not in pending:  # closed while an earlier event was processed
                    continue
                try:
                    rank = pending[connection].advance()
                except (OSError, ValueError, AuthenticationError):
                    close_pending(connection)
                    continue
                if rank is not None and (rank not in ranks or rank in accepted):
                    close_pending(connection)
                elif rank is not None:
                    selector.unregister(connection)
                    del pending[connection]
                    connection.settimeout(timeout_seconds)
                    accepted[rank] = connection
        for connection in list(pending):
            close_pending(connection)
    return accepted


class _PendingConnection:
    """A connection that is not yet authenticated. Its methods never block."""

    def __init__(self, connection: socket.socket, token: str, purpose: str) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._received = b""
        self._steps = _authenticate_rank(token, purpose)
        to_send, self._num_expected_bytes = next(self._steps)
        connection.sendall(to_send)

    def advance(self) -> int | None:
        """Process the received data and send the response. Return the rank when the connection is authenticated, else
        None.

        Raises OSError, ValueError or AuthenticationError if the connection does not belong to a rank of this job.
        """
        try:
            part = self._connection.recv(self._num_expected_bytes - len(self._received))
        except BlockingIOError:  # select may report a socket without data as ready
            return None
        if not part:
            raise ConnectionError("the connection was closed")
        self._received += part
        if len(self._received) < self._num_expected_bytes:
            return None
        try:
            to_send, self._num_expected_bytes = self._steps.send(self._received)
            self._received = b""
            self._connection.sendall(to_send)
            if self._num_expected_bytes:
                return None
            next(self._steps)
        except StopIteration as finished:
            rank: int = finished.value
            return rank
        return None


def _authenticate_rank(token: str, purpose: str) -> Generator[tuple[bytes, int], bytes, int]:
    """Run the handshake and return the rank of the peer. See `authentication.Handshake` for the protocol.

    `token` proves that the peer has access to the store of this rendezvous, even in a job without a key.
    """
    unsent = b""
    steps = handshake(job_key(), purpose, is_server=True)
    with contextlib.suppress(StopIteration):
        to_send, num_bytes = next(steps)
        while num_bytes:
            to_send, num_bytes = steps.send((yield to_send, num_bytes))
        unsent = to_send
    greeting = yield unsent, len(token) + _RANK_DIGITS + 2
    received_token, rank = greeting.decode().split()
    if not secrets.compare_digest(received_token.encode(), token.encode()):
        raise AuthenticationError(f"The peer of a connection for {purpose} has not read the rendezvous store.")
    yield _ACCEPTED, 0
    return int(rank)

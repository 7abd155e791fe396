"""Liveness check: connections between rank 0 and every other rank, which detect killed processes.

If no launcher monitors the ranks, only this check detects killed processes.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator

import torch.distributed as dist

from unitrain.bootstrap.authentication import handshake, job_key
from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.network import listen
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import AuthenticationError
from unitrain.monitoring.peer_connection import ORDERLY_EXIT, PeerConnection

_CONNECT_TIMEOUT_SECONDS = 10.0
_POLL_MILLISECONDS = 500
_ROLE = "liveness check"
_ACCEPTED = "accepted"
_TOKEN_BYTES, _RANK_DIGITS = 16, 8
# Maximum number of unauthenticated connections in addition to those of the ranks; the oldest is closed first.
_MAX_EXTRA_PENDING = 64


class LivenessCheck:
    """This rank's connections for the liveness check. All ranks create it at the same time, then call `start`.

    Rank 0 has one connection to every other rank. `on_process_ended` is called once, in a thread, with the first rank
    whose process has terminated unexpectedly. A rank is not monitored if its connection could not be established.
    """

    def __init__(self, rendezvous: Rendezvous, on_process_ended: Callable[[int], None]) -> None:
        self._on_process_ended = on_process_ended
        self._peers: dict[int, PeerConnection] = {}
        self._is_closed = False
        self.exited_ranks: set[int] = set()  # ranks that exited normally
        store = MessageStore(dist.PrefixStore("liveness", rendezvous.store), "liveness")
        with contextlib.suppress(OSError, dist.DistError, AuthenticationError):
            if rendezvous.rank_info.rank == 0:
                self._peers = _accept_ranks(rendezvous, store)
            else:
                self._peers = _connect_to_rank_zero(rendezvous, store)

    def start(self) -> None:
        """Start the thread that reads from the connections. It does not depend on rank 0's store."""
        threading.Thread(target=self._run, name="unitrain liveness", daemon=True).start()

    def close(self) -> None:
        """Announce a normal exit and close the connections. A second call has no effect."""
        self._is_closed = True
        while self._peers:
            _, peer = self._peers.popitem()
            peer.send_final_message()
            peer.close()

    def _run(self) -> None:
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while ranks and not self._is_closed:
            for descriptor, _ in poll.poll(_POLL_MILLISECONDS):
                poll.unregister(descriptor)
                rank = ranks.pop(descriptor)
                peer = self._peers.get(rank)
                if peer is None:  # `close` was called
                    return
                if peer.receive() == ORDERLY_EXIT:
                    self.exited_ranks.add(rank)
                else:
                    if not self._is_closed:
                        self._on_process_ended(rank)
                    return


def _connect_to_rank_zero(rendezvous: Rendezvous, store: MessageStore) -> dict[int, PeerConnection]:
    address = store.get("address").decode().split()
    if not address:  # rank 0 could not listen
        return {}
    port, token = address
    peer = PeerConnection.connect(rendezvous.host, int(port), _ROLE, _CONNECT_TIMEOUT_SECONDS)
    peer.send(f"{token} {rendezvous.rank_info.rank:0{_RANK_DIGITS}d}")
    if peer.receive() == _ACCEPTED:
        return {0: peer}
    peer.close()
    return {}


def _accept_ranks(rendezvous: Rendezvous, store: MessageStore) -> dict[int, PeerConnection]:
    """Accept the connections of all other ranks, for at most `_CONNECT_TIMEOUT_SECONDS` in total.

    All connections are authenticated concurrently, so a program that connects without sending data does not delay the
    ranks.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    num_peers = rendezvous.rank_info.size - 1
    deadline = time.monotonic() + _CONNECT_TIMEOUT_SECONDS
    peers: dict[int, PeerConnection] = {}
    pending: dict[socket.socket, _PendingConnection] = {}
    try:
        server = listen(rendezvous.host, 0)
    except OSError:
        store.set("address", "")  # otherwise the other ranks would wait for it until the timeout of the store
        raise
    with server, selectors.DefaultSelector() as selector:
        store.set("address", f"{server.getsockname()[1]} {token}")
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)

        def close_pending(connection: socket.socket) -> None:
            selector.unregister(connection)
            del pending[connection]
            connection.close()

        while len(peers) < num_peers and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        connection, _ = server.accept()
                        if len(pending) >= num_peers + _MAX_EXTRA_PENDING:
                            close_pending(next(iter(pending)))
                        pending[connection] = _PendingConnection(connection, token)
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                if connection not in pending:  # closed in this round
                    continue
                try:
                    rank = pending[connection].advance()
                except (OSError, ValueError, AuthenticationError):
                    close_pending(connection)
                    continue
                if rank is not None:
                    selector.unregister(connection)
                    del pending[connection]
                    connection.settimeout(_CONNECT_TIMEOUT_SECONDS)
                    peers[rank] = PeerConnection(connection)
        for connection in list(pending):
            close_pending(connection)
    return peers


class _PendingConnection:
    """A connection that is not yet authenticated. It never blocks."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._received = b""
        self._steps = _authenticate_rank(token)
        to_send, self._num_missing = next(self._steps)
        connection.sendall(to_send)

    def advance(self) -> int | None:
        """Process the received data and send the response. Return the rank when the connection is authenticated, else
        None.

        Raises OSError, ValueError or AuthenticationError if the connection does not belong to a rank of this job.
        """
        try:
            part = self._connection.recv(self._num_missing - len(self._received))
        except BlockingIOError:  # select may report a socket without data as ready
            return None
        if not part:
            raise ConnectionError("the connection was closed")
        self._received += part
        if len(self._received) < self._num_missing:
            return None
        try:
            to_send, self._num_missing = self._steps.send(self._received)
            self._received = b""
            self._connection.sendall(to_send)
            if self._num_missing:
                return None
            next(self._steps)
        except StopIteration as finished:
            rank: int = finished.value
            return rank
        return None


def _authenticate_rank(token: str) -> Generator[tuple[bytes, int], bytes, int]:
    """Run the handshake and return the rank of the peer. See `authentication.Handshake` for the protocol.

    `token` proves that the peer has access to the store of this rendezvous, even in a job without a key.
    """
    unsent = b""
    steps = handshake(job_key(), _ROLE, is_server=True)
    with contextlib.suppress(StopIteration):
        to_send, num_bytes = next(steps)
        while num_bytes:
            to_send, num_bytes = steps.send((yield to_send, num_bytes))
        unsent = to_send
    greeting = yield unsent, len(token) + _RANK_DIGITS + 2
    received_token, rank = greeting.decode().split()
    if not secrets.compare_digest(received_token.encode(), token.encode()):
        raise AuthenticationError("The peer of a connection for the liveness check has not read the rendezvous store.")
    yield f"{_ACCEPTED}\n".encode(), 0
    return int(rank)

"""Message exchange over direct TCP connections between a few ranks, for consistency checks and tensors up to 12 MiB.

Gloo transfers each message in a separate thread, and Horovod negotiates each operation in a background thread. If such
a thread and the waiting thread share a core, waking them takes 0.2 to 1 ms. In this module, the waiting thread itself
sends its message and polls for the messages of the other ranks, which takes less than 0.1 ms.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from weakref import WeakSet

from typing_extensions import Self

from unitrain.bootstrap import environment
from unitrain.bootstrap.network import interfaces, limit_wait
from unitrain.bootstrap.rank_connections import accept_ranks, connect_to_rank, new_token
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import AuthenticationError

# The number of ranks is limited, because every rank sends its message to every other rank.
MAX_RANKS = 8
_CONNECT_TIMEOUT_SECONDS = 10.0
_CONNECTION_PURPOSE = "message exchange"
# Time before the first yield, which may give the core to another process for milliseconds. A message usually arrives
# within this time.
_POLL_SECONDS_BEFORE_YIELD = 0.0001


class MessageExchange:
    """This rank's connections to all other ranks. After an error, they can no longer be used."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        timeout_seconds: float,
        max_polling_seconds: float,
    ) -> None:
        """Take ownership of `connections`, which contains a connected socket for every other rank. A wait polls for
        `max_polling_seconds` before it sleeps."""
        self._rank, self._connections, self._timeout_seconds = rank, dict(connections), timeout_seconds
        self._size = len(connections) + 1
        self._max_polling_seconds = max_polling_seconds
        self._is_usable = True
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _exchanges_closed_in_forked_processes().add(self)

    @classmethod
    def connect(cls, rendezvous: Rendezvous, *, is_wanted: bool, max_polling_seconds: float) -> Self | None:
        """Return the connected exchange. Return None on every rank if there is only one rank, if there are more than
        MAX_RANKS ranks, if a rank passes `is_wanted=False`, or if two ranks cannot connect. All ranks must call this
        method.

        Each rank listens on the network interface that Gloo uses, and only during this call. A wait polls for
        `max_polling_seconds` before it sleeps.
        """
        rank, size = rendezvous.rank_info.rank, rendezvous.rank_info.size
        if not 1 < size <= MAX_RANKS:
            return None
        address, token = _gloo_address(rendezvous), new_token()
        connections: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as stack:
            server: socket.socket | None = None
            if is_wanted and address is not None:
                with contextlib.suppress(OSError):
                    server = stack.enter_context(socket.create_server((address, 0), backlog=size))
            peers = rendezvous.allgather("message exchange/peers", server and [*server.getsockname(), token])
            if server is None or not all(peers):
                return None
            with contextlib.suppress(OSError, AuthenticationError):
                for peer, (host, port, peer_token) in enumerate(peers[:rank]):
                    connections[peer] = connect_to_rank(
                        host, port, peer_token, rank, _CONNECTION_PURPOSE, _CONNECT_TIMEOUT_SECONDS
                    )
                connections |= accept_ranks(
                    server, token, range(rank + 1, size), _CONNECTION_PURPOSE, _CONNECT_TIMEOUT_SECONDS
                )
        exchange = cls(rank, connections, rendezvous.timeout.total_seconds(), max_polling_seconds)
        if all(rendezvous.allgather("message exchange/connected", len(connections) == size - 1)):
            return exchange
        exchange.close()
        return None

    def allgather(self, message: bytes | bytearray) -> bytearray:
        """Return the messages of all ranks, joined in rank order. All ranks must call this method with non-empty
        messages of the same length.

        Raises RuntimeError if another rank closes its connection or the timeout expires, with a message that starts
        like Gloo's. Also raises RuntimeError if an earlier call failed.
        """
        messages, length = bytearray(self._size * len(message)), len(message)
        parts = [memoryview(messages)[start : start + length] for start in range(0, len(messages), length)]
        parts[self._rank][:] = message
        self.exchange([memoryview(message)] * self._size, parts)
        return messages

    def exchange(self, send_buffers: Sequence[memoryview], receive_buffers: Sequence[memoryview]) -> None:
        """Send the bytes `send_buffers[r]` to every other rank r, and write the bytes from rank r to
        `receive_buffers[r]`. All ranks must call this method.

        `receive_buffers[r]` must have the length of rank r's send buffer for this rank; lengths may be 0. The buffers
        for this rank itself are not used. Raises the same errors as `allgather`.
        """
        if not self._is_usable:
            raise RuntimeError("The ranks cannot exchange messages, because an earlier collective failed on this rank.")
        # After an exception, including KeyboardInterrupt, another call would read the rest of the interrupted message.
        # The connections stay open, so that ranks whose timeout expires slightly later also report a timeout.
        self._is_usable = False
        self._communicate(send_buffers, receive_buffers)
        self._is_usable = True

    def close(self) -> None:
        """Close all connections. A second call has no effect."""
        self._is_usable = False
        while self._connections:
            self._connections.popitem()[1].close()

    def _communicate(self, send_buffers: Sequence[memoryview], receive_buffers: Sequence[memoryview]) -> None:
        poll, transfers = select.poll(), {}
        for peer, connection in self._connections.items():
            transfer = _Transfer(peer, connection, send_buffers[peer], receive_buffers[peer])
            transfer.advance(transfer.events & select.POLLOUT)
            if transfer.events:
                transfers[connection.fileno()] = transfer
                poll.register(connection, transfer.events)
        start_time = time.monotonic()
        while transfers:
            waited = time.monotonic() - start_time
            if waited > self._timeout_seconds:
                raise RuntimeError(f"Timed out waiting {self._timeout_seconds:g} s for the message of another rank.")
            milliseconds_left = limit_wait(self._timeout_seconds - waited) * 1000 + 1
            ready = poll.poll(0 if waited < self._max_polling_seconds else milliseconds_left)
            for descriptor, events in ready:
                transfer = transfers[descriptor]
                transfer.advance(events)
                if transfer.events:
                    poll.modify(descriptor, transfer.events)
                else:
                    poll.unregister(descriptor)
                    del transfers[descriptor]
            if not ready and _POLL_SECONDS_BEFORE_YIELD < waited < self._max_polling_seconds:
                os.sched_yield()


class _Transfer:
    """Exchange with one rank: the bytes that are still to be sent, and the buffer for the bytes that are still to be
    received."""

    __slots__ = ("_connection", "_missing_bytes", "_peer", "_unsent_bytes")

    def __init__(self, peer: int, connection: socket.socket, unsent: memoryview, missing: memoryview) -> None:
        self._peer, self._connection, self._unsent_bytes, self._missing_bytes = peer, connection, unsent, missing

    @property
    def events(self) -> int:
        """The events to poll for, or 0 if the exchange is complete."""
        return (select.POLLOUT if self._unsent_bytes else 0) | (select.POLLIN if self._missing_bytes else 0)

    def advance(self, events: int) -> None:
        """Make one non-blocking call to send, one to receive, or both, depending on `events`. Raises RuntimeError if
        the connection is closed."""
        with contextlib.suppress(BlockingIOError):
            try:
                if events & select.POLLOUT:
                    self._unsent_bytes = self._unsent_bytes[self._connection.send(self._unsent_bytes) :]
                if events & ~select.POLLOUT:  # receiving also raises the error of a connection that has failed
                    received = self._connection.recv_into(self._missing_bytes)
                    if not received:
                        raise ConnectionError("Connection closed by peer")
                    self._missing_bytes = self._missing_bytes[received:]
            except BlockingIOError:
                raise
            except OSError as error:
                reason = error.strerror or str(error)
                raise RuntimeError(f"{reason}: the exchange with rank {self._peer} failed.") from error


def _gloo_address(rendezvous: Rendezvous) -> str | None:
    """Return the address of this host that Gloo uses, or None if it is unknown. All ranks must call this function."""
    name = (environment.get_variable("GLOO_SOCKET_IFNAME") or "").split(",")[0]
    return interfaces().get(name, rendezvous.own_address)


@functools.cache
def _exchanges_closed_in_forked_processes() -> WeakSet[MessageExchange]:
    """Return the set of exchanges whose connections are closed in processes that are forked from this process.

    Otherwise, the forked processes would keep the connections open after this process was killed.
    """
    exchanges: WeakSet[MessageExchange] = WeakSet()

    def close_copies() -> None:
        for exchange in list(exchanges):
            exchange.close()

    os.register_at_fork(after_in_child=close_copies)
    return exchanges

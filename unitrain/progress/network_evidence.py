"""Counters of this process's TCP connections to other hosts, read from the kernel (TCP_INFO of Linux)."""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import socket
import struct
import time
from typing import NamedTuple

# Maximum number of connections per reading. Reading a connection takes about 3 µs.
_MAX_CONNECTIONS = 32
# Interval between two searches for new connections. It doubles up to the maximum, because most connections are made at
# the start of a run.
_MIN_SEARCH_INTERVAL_SECONDS, _MAX_SEARCH_INTERVAL_SECONDS = 1.0, 32.0
_TCP_INFO_BYTES, _ADDRESS_BYTES = 192, 128
# Offsets in `struct tcp_info`: smoothed round-trip time in microseconds, number of retransmissions, acknowledged bytes.
# At _BUSY_OFFSET, three durations in microseconds follow: the time during which data was unacknowledged, and the parts
# of it that were limited by the peer's receive window and by the send buffer.
_RTT_OFFSET, _RETRANSMISSIONS_OFFSET, _ACKNOWLEDGED_OFFSET, _BUSY_OFFSET = 68, 100, 120, 168


class ConnectionCounters(NamedTuple):
    """Counters of a connection, or their change between two readings.

    `peer` is the IP address of the other host. `network_limited_seconds` is the time in which data was unacknowledged,
    and neither the receive window of the peer nor the send buffer limited the transfer. `sent_bytes` counts
    acknowledged bytes.
    """

    peer: str
    network_limited_seconds: float
    sent_bytes: int
    retransmissions: int
    rtt_seconds: float

    def since(self, before: ConnectionCounters) -> ConnectionCounters:
        """Return the change of the counters since an earlier reading, with the current round-trip time."""
        return self._replace(
            network_limited_seconds=self.network_limited_seconds - before.network_limited_seconds,
            sent_bytes=self.sent_bytes - before.sent_bytes,
            retransmissions=self.retransmissions - before.retransmissions,
        )

    def __str__(self) -> str:
        rate = self.sent_bytes / 1e6 / max(self.network_limited_seconds, 1e-9)
        retransmitted = f", {self.retransmissions} retransmissions" if self.retransmissions else ""
        return (
            f"to {self.peer}: {rate:,.3g} MB/s while sending, round trip {1e3 * self.rtt_seconds:.2g} ms{retransmitted}"
        )


class ConnectionReader:
    """Reads the connections with the most sent data. Connections within the host are ignored."""

    def __init__(self) -> None:
        self._connections: dict[int, ConnectionCounters] = {}
        self._next_search_time, self._search_interval_seconds = 0.0, _MIN_SEARCH_INTERVAL_SECONDS

    def read(self) -> ConnectionCounters | None:
        """Return the change of the counters since the last call, for the connection that the network limited for the
        longest time; None if there are no connections.
        """
        if time.monotonic() >= self._next_search_time:
            self._find_connections()
        earlier_counters, self._connections = self._connections, {}
        changes = []
        for descriptor, earlier in earlier_counters.items():
            counters = read_connection(descriptor, earlier.peer)
            # A different connection may use the file descriptor of a closed one.
            if counters is None or counters.sent_bytes < earlier.sent_bytes:
                self._next_search_time = 0.0
                continue
            self._connections[descriptor] = counters
            changes.append(counters.since(earlier))
        return max(changes, key=lambda change: change.network_limited_seconds, default=None)

    def _find_connections(self) -> None:
        self._next_search_time = time.monotonic() + self._search_interval_seconds
        self._search_interval_seconds = min(2 * self._search_interval_seconds, _MAX_SEARCH_INTERVAL_SECONDS)
        try:
            descriptors = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
        except OSError:
            descriptors = []
        counters = {
            descriptor: connection
            for descriptor in descriptors
            if (connection := read_connection(descriptor)) is not None
        }
        largest = sorted(counters, key=lambda descriptor: -counters[descriptor].sent_bytes)[:_MAX_CONNECTIONS]
        self._connections = {
            descriptor: self._connections.get(descriptor, counters[descriptor]) for descriptor in largest
        }


def read_connection(descriptor: int, peer: str | None = None) -> ConnectionCounters | None:
    """Return the counters of the TCP connection that `descriptor` refers to, or None if it is not a TCP connection to
    another host, or the kernel does not provide the counters.

    `peer` is the address of the other host if it is known. The functions of libc are called directly, because a socket
    object would apply `socket.setdefaulttimeout` to the connection.
    """
    info, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint(_TCP_INFO_BYTES)
    if _libc().getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)):
        return None
    if size.value < _TCP_INFO_BYTES:  # Linux before 4.10
        return None
    if peer is None and (peer := _find_remote_peer(descriptor)) is None:
        return None
    (rtt,) = struct.unpack_from("=I", info, _RTT_OFFSET)
    (retransmissions,) = struct.unpack_from("=I", info, _RETRANSMISSIONS_OFFSET)
    (acknowledged,) = struct.unpack_from("=Q", info, _ACKNOWLEDGED_OFFSET)
    busy, receiver_limited, buffer_limited = struct.unpack_from("=QQQ", info, _BUSY_OFFSET)
    network_limited_seconds = (busy - receiver_limited - buffer_limited) / 1e6
    return ConnectionCounters(peer, network_limited_seconds, acknowledged, retransmissions, rtt / 1e6)


def _find_remote_peer(descriptor: int) -> str | None:
    """Return the address of the other host, or None if there is no peer, or it is on this host."""
    peer, local = (_read_address(descriptor, function) for function in ("getpeername", "getsockname"))
    return None if peer is None or peer == local or ipaddress.ip_address(peer).is_loopback else peer


def _read_address(descriptor: int, function: str) -> str | None:
    """Return the IP address that libc's `getpeername` or `getsockname` returns, or None if there is none."""
    address, size = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint(_ADDRESS_BYTES)
    if getattr(_libc(), function)(descriptor, address, ctypes.byref(size)):
        return None
    (family,) = struct.unpack_from("=H", address)
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(address.raw[4:8]))
    if family == socket.AF_INET6:
        ipv6_address = ipaddress.IPv6Address(address.raw[8:24])
        return str(ipv6_address.ipv4_mapped or ipv6_address)
    return None


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)

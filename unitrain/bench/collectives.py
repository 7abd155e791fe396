"""What a rank runs in its turn: one collective of one size, a few times; and the floors it is held against."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unitrain.backends.base import Backend, Communicator
from unitrain.bootstrap.network import own_addresses

FLOORS = ("memory copy", "tcp stream")
_ELEMENT = 4  # bytes of a float32
_SOCKET_SECONDS = 30.0
_CONNECT_SECONDS = 2.0
_CHUNK = 1 << 20
_TOKEN_BYTES = 16


class Turn(NamedTuple):
    """Seconds per call on this rank, and how long the whole turn took; None where it could not be measured."""

    seconds: float | None
    whole: float


def actual_bytes(size: int, ranks: int) -> int:
    """Return `size` bytes rounded up to whole float32 elements that divide among the ranks."""
    unit = _ELEMENT * ranks
    return -(-size // unit) * unit


def take_turn(backend: Backend, operation: str, size: int, calls: int) -> Turn:
    """Call one of `bandwidth.OPERATIONS` on `size` bytes in all, or one of FLOORS, `calls` times and once to warm up.

    All ranks call it. The seconds of a call include all that a user of the backend waits for: the agreement of the
    ranks on the call, and the copy that leaves the input untouched.
    """
    began = time.perf_counter()
    if operation == "tcp stream":
        seconds = _stream(backend, size, calls)
    else:
        call = _memory_copy(backend, size) if operation == "memory copy" else _collective(backend, operation, size)
        call()
        seconds = _time(backend, call, calls)
    return Turn(seconds, time.perf_counter() - began)


def _time(backend: Backend, call: Callable[[], object], calls: int) -> float:
    wait = torch.cuda.synchronize if backend.device.type == "cuda" else _nothing
    backend.barrier()
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - started) / calls


def _nothing() -> None:
    """The CPU has done what it was asked to."""


def _collective(backend: Communicator, operation: str, size: int) -> Callable[[], Tensor]:
    elements = actual_bytes(size, backend.size) // _ELEMENT
    if operation == "allgather":
        elements //= backend.size
    tensor = torch.ones(elements, device=backend.device)
    if operation == "allreduce":
        return lambda: backend.allreduce(tensor, "sum")
    if operation == "reducescatter":
        return lambda: backend.reducescatter(tensor, "sum")
    return lambda: getattr(backend, operation)(tensor)


def _memory_copy(backend: Communicator, size: int) -> Callable[[], Tensor]:
    source = torch.ones(actual_bytes(size, backend.size) // _ELEMENT, device=backend.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _stream(backend: Backend, size: int, calls: int) -> float | None:
    """Send `size` bytes through a plain TCP connection, from a rank that is as far from rank 0 as there is."""
    nodes = backend.allgather_object(backend.node_rank)
    sender = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), 1)
    seconds: float | None = None
    with socket.socket() as listener:
        offer = None
        if backend.rank == 0:
            listener.bind(("", 0))
            listener.listen(1)
            listener.settimeout(_SOCKET_SECONDS)
            token = secrets.token_bytes(_TOKEN_BYTES)
            offer = (own_addresses(), listener.getsockname()[1], token)
        addresses, port, token = backend.broadcast_object(offer)
        try:
            if backend.rank == sender:
                seconds = _send(addresses, port, token, size, calls)
            elif backend.rank == 0:
                _receive(listener, token, size, calls)
        except OSError:  # a firewall between them, or nothing that leads there: there is no such floor
            seconds = None
    told: float | None = backend.broadcast_object(seconds, root=sender)
    return told


def _send(addresses: list[str], port: int, token: bytes, size: int, calls: int) -> float:
    """Return the seconds that `size` bytes take until the receiver says that it has them."""
    payload = memoryview(bytearray(size))
    with _connected(addresses, port) as connection:
        connection.sendall(token)
        for number in range(calls + 1):
            if number == 1:  # the first one warms up
                started = time.perf_counter()
            connection.sendall(payload)
            if not connection.recv(1):
                raise ConnectionError("the receiver is gone")
        return (time.perf_counter() - started) / calls


def _connected(addresses: list[str], port: int) -> socket.socket:
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        except OSError:
            continue
        connection.settimeout(_SOCKET_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    raise ConnectionError(f"none of {addresses} answers")


def _receive(listener: socket.socket, token: bytes, size: int, calls: int) -> None:
    connection, _ = listener.accept()
    buffer = bytearray(_CHUNK)
    with connection:
        connection.settimeout(_SOCKET_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL) != token:
            raise ConnectionError("somebody else has connected")
        for _ in range(calls + 1):
            left = size
            while left:
                count = connection.recv_into(buffer, min(left, _CHUNK))
                if not count:
                    raise ConnectionError("the sender is gone")
                left -= count
            connection.sendall(b"1")

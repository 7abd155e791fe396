"""Time collectives on the ranks, and lower bounds for comparison: a memory copy and a TCP stream."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unitrain.backends.base import Backend, Communicator
from unitrain.bootstrap.network import own_addresses

LOWER_BOUNDS = ("memory copy", "tcp stream")
CHECK = "consistency check"  # a barrier, which consists of the check of a collective
CHECK_BYTES = 0  # a barrier transfers no tensor
_MIN_CHECK_CALLS = 10  # the ranks start up to one latency apart, which matters for short operations
# Tensors for which the first operations of a backend are not measured. Larger tensors take so long that the difference
# is small.
_MAX_WARM_UP_BYTES = 4 << 20
_measured_cases: WeakKeyDictionary[Backend, set[tuple[str, int]]] = WeakKeyDictionary()
_ELEMENT_BYTES = 4  # float32
_SOCKET_TIMEOUT_SECONDS = 30.0
_CONNECT_TIMEOUT_SECONDS = 2.0
_CHUNK_BYTES = 1 << 20
_TOKEN_BYTES = 16


class TurnResult(NamedTuple):
    """The result of a turn, in which one set of ranks is active: the seconds per call on this rank (None if the
    measurement failed), and the duration of the turn.
    """

    seconds: float | None
    turn_seconds: float


def round_up_bytes(size: int, ranks: int) -> int:
    """Round `size`, in bytes, up to a multiple of one float32 element per rank."""
    unit = _ELEMENT_BYTES * ranks
    return -(-size // unit) * unit


def take_turn(backend: Backend, operation: str, size: int, calls: int) -> TurnResult:
    """Time `calls` calls of one of `results.OPERATIONS`, LOWER_BOUNDS or CHECK on a tensor of `size` bytes, after a
    warm-up call or, in the first turn of a `backend`, its `num_slow_operations`.

    All ranks must call this function. Except for the TCP stream, `size` is rounded up with `round_up_bytes`. It is the
    output size of an allgather, and the input size of the other collectives. The public method is timed, including the
    consistency check and the copy of the input.
    """
    start_time = time.perf_counter()
    if operation == "tcp stream":
        seconds = _time_tcp_stream(backend, size, calls)
    else:
        call = (
            _make_memory_copy(backend, size)
            if operation == "memory copy"
            else _make_collective(backend, operation, size)
        )
        for _ in range(_count_warm_ups(backend, operation, size)):
            call()
        seconds = _time_calls(backend, call, max(calls, _MIN_CHECK_CALLS) if operation == CHECK else calls)
    return TurnResult(seconds, time.perf_counter() - start_time)


def _count_warm_ups(backend: Backend, operation: str, size: int) -> int:
    measured = _measured_cases.setdefault(backend, set())
    is_first = (operation, size) not in measured
    measured.add((operation, size))
    return max(1, backend.num_slow_operations) if is_first and size <= _MAX_WARM_UP_BYTES else 1


def _time_calls(backend: Backend, call: Callable[[], object], calls: int) -> float:
    is_cuda = backend.device.type == "cuda"
    backend.barrier()
    if is_cuda:
        torch.cuda.synchronize()
    start_time = time.perf_counter()
    for _ in range(calls):
        call()
    if is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start_time) / calls


def _make_collective(backend: Communicator, operation: str, size: int) -> Callable[[], object]:
    if operation == CHECK:
        return backend.barrier
    elements = round_up_bytes(size, backend.size) // _ELEMENT_BYTES
    if operation == "allgather":
        elements //= backend.size
    tensor = torch.ones(elements, device=backend.device)
    if operation == "allreduce":
        return lambda: backend.allreduce(tensor, "sum")
    if operation == "reducescatter":
        return lambda: backend.reducescatter(tensor, "sum")
    return lambda: getattr(backend, operation)(tensor)


def _make_memory_copy(backend: Communicator, size: int) -> Callable[[], Tensor]:
    source = torch.ones(round_up_bytes(size, backend.size) // _ELEMENT_BYTES, device=backend.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _time_tcp_stream(backend: Backend, size: int, calls: int) -> float | None:
    """Time a plain TCP stream to rank 0, from a rank on another host if there is one.

    All ranks must call this function. Return, on every rank, the sender's mean seconds per call, or None if the
    connection fails.
    """
    nodes = backend.allgather_object(backend.node_rank)
    is_one_host = len(set(nodes)) == 1
    sender = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), 1)
    seconds: float | None = None
    with socket.socket() as listener:
        endpoint = None
        if backend.rank == 0:
            listener.bind(("127.0.0.1" if is_one_host else "", 0))
            listener.listen(1)
            listener.settimeout(_SOCKET_TIMEOUT_SECONDS)
            token = secrets.token_bytes(_TOKEN_BYTES)
            endpoint = (["127.0.0.1"] if is_one_host else own_addresses(), listener.getsockname()[1], token)
        addresses, port, token = backend.broadcast_object(endpoint)
        try:
            if backend.rank == sender:
                seconds = _send(addresses, port, token, size, calls)
            elif backend.rank == 0:
                _receive(listener, token, size, calls)
        except OSError:  # for example, a firewall blocks the connection; this lower bound is then not available
            seconds = None
    result: float | None = backend.broadcast_object(seconds, root=sender)
    return result


def _send(addresses: list[str], port: int, token: bytes, size: int, calls: int) -> float:
    """Return the mean seconds to send `size` bytes and receive the acknowledgement."""
    payload = memoryview(bytearray(size))
    with _connect(addresses, port) as connection:
        connection.sendall(token)
        for call_index in range(calls + 1):
            if call_index == 1:  # the first call is a warm-up
                start_time = time.perf_counter()
            connection.sendall(payload)
            if not connection.recv(1):
                raise ConnectionError("the receiver closed the connection")
        return (time.perf_counter() - start_time) / calls


def _connect(addresses: list[str], port: int) -> socket.socket:
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_SECONDS)
        except OSError:
            continue
        connection.settimeout(_SOCKET_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    raise ConnectionError(f"none of {addresses} accepts connections")


def _receive(listener: socket.socket, token: bytes, size: int, calls: int) -> None:
    connection, _ = listener.accept()
    buffer = bytearray(_CHUNK_BYTES)
    with connection:
        connection.settimeout(_SOCKET_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL) != token:
            raise ConnectionError("another program connected")
        for _ in range(calls + 1):
            remaining = size
            while remaining:
                count = connection.recv_into(buffer, min(remaining, _CHUNK_BYTES))
                if not count:
                    raise ConnectionError("the sender closed the connection")
                remaining -= count
            connection.sendall(b"1")

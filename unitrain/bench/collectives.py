"""Time collectives on the ranks, and lower bounds for comparison: a memory copy and a TCP stream.

The public collectives include a consistency check, and small allgathers on CPUs use separate TCP connections. Gradients
are reduced without either, by the collectives of the process group, so these are also timed.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPointToPoint
from unitrain.bootstrap.network import own_addresses
from unitrain.monitoring.flight_recorder import GradientPhase

LOWER_BOUNDS = ("memory copy", "tcp stream")
GRADIENT_ALLREDUCE, GRADIENT_ALLGATHER = "gradient allreduce", "gradient allgather"
GRADIENT_COLLECTIVES = {GRADIENT_ALLREDUCE: "allreduce", GRADIENT_ALLGATHER: "allgather"}
# The allgathers of gradients separate the overhead per operation from the latency (`cost_model.py`), for which small
# tensors suffice.
MAX_GRADIENT_ALLGATHER_BYTES = 64 << 10
# Ranks start up to one latency apart, which matters for a few operations on small tensors.
_MIN_SMALL_GRADIENT_CALLS = 4
# Tensors for which the first operations of a backend are not measured. Larger tensors take so long that the difference
# is small.
_MAX_WARM_UP_BYTES = 4 << 20
_phase_numbers = count()
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
    """Time `calls` calls of one of `results.OPERATIONS`, LOWER_BOUNDS or GRADIENT_COLLECTIVES on a tensor of `size`
    bytes, after a warm-up call or, in the first turn of a `backend`, its `num_slow_operations`.

    All ranks must call this function. Except for the TCP stream, `size` is rounded up with `round_up_bytes`. It is the
    output size of an allgather, and the input size of the other collectives. For one of `results.OPERATIONS`, the
    public method is timed, including the consistency check and the copy of the input. GRADIENT_COLLECTIVES are not
    timed on backends without SupportsPointToPoint.
    """
    start_time = time.perf_counter()
    if operation == "tcp stream":
        seconds = _time_tcp_stream(backend, size, calls)
    elif operation in GRADIENT_COLLECTIVES and not isinstance(backend, SupportsPointToPoint):
        seconds = None
    else:
        call = (
            _make_memory_copy(backend, size)
            if operation == "memory copy"
            else _make_collective(backend, operation, size)
        )
        for _ in range(_count_warm_ups(backend, operation, size)):
            call()
        if operation in GRADIENT_COLLECTIVES and size <= MAX_GRADIENT_ALLGATHER_BYTES:
            calls = max(calls, _MIN_SMALL_GRADIENT_CALLS)
        seconds = _time_calls(backend, call, calls)
    return TurnResult(seconds, time.perf_counter() - start_time)


def _count_warm_ups(backend: Backend, operation: str, size: int) -> int:
    # Of large tensors, the public allreduce executes the same operation of the library as the allreduce of gradients.
    is_same_operation = operation == GRADIENT_ALLREDUCE and size > MAX_GRADIENT_ALLGATHER_BYTES
    case = ("allreduce" if is_same_operation else operation, size)
    measured = _measured_cases.setdefault(backend, set())
    is_first = case not in measured
    measured.add(case)
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


def _make_collective(backend: Backend, operation: str, size: int) -> Callable[[], object]:
    elements = round_up_bytes(size, backend.size) // _ELEMENT_BYTES
    if operation in (GRADIENT_ALLGATHER, "allgather"):
        elements //= backend.size
    tensor = torch.ones(elements, device=backend.device)
    if operation in GRADIENT_COLLECTIVES:
        return _make_gradient_collective(backend, operation, tensor)
    if operation == "allreduce":
        return lambda: backend.allreduce(tensor, "sum")
    if operation == "reducescatter":
        return lambda: backend.reducescatter(tensor, "sum")
    return lambda: getattr(backend, operation)(tensor)


def _make_gradient_collective(backend: Backend, operation: str, tensor: Tensor) -> Callable[[], object]:
    assert isinstance(backend, SupportsPointToPoint)
    group = backend.default_group()

    def call() -> Tensor:
        phase = GradientPhase("benchmark", next(_phase_numbers))
        group.monitor.record(phase)
        if operation == GRADIENT_ALLREDUCE:
            return group.start_mean(tensor, phase)()
        return group.start_allgather(tensor.unsqueeze(0), phase)()

    return call


def _make_memory_copy(backend: Backend, size: int) -> Callable[[], Tensor]:
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

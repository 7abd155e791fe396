"""Consistency check before every collective: the ranks exchange a fingerprint of its arguments, O(1) bytes per rank.

With at most `MAX_GATHERING_RANKS` ranks, the exchange is an allgather of one short row per rank. Groups of at most
`message_exchange.MAX_RANKS` ranks on CPUs send the rows over direct connections; other groups use the transport's
allgather. The rows also contain small CPU tensors, which are reduced in rank order, so the results are bit-identical on
every transport. With more ranks, the exchange is a sum of a short vector: the fingerprints of all ranks are equal if
and only if their variance is zero. The vector also contains small floating-point tensors, which are thereby summed. The
ranks exchange all arguments only if the fingerprints differ or arguments are invalid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.base import Backend
from unitrain.backends.message_exchange import MessageExchange
from unitrain.backends.objects import pack, unpack
from unitrain.errors import CollectiveMismatchError, ConfigError, TensorError, UnitrainError
from unitrain.monitoring.flight_recorder import CollectiveCall, describe_mismatch
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import all_gather_single

MAX_GATHERING_RANKS = 64
# Header of a row: fingerprint, count, and the size in bytes of the tensor in the row, or -1 without a tensor.
_ROW_HEADER = struct.Struct("=qqq")
# Maximum number of elements that are summed together with the fingerprints. With the header, they fit into one packet.
_MAX_SUMMED_ELEMENTS = 128
# An integer is summed as four parts of 16 bits, so sums and sums of squares are exact in float64 for up to 2**21 ranks.
_NUM_PARTS, _PART_BITS = 4, 16
_SUM_HEADER_ELEMENTS = 4 * _NUM_PARTS + 1
_TAG = 0x756E69  # tag of point-to-point messages, unlikely to be used by user code


class ExchangeResult(NamedTuple):
    """Result of the exchange.

    `counts_by_rank` contains every rank's `CollectiveCall.count`. With more than MAX_GATHERING_RANKS ranks, it is empty
    except for allgather and allgather_object. `root_count` is the count of the root of a broadcast_object, and
    undefined for other operations. If all ranks passed a small CPU tensor and a `dtype`, `contents` contains the bytes
    of the tensors, uint8 [ranks, bytes], padded with zeros. With more than MAX_GATHERING_RANKS ranks, `total` instead
    contains the sum of the tensors, float64 [elements], but only for a sum or mean of floating-point tensors.
    """

    counts_by_rank: list[int]
    root_count: int
    contents: Tensor | None = None
    total: Tensor | None = None


class ConsistencyCheck:
    """Compares each collective call of this rank with the corresponding calls of the other ranks, and counts the calls.

    It exchanges CPU tensors over `group`, or over the default group if `group` is None. Rows are exchanged with
    `message_exchange` if it is not None.
    """

    def __init__(
        self,
        backend: Backend,
        monitor: FailureMonitor,
        group: dist.ProcessGroup | None = None,
        message_exchange: MessageExchange | None = None,
    ) -> None:
        self._backend, self._monitor, self._group, self.message_exchange = backend, monitor, group, message_exchange
        self._num_calls = 0
        self._has_point_to_point = _supports_point_to_point(group)
        self.max_content_bytes = compute_max_content_bytes(backend.size)
        # Called on every rank before an error for invalid or different arguments is raised.
        self.on_mismatch: Callable[[], None] = lambda: None

    def leave_group(self) -> None:
        """Release the process group, and close the direct connections."""
        self._group = None
        if self.message_exchange is not None:
            self.message_exchange.close()

    def __call__(
        self,
        operation: str,
        tensor: Tensor | None = None,
        *,
        op: str = "",
        root: int = -1,
        check: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
        caller: str = "",
    ) -> ExchangeResult:
        """Block until every rank has called this method with consistent arguments. All ranks must call this method.

        `check` raises an error for arguments that are invalid on this rank. With `dtype`, the exchange also transfers a
        small `tensor` in that dtype. `caller` identifies the model that calls the collective. Raises, on every rank,
        the error of the lowest rank with invalid arguments, or CollectiveMismatchError if the arguments differ.
        """
        self._backend.check_collective_allowed(operation)
        problem: UnitrainError | None = None
        try:
            if check is not None:
                check()
            shape = tuple(tensor.shape) if tensor is not None else ()
            dtype_of_call = tensor.dtype if tensor is not None else None
            call = CollectiveCall(self._num_calls, operation, op, root, dtype_of_call, shape, caller=caller)
        except (TensorError, ConfigError) as error:
            problem = error
            call = CollectiveCall(self._num_calls, operation, is_rejected=True)
        self._num_calls += 1
        self._monitor.record(call)
        tensor = None if problem is not None or dtype is None else tensor
        exchange = self._exchange_rows if self._backend.size <= MAX_GATHERING_RANKS else self._exchange_sums
        result = exchange(call, tensor, dtype)
        if result is None or problem is not None:
            self._raise_on_all_ranks(call, problem)
        return result

    def gather_bytes(self, payload: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return every rank's `payload`, uint8 [bytes], in rank order. `sizes` contains the number of bytes of every
        rank. All ranks must call this method."""
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: payload.numel()] = payload
        gathered = self._allgather(padded)
        return [part[:size] for part, size in zip(gathered, sizes, strict=True)]

    def broadcast_bytes(self, payload: Tensor, root: int) -> None:
        """Broadcast `payload`, uint8 of the same size on every rank, in place. All ranks must call this method."""
        self._wait(dist.broadcast(payload, root, group=self._group, async_op=True))

    def _exchange_rows(
        self, call: CollectiveCall, tensor: Tensor | None, dtype: torch.dtype | None
    ) -> ExchangeResult | None:
        """Gather a row from every rank. Return None if the fingerprints differ."""
        row = bytearray(_ROW_HEADER.size + self.max_content_bytes)
        length = -1 if tensor is None or dtype is None else _write_content(row, tensor, dtype, self.max_content_bytes)
        fingerprint = call.fingerprint
        _ROW_HEADER.pack_into(row, 0, fingerprint, call.count, length)
        rows = self._gather_rows(row)
        headers = [_ROW_HEADER.unpack_from(rows, start) for start in range(0, len(rows), len(row))]
        fingerprints, counts, lengths = map(list, zip(*headers, strict=True))
        if fingerprints.count(fingerprint) < len(fingerprints):
            return None
        contents = None
        if min(lengths) >= 0:
            row_tensors = torch.frombuffer(rows, dtype=torch.uint8).view(len(headers), len(row))
            contents = row_tensors[:, _ROW_HEADER.size : _ROW_HEADER.size + max(lengths)]
        return ExchangeResult(counts, counts[max(call.root, 0)], contents)

    def _gather_rows(self, row: bytearray) -> bytearray:
        """Return the rows of all ranks, in rank order. All ranks must call this method with rows of the same length."""
        if self.message_exchange is not None:
            with self._monitor.waiting():
                return self.message_exchange.allgather(row)
        rows = bytearray(self._backend.size * len(row))
        gathered, own = (torch.frombuffer(content, dtype=torch.int64) for content in (rows, row))
        self._wait(all_gather_single(gathered, own, group=self._group, async_op=True))
        return rows

    def _exchange_sums(
        self, call: CollectiveCall, tensor: Tensor | None, dtype: torch.dtype | None
    ) -> ExchangeResult | None:
        """Sum a vector over ranks. Return None if the fingerprints differ."""
        size, rank = self._backend.size, self._backend.rank
        # In a broadcast_object, only the root passes the number of bytes, so the sum over ranks is this number.
        has_count = call.operation != "broadcast_object" or rank == call.root
        local_header = [*_split_bits(call.fingerprint), *_split_bits(call.count if has_count else 0)]
        values = None if tensor is None or dtype is None else _exact_float64_summands(tensor, dtype, call.op)
        vector = torch.zeros(_SUM_HEADER_ELEMENTS + _MAX_SUMMED_ELEMENTS, dtype=torch.float64, device="cpu")
        header = [*local_header, *(part * part for part in local_header), values is not None]
        vector[:_SUM_HEADER_ELEMENTS] = torch.tensor(header, dtype=torch.float64, device="cpu")
        if values is not None:
            vector[_SUM_HEADER_ELEMENTS : _SUM_HEADER_ELEMENTS + values.numel()] = values
        self._sum_over_ranks(vector)
        *sums, ranks_with_values = vector[:_SUM_HEADER_ELEMENTS].tolist()
        is_equal = [
            total == size * part and squares == size * part * part
            for part, total, squares in zip(local_header, sums, sums[2 * _NUM_PARTS :], strict=False)
        ]
        if not all(is_equal[:_NUM_PARTS]):
            return None
        count_sum = sum(int(part) << _PART_BITS * index for index, part in enumerate(sums[_NUM_PARTS : 2 * _NUM_PARTS]))
        counts: list[int] = []
        if call.operation in ("allgather", "allgather_object"):
            if all(is_equal[_NUM_PARTS:]):
                counts = [call.count] * size
            else:
                counts = self._allgather(torch.tensor([call.count], device="cpu")).view(-1).tolist()
        is_complete = values is not None and ranks_with_values == size
        total = (
            vector[_SUM_HEADER_ELEMENTS : _SUM_HEADER_ELEMENTS + values.numel()]
            if values is not None and is_complete
            else None
        )
        return ExchangeResult(counts, count_sum, total=total)

    def _sum_over_ranks(self, vector: Tensor) -> None:
        """Replace `vector` with its sum over ranks, which is bit-identical on all ranks. All ranks must call this
        method.

        On N ranks, Gloo sums along a ring, in 2 N consecutive messages. This method takes log2(N) rounds: in each
        round, every rank exchanges its partial sum with one other rank. Let p be the largest power of two that is at
        most N. Ranks from p on send their vector to a lower rank before the rounds, and receive the result afterwards.
        Transports without point-to-point messages use an allreduce.
        """
        if not self._has_point_to_point:
            self._wait(dist.all_reduce(vector, group=self._group, async_op=True))
            return
        rank, size = self._backend.rank, self._backend.size
        power_of_two = 1 << size.bit_length() - 1
        partner = rank ^ power_of_two  # the partner's rank differs in one bit
        received = torch.empty_like(vector)
        if rank >= power_of_two:
            self._exchange(partner, send=vector)
            self._exchange(partner, receive=vector)
            return
        if partner < size:
            self._exchange(partner, receive=received)
            vector += received
        distance = 1
        while distance < power_of_two:
            self._exchange(rank ^ distance, send=vector, receive=received)
            vector += received
            distance *= 2
        if partner < size:
            self._exchange(partner, send=vector)

    def _exchange(self, peer: int, *, send: Tensor | None = None, receive: Tensor | None = None) -> None:
        works = [
            begin(tensor, peer, self._group, tag=_TAG)
            for begin, tensor in ((dist.isend, send), (dist.irecv, receive))
            if tensor is not None
        ]
        for work in works:  # Gloo completes these operations only in `wait`, so they cannot be polled
            self._monitor.wait_for_ranks(work, polls=False)

    def _raise_on_all_ranks(self, call: CollectiveCall, problem: UnitrainError | None) -> NoReturn:
        """Raise on every rank the error of the lowest rank with invalid arguments or, if no rank has an error,
        CollectiveMismatchError. All ranks must call this method."""
        payload, _ = pack((call, problem))
        sizes = self._allgather(torch.tensor([payload.numel()], device="cpu")).view(-1).tolist()
        calls_and_errors = [unpack(part, self._backend.device) for part in self.gather_bytes(payload, sizes)]
        self.on_mismatch()
        for _, error in calls_and_errors:
            if error is not None:
                raise error
        raise CollectiveMismatchError(
            f"{describe_mismatch([other for other, _ in calls_and_errors])} Call the same collectives in the same "
            "order on every rank, with the same shape and dtype, and none of them inside `if rank == 0`."
        )

    def _allgather(self, own: Tensor) -> Tensor:
        """Return every rank's one-dimensional `own`, of the same length on every rank, as [ranks, length]."""
        gathered = own.new_empty(self._backend.size, own.numel())
        if own.numel():
            self._wait(all_gather_single(gathered.view(-1), own, group=self._group, async_op=True))
        return gathered

    def _wait(self, work: dist.Work | None) -> None:
        self._monitor.wait_for_ranks(work, polls=True)


def compute_max_content_bytes(size: int) -> int:
    """Return the maximum size in bytes of a tensor in a row, for `size` ranks. The result is a multiple of 8, because a
    row consists of int64 values."""
    # The total over ranks is limited to 16 KiB, but at least 1 KiB per rank is allowed. 4 KiB hold the statistics of a
    # BatchNorm with 256 channels; their count and the number of the layer are added to them.
    return max(1024, min(4096, 16384 // size)) // 8 * 8 + 24


def _write_content(row: bytearray, tensor: Tensor, dtype: torch.dtype, max_bytes: int) -> int:
    """Write `tensor` in `dtype` to `row`, after the header, and return the number of bytes. Return -1, and write
    nothing, if there are more than `max_bytes` or `tensor` is not on the CPU."""
    count = tensor.numel()
    length = count * dtype.itemsize
    if tensor.device.type != "cpu" or length > max_bytes:
        return -1
    if count:  # frombuffer rejects a count of 0
        content = torch.frombuffer(row, dtype=dtype, count=count, offset=_ROW_HEADER.size)
        content.view(tensor.shape).copy_(tensor.detach())
    return length


def _exact_float64_summands(tensor: Tensor, dtype: torch.dtype, op: str) -> Tensor | None:
    """Return `tensor` as float64 [elements] if a float64 sum can reduce it: if it is on the CPU, has at most
    _MAX_SUMMED_ELEMENTS elements, `dtype` is floating-point, and `op` is a sum or mean. Otherwise return None."""
    if tensor.device.type != "cpu" or tensor.numel() > _MAX_SUMMED_ELEMENTS or not dtype.is_floating_point:
        return None
    return tensor.detach().reshape(-1).double() if op in ("sum", "mean") else None


def _supports_point_to_point(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend_config(group).startswith(("gloo", "cpu:gloo"))


def _split_bits(value: int) -> list[int]:
    mask = (1 << _PART_BITS) - 1
    return [value >> _PART_BITS * index & mask for index in range(_NUM_PARTS)]

"""The consistency check before every collective: one exchange of a fingerprint, O(1) per rank.

Up to `MOST_GATHERED` ranks, the exchange is an allgather of short rows, which also carry small tensors, so that these
are reduced in rank order, bit-equal on every transport. Above, it is a sum of a short vector: the fingerprints of all
ranks are equal if and only if their variance is zero, and the same sum adds up small floating-point tensors. The
arguments of all ranks are exchanged only where fingerprints differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.base import Backend
from unitrain.backends.objects import pack, unpack
from unitrain.errors import CollectiveMismatchError, ConfigError, TensorError, UnitrainError
from unitrain.monitoring.flight_recorder import CollectiveCall, describe_mismatch
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import all_gather

MOST_GATHERED = 64
# Of a row: fingerprint, count, and the bytes that it carries, or -1.
_HEADER = 3
# What a sum carries at most: together with the rest, one packet.
_SUMMED = 128
# Numbers are summed as four parts of 16 bits, so that their sums and sums of squares are exact in float64 for up to
# 2**21 ranks.
_PARTS, _PART_BITS = 4, 16
_TAG = 0x756E69  # of messages between two ranks, none that a user is likely to choose
_SUM_HEADER = 4 * _PARTS + 1


class CheckedArguments(NamedTuple):
    """Result of the exchange. `counts` is every rank's `CollectiveCall.count`, for gathering operations and up
    to MOST_GATHERED ranks only; `root_count` that of the root.

    If all ranks' tensors were small: their bytes, uint8 [ranks, bytes], padded with zeros, as `contents`, or their sum,
    float64 [elements], as `total`.
    """

    counts: list[int]
    root_count: int
    contents: Tensor | None = None
    total: Tensor | None = None


class ConsistencyCheck:
    """Counts the collectives that this rank of `backend` calls, and compares each with those of the other ranks.

    Its exchanges of CPU tensors use `group`, None for the default group.
    """

    def __init__(self, backend: Backend, monitor: FailureMonitor, group: dist.ProcessGroup | None = None) -> None:
        self._backend, self._monitor, self._group = backend, monitor, group
        self._calls = 0
        self._point_to_point = _has_point_to_point(group)
        # Bounded in sum over ranks; 4 KB hold the statistics of a BatchNorm of 250 channels.
        self._row_bytes = max(1024, min(4096, 16384 // backend.size))

    def leave_group(self) -> None:
        """Release the process group."""
        self._group = None

    def __call__(
        self,
        operation: str,
        tensor: Tensor | None = None,
        *,
        op: str = "",
        root: int = -1,
        check: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> CheckedArguments:
        """Return once every rank is about to do the same. All ranks call it.

        `check` raises what is wrong with the arguments on this rank. With `dtype`, a small `tensor` is transferred in
        that dtype with the exchange. Raises the lowest such rank's error, or CollectiveMismatchError if the arguments
        differ, on every rank.
        """
        self._backend.check_collective_allowed(operation)
        problem: UnitrainError | None = None
        call = CollectiveCall(self._calls, operation, refused=True)
        try:
            if check is not None:
                check()
            shape = tuple(tensor.shape) if tensor is not None else ()
            call = CollectiveCall(self._calls, operation, op, root, tensor.dtype if tensor is not None else None, shape)
        except (TensorError, ConfigError) as error:
            problem = error
        self._calls += 1
        self._monitor.record(call)
        tensor = None if problem is not None or dtype is None else tensor
        exchange = self._gathered if self._backend.size <= MOST_GATHERED else self._summed
        agreed = exchange(call, tensor, dtype)
        if agreed is None or problem is not None:
            self._raise_for_all(call, problem)
        return agreed

    def gather_bytes(self, payload: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return every rank's `payload`, uint8 [its size], in rank order. All ranks call it, with the `sizes` of
        all."""
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        gathered = self._gather(padded)
        return [part[:size] for part, size in zip(gathered, sizes, strict=True)]

    def broadcast_bytes(self, payload: Tensor, root: int) -> None:
        """Make `payload`, uint8 of the same size on every rank, the root's. All ranks call it."""
        self._wait(dist.broadcast(payload, root, group=self._group, async_op=True))

    def _gathered(
        self, call: CollectiveCall, tensor: Tensor | None, dtype: torch.dtype | None
    ) -> CheckedArguments | None:
        """Exchange rows; return None where they differ."""
        content = None if tensor is None or dtype is None else _small(tensor, dtype, self._row_bytes)
        row = torch.zeros(_HEADER + self._row_bytes // 8, dtype=torch.int64)
        length = -1 if content is None else content.numel()
        row[:_HEADER] = torch.tensor([call.fingerprint, call.count, length])
        if content is not None:
            row[_HEADER:].view(torch.uint8)[:length] = content
        rows = self._gather(row)
        fingerprints, counts, lengths = rows[:, :_HEADER].t().tolist()
        if fingerprints.count(call.fingerprint) < len(fingerprints):
            return None
        contents = rows[:, _HEADER:].view(torch.uint8)[:, : max(lengths)] if min(lengths) >= 0 else None
        return CheckedArguments(counts, counts[max(call.root, 0)], contents)

    def _summed(
        self, call: CollectiveCall, tensor: Tensor | None, dtype: torch.dtype | None
    ) -> CheckedArguments | None:
        """Exchange sums; return None where fingerprints differ."""
        size, rank = self._backend.size, self._backend.rank
        # Of an object that one rank sends, only that rank knows the bytes, and their sum is that number.
        counts = call.operation != "broadcast_object" or rank == call.root
        own = [*_parts(call.fingerprint), *_parts(call.count if counts else 0)]
        values = None if tensor is None or dtype is None else _summable(tensor, dtype, call.op)
        vector = torch.zeros(_SUM_HEADER + _SUMMED, dtype=torch.float64)
        header = [*own, *(part * part for part in own), values is not None]
        vector[:_SUM_HEADER] = torch.tensor(header, dtype=torch.float64)
        if values is not None:
            vector[_SUM_HEADER : _SUM_HEADER + values.numel()] = values
        self._sum_over_ranks(vector)
        *sums, carried = vector[:_SUM_HEADER].tolist()
        same = [
            total == size * part and squares == size * part * part
            for part, total, squares in zip(own, sums, sums[2 * _PARTS :], strict=False)
        ]
        if not all(same[:_PARTS]):
            return None
        counts_sum = sum(int(part) << _PART_BITS * at for at, part in enumerate(sums[_PARTS : 2 * _PARTS]))
        every: list[int] = []
        if call.operation in ("allgather", "allgather_object"):
            if all(same[_PARTS:]):
                every = [call.count] * size
            else:
                every = self._gather(torch.tensor([call.count])).view(-1).tolist()
        total = vector[_SUM_HEADER : _SUM_HEADER + values.numel()] if values is not None and carried == size else None
        return CheckedArguments(every, counts_sum, total=total)

    def _sum_over_ranks(self, vector: Tensor) -> None:
        """Make `vector` its sum over ranks, with the same bits on all of them. All ranks call it.

        Gloo sums along a ring, so that a result takes 2 N messages one after another. Here it takes log2(N): in each
        round every rank exchanges its sum so far with one other. What is above the largest power of two is added
        before, and gets the result afterwards.
        """
        if not self._point_to_point:
            self._wait(dist.all_reduce(vector, group=self._group, async_op=True))
            return
        rank, size = self._backend.rank, self._backend.size
        most = 1 << size.bit_length() - 1
        partner = rank ^ most  # differs in the highest bit
        received = torch.empty_like(vector)
        if rank >= most:
            self._exchange(partner, send=vector)
            self._exchange(partner, receive=vector)
            return
        if partner < size:
            self._exchange(partner, receive=received)
            vector += received
        distance = 1
        while distance < most:
            self._exchange(rank ^ distance, send=vector, receive=received)
            vector += received
            distance *= 2
        if partner < size:
            self._exchange(partner, send=vector)

    def _exchange(self, peer: int, *, send: Tensor | None = None, receive: Tensor | None = None) -> None:
        works = [
            start(tensor, peer, self._group, tag=_TAG)
            for start, tensor in ((dist.isend, send), (dist.irecv, receive))
            if tensor is not None
        ]
        for work in works:  # which do not tell that they have ended until they are waited for
            self._monitor.wait_for_ranks(work, polls=False)

    def _raise_for_all(self, call: CollectiveCall, problem: UnitrainError | None) -> NoReturn:
        """Raise the lowest refused rank's error, or what differs, on every rank. All ranks call it."""
        payload, _ = pack((call, problem))
        sizes = self._gather(torch.tensor([payload.numel()])).view(-1).tolist()
        told = [unpack(part, self._backend.device) for part in self.gather_bytes(payload, sizes)]
        for _, found in told:
            if found is not None:
                raise found
        raise CollectiveMismatchError(
            f"{describe_mismatch([call for call, _ in told])} Call the same collectives in the same order on every "
            "rank, with the same shape and dtype, and none of them inside `if rank == 0`."
        )

    def _gather(self, own: Tensor) -> Tensor:
        """Return every rank's `own`, one-dimensional and of the same length, [ranks, length]."""
        gathered = own.new_empty(self._backend.size, own.numel())
        if own.numel():
            self._wait(all_gather(gathered.view(-1), own, group=self._group, async_op=True))
        return gathered

    def _wait(self, work: dist.Work | None) -> None:
        self._monitor.wait_for_ranks(work, polls=True)


def _small(tensor: Tensor, dtype: torch.dtype, most: int) -> Tensor | None:
    """Return the bytes, uint8, of `tensor` in `dtype` if there are at most so many and they are on the CPU."""
    if tensor.device.type != "cpu" or tensor.numel() * dtype.itemsize > most:
        return None
    # A copy: one number counts as contiguous at any stride, and as bytes it can be seen only at stride 1.
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _summable(tensor: Tensor, dtype: torch.dtype, op: str) -> Tensor | None:
    """Return the elements of `tensor`, float64, if a sum of float64 may reduce them."""
    if tensor.device.type != "cpu" or tensor.numel() > _SUMMED or not dtype.is_floating_point:
        return None
    return tensor.detach().reshape(-1).double() if op in ("sum", "mean") else None


def _has_point_to_point(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend_config(group).startswith(("gloo", "cpu:gloo"))


def _parts(number: int) -> list[int]:
    mask = (1 << _PART_BITS) - 1
    return [number >> _PART_BITS * at & mask for at in range(_PARTS)]

"""Subgroups of a backend's ranks, with point-to-point communication and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.slow_network_exchange import start_allgather, start_alltoall
from unitrain.backends.tensors import HALF_DTYPES, as_bytes, copy_into
from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.monitoring.monitor import FailureMonitor


class Subgroup:
    """A group of some ranks of a backend. `ranks` contains them in ascending order. `index` is this rank's position in
    `ranks`.

    All ranks of the group call the collectives in the same order. Methods whose names start with `start_` are
    asynchronous: they return a function that waits for the result. `phase` is a phase that the caller has recorded; if
    the wait times out, the error names the ranks that have not recorded this phase.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, monitor: FailureMonitor
    ) -> None:
        self._process_group: dist.ProcessGroup | None = process_group
        self.ranks, self.index = tuple(ranks), list(ranks).index(rank)
        self.monitor = monitor

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group as a process group of torch.distributed."""
        assert self._process_group is not None, "the backend was shut down"
        return self._process_group

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def send(self, tensor: Tensor, index: int, tag: int = 0) -> None:
        """Send a contiguous `tensor` to the rank with `index`, and wait until `tensor` may be changed."""
        self.start_send(tensor, index, tag)()

    def start_send(self, tensor: Tensor, index: int, tag: int = 0) -> Callable[[], None]:
        """Start to send a contiguous `tensor`, and return a function that waits until `tensor` may be changed."""
        work = dist.isend(tensor, self.ranks[index], self.process_group, tag=tag)
        return lambda: self.monitor.wait_for_ranks(work, polls=False)

    def receive(self, tensor: Tensor, index: int, tag: int = 0) -> None:
        """Receive into a contiguous `tensor` from the rank with `index`."""
        work = dist.irecv(tensor, self.ranks[index], self.process_group, tag=tag)
        self.monitor.wait_for_ranks(work, polls=False)

    def broadcast(self, tensor: Tensor, index: int) -> None:
        """Broadcast a contiguous `tensor`, of the same shape and dtype on all ranks, in place from the rank with
        `index`."""
        if tensor.numel():
            work = dist.broadcast(as_bytes(tensor), self.ranks[index], self.process_group, async_op=True)
            self.monitor.wait_for_ranks(work)

    def broadcast_tensors(self, tensors: Sequence[Tensor], index: int) -> None:
        """Broadcast `tensors`, of any dtypes, in place from the rank with `index`, in one collective."""
        if not tensors or self.size == 1:
            return
        pieces = [as_bytes(tensor) for tensor in tensors]
        shared = torch.cat(pieces)
        self.broadcast(shared, index)
        if self.index == index:
            return
        for tensor, piece in zip(tensors, shared.split([len(piece) for piece in pieces]), strict=True):
            copy_into(tensor.detach(), piece.clone().view(tensor.dtype).view(tensor.shape))

    def allreduce_mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of `tensor` over the ranks of the group. Half-precision sums are accumulated in float32."""
        dtype = torch.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype
        result = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        self.monitor.wait_for_ranks(dist.all_reduce(result, group=self.process_group, async_op=True))
        return result.div_(self.size).to(tensor.dtype)

    def start_mean(self, tensor: Tensor, phase: GradientPhase) -> Callable[[], Tensor]:
        """Start to compute the mean of `tensor`, float32 or float64, over the ranks of the group."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        work = self._start(lambda: dist.all_reduce(result, group=self.process_group, async_op=True))

        def wait() -> Tensor:
            self.monitor.wait_for_ranks(work, polls=False, phase=phase)
            return result.div_(self.size)

        return wait

    def start_alltoall(self, rows: Tensor, phase: GradientPhase) -> Callable[[], Tensor]:
        """Start to send row r of `rows`, [size, elements], to the rank with index r. The result contains the rows from
        all ranks, in the order of their indexes."""
        sent, received = rows.detach().contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
        output, source = as_bytes(received), as_bytes(sent)
        work = self._start(lambda: start_alltoall(output, source, self.process_group))
        return self._wait_function(work, received, sent, phase)

    def start_allgather(self, row: Tensor, phase: GradientPhase) -> Callable[[], Tensor]:
        """Start to gather `row`, [1, elements], from all ranks. The result is [size, elements]."""
        sent, gathered = row.detach().contiguous(), row.new_empty((self.size, row.shape[1]))
        output, source = as_bytes(gathered), as_bytes(sent)
        work = self._start(lambda: start_allgather(output, source, self.process_group))
        return self._wait_function(work, gathered, sent, phase)

    def _start(self, operation: Callable[[], dist.Work | None]) -> dist.Work | None:
        try:
            return operation()
        except RuntimeError as error:  # the connection is closed, or Horovod rejects operations after a rank has ended
            self.monitor.raise_cause_of(error)
            raise

    def _wait_function(
        self, work: dist.Work | None, received: Tensor, send_tensor: Tensor, phase: GradientPhase
    ) -> Callable[[], Tensor]:
        """Return a function that waits for `work` and returns `received`. The function keeps a reference to
        `send_tensor`, so that the memory of `send_tensor` is not reused during the transfer."""

        def wait(send_tensor: Tensor = send_tensor) -> Tensor:
            self.monitor.wait_for_ranks(work, polls=False, phase=phase)
            return received

        return wait

    @contextmanager
    def waiting(self, phase: GradientPhase) -> Iterator[None]:
        """Context manager that records `phase`, and in which this rank waits for other ranks. A timeout raises
        CollectiveTimeoutError, which names the missing ranks."""
        self.monitor.record(phase)
        with self.monitor.waiting():
            yield

    def leave(self) -> None:
        """Release the process group."""
        self._process_group = None


def create_rank_groups(
    groups: Sequence[Sequence[int]], rank: int, monitor: FailureMonitor, timeout: timedelta
) -> list[Subgroup]:
    """Create a group for each list of ranks in `groups`, and return the groups that contain `rank`. All ranks must call
    this function.

    Each list must be in ascending order, because torch sorts the ranks of a process group.
    """
    created = []
    for ranks in groups:
        process_group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            created.append(Subgroup(process_group, ranks, rank, monitor))  # type: ignore[arg-type]
    return created

"""The replicas of a pipeline as a communicator, in which the rank is the index of the replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unitrain.backends import checks
from unitrain.backends.base import Backend, Communicator, ReduceOp
from unitrain.backends.current_batches import CurrentBatches
from unitrain.backends.lifecycle import Lifecycle


class Replicas(Lifecycle, Communicator):
    """The replicas of a pipeline. `rank` is the index of this rank's replica, and `size` is the number of replicas.

    All ranks of the backend must call the methods, and the ranks of a replica must pass equal arguments. Pass this
    object to `ShardedLoader` and `MeanMetric`. Reductions and allgathers are intended for small tensors, because they
    gather the tensors of all ranks.
    """

    def __init__(self, backend: Backend, stages: int, replicas_per_rank: int = 1) -> None:
        """The batch of a rank contains the samples of `replicas_per_rank` replicas. This number exceeds 1 only in the
        reference run of `unitrain verify`."""
        self._backend, self._stages, self.replicas_per_rank = backend, stages, replicas_per_rank
        self.rank, self.size = backend.rank // stages, backend.size // stages
        self.device = backend.device

    @property
    def current_batches(self) -> CurrentBatches:
        return self._backend.current_batches

    @contextmanager
    def on_rank_zero(self) -> Iterator[bool]:
        """Context manager that yields whether this is rank 0 of the backend, which is only one of the ranks of replica
        0."""
        with self._backend.on_rank_zero() as is_rank_zero:
            yield is_rank_zero

    def check_running(self, operation: str) -> None:
        """Raise ConfigError after the backend was shut down."""
        self._backend.check_running(operation)

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        checks.check_reduction(tensor, op)
        rows = self._gather_from_replicas(tensor)
        if op in ("mean", "sum"):
            is_half = tensor.dtype in (torch.float16, torch.bfloat16)
            total = (rows.float() if is_half else rows).sum(0, dtype=None if is_half else tensor.dtype)
            return (total / self.size if op == "mean" else total).to(tensor.dtype)
        if tensor.dtype == torch.bool:
            return rows.any(0) if op == "max" else rows.all(0)
        if op == "product":
            return rows.prod(0, dtype=tensor.dtype)
        return rows.amin(0) if op == "min" else rows.amax(0)

    def allgather(self, tensor: Tensor) -> Tensor:
        gathered = self.allgather_object(tensor.detach().reshape(tensor.shape or (1,)))
        return torch.cat([rows.to(tensor.device) for rows in gathered])

    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        checks.check_divisible(tensor, self.size)
        return self.allreduce(tensor, op).chunk(self.size)[self.rank].clone()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        checks.check_root(root, self.size)
        return self._backend.broadcast(tensor, root * self._stages)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        checks.check_root(root, self.size)
        return self._backend.broadcast_object(obj, root * self._stages)

    def allgather_object(self, obj: Any) -> list[Any]:
        return self._backend.allgather_object(obj)[:: self._stages]

    def barrier(self) -> None:
        self._backend.barrier()

    def report_failure(self, error: BaseException) -> None:
        self._backend.report_failure(error)

    def shutdown(self) -> None:
        """Do nothing. The backend must be shut down separately."""

    def _gather_from_replicas(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all replicas, [replicas, ...]. All ranks of the backend must call this method."""
        return self._backend.allgather(tensor.unsqueeze(0))[:: self._stages]

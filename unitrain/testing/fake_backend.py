"""A backend without communication, for unit tests of code that uses a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unitrain.backends import checks
from unitrain.backends.base import ReduceOp
from unitrain.backends.local import LocalBackend
from unitrain.errors import ConfigError

Peers = Callable[[str, Any, int], Any]


class FakeBackend(LocalBackend):
    """A single process that simulates rank `rank` of `size` ranks.

    If this rank passes `value` to a collective, `peers(operation, value, rank)` returns the argument that rank `rank`
    passes; `operation` is the name of the method, such as "allreduce". Without `peers`, every rank passes the same
    argument, so a sum is `size` times the value. Gradients and optimizer state are not communicated, as if all ranks
    computed the same values. `calls` lists the collectives in order, as (operation, value).

    All simulated ranks are on one host. Raises ConfigError if `rank` is not in [0, size).
    """

    name = "fake"

    def __init__(self, rank: int = 0, size: int = 1, *, peers: Peers | None = None, device: str = "cpu") -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"FakeBackend(rank={rank}, size={size}) needs a rank in [0, {size}). Use rank=0.")
        super().__init__(torch.device(device))
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.calls: list[tuple[str, Any]] = []
        self._peers = peers or (lambda operation, value, rank: value)

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        return _reduce(self._gather_from_peers("allreduce", super().allreduce(tensor, op)), op)

    def allgather(self, tensor: Tensor) -> Tensor:
        tensors = self._gather_from_peers("allgather", super().allgather(tensor))
        return torch.cat([rank_tensor.reshape(rank_tensor.shape or (1,)) for rank_tensor in tensors])

    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        reduced = _reduce(self._gather_from_peers("reducescatter", super().reducescatter(tensor, op)), op)
        return reduced.chunk(self.size)[self.rank].clone()

    def alltoall(self, tensor: Tensor) -> Tensor:
        tensors = self._gather_from_peers("alltoall", super().alltoall(tensor))
        return torch.cat([rank_tensor.chunk(self.size)[self.rank] for rank_tensor in tensors])

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        tensors: list[Tensor] = self._gather_from_peers("broadcast", super().broadcast(tensor, root))
        return tensors[root].clone()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._gather_from_peers("broadcast_object", super().broadcast_object(obj, root))[root]

    def allgather_object(self, obj: Any) -> list[Any]:
        return self._gather_from_peers("allgather_object", super().allgather_object(obj)[0])

    def barrier(self) -> None:
        super().barrier()
        self.calls.append(("barrier", None))

    def _gather_from_peers(self, operation: str, value: Any) -> list[Any]:
        self.calls.append((operation, value))
        return [value if rank == self.rank else self._peers(operation, value, rank) for rank in range(self.size)]


def _reduce(tensors: list[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction in the dtype of the inputs; sums of half-precision numbers are computed in float32."""
    dtype = tensors[0].dtype
    checks.check_reduction(tensors[0], op)
    stacked = torch.stack(tensors)
    if dtype == torch.bool:
        return stacked.any(0) if op == "max" else stacked.all(0)
    if op == "min":
        return stacked.amin(0)
    if op == "max":
        return stacked.amax(0)
    wide = stacked.float() if dtype in (torch.float16, torch.bfloat16) else stacked
    reduced = wide.prod(0, dtype=wide.dtype) if op == "product" else wide.sum(0, dtype=wide.dtype)
    return (reduced / len(tensors) if op == "mean" else reduced).to(dtype)

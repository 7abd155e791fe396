"""Simulates one of several ranks, for tests of decisions that depend on the rank and on received values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import ReduceOp
from unitrain.backends.local import LocalBackend


class SimulatedRank(LocalBackend):
    """A rank whose peers pass the same values as this rank, or the values in `gathered`, and raise no errors."""

    def __init__(self, rank: int, size: int, gathered: list[Any] | None) -> None:
        super().__init__(torch.device("cpu"))
        self.rank, self.size, self._gathered = rank, size, gathered  # type: ignore[misc]

    def allgather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size if self._gathered is None or obj is None else self._gathered

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Return the tensor, or a different one if the peers differ. Callers only compare the result with the
        tensor."""
        result = super().allreduce(tensor, op)
        return result if self._gathered is None else result + 1

    def allgather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.size)


def simulate_rank(rank: int, size: int, gathered: list[Any] | None = None) -> SimulatedRank:
    return SimulatedRank(rank, size, gathered)

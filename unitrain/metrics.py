"""Exact weighted means over ranks, collected without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.errors import TensorError


class Means:
    """Means of named values over all samples of all ranks, however unevenly these are shared out.

    Sums are kept in float64 on `device` and counts on the host, so that `add` never waits for the device.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in self.names]
        self._samples = 0

    def add(self, values: Iterable[Tensor | float], samples: int) -> None:
        """Count one batch: per name either its mean over the batch's `samples`, or a tensor [samples] of their values.

        Raises TensorError for a tensor of any other shape.
        """
        if samples == 0:
            return
        for name, total, value in zip(self.names, self._sums, values, strict=True):
            if not isinstance(value, Tensor):
                total.add_(value * samples)
            elif value.dim() == 0:
                total.add_(value.detach(), alpha=samples)
            elif value.shape == (samples,):
                total.add_(value.detach().sum(dtype=torch.float64))
            else:
                raise TensorError(
                    f"{name} of a batch of {samples} must be one number or {samples}, got shape {list(value.shape)}. "
                    "Return the mean over the batch, for example with .mean()."
                )
        self._samples += samples

    def totals(self, communicator: Communicator) -> tuple[list[float], int]:
        """Return the sum of each name and the number of samples over all ranks, and start again. All ranks call it."""
        here = torch.tensor(self._samples, dtype=torch.float64, device=communicator.device)
        everywhere = communicator.allreduce(torch.stack([*self._sums, here]), op="sum")
        for total in self._sums:
            total.zero_()
        self._samples = 0
        *sums, samples = everywhere.tolist()
        return sums, int(samples)

    def reduce(self, communicator: Communicator) -> dict[str, float]:
        """Return the mean of each name over all ranks (nan without any sample), and start again. All ranks call it."""
        sums, samples = self.totals(communicator)
        means = [total / samples if samples else float("nan") for total in sums]
        return dict(zip(self.names, means, strict=True))

"""Exact weighted means over ranks, collected without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.errors import TensorError

# How many batches wait to be added up: enough to make it cheap per batch, few enough to hold.
_WAITING = 100


class Means:
    """Means of named values over all samples of all ranks, however unevenly these are shared out.

    Sums are kept in float64 on `device` and counts on the host, so that `add` never waits for the device.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._device = device
        self._waiting: list[tuple[int, list[Tensor]]] = []
        self._sums = [torch.zeros((), dtype=torch.float64, device=device) for _ in self.names]
        self._samples = 0

    def add(self, values: Iterable[Tensor | float], samples: int) -> None:
        """Count one batch: per name either its mean over the batch's `samples`, or a tensor [samples] of their values.

        A tensor of any other shape is a TensorError, raised here or when the numbers are asked for.
        """
        if samples:
            taken = [value.detach() if isinstance(value, Tensor) else torch.tensor(value) for value in values]
            self._waiting.append((samples, taken))
            if len(self._waiting) == _WAITING:
                self._add_up()

    def totals(self, communicator: Communicator) -> tuple[list[float], int]:
        """Return the sum of each name and the number of samples over all ranks, and start again. All ranks call it."""
        self._add_up()
        here = torch.tensor(self._samples, dtype=torch.float64, device=self._device)
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

    def _add_up(self) -> None:
        # Nearly all batches are equally long, so a hundred of them are one stack, one sum and one addition: much less
        # than an addition after every batch, and nothing has to be copied to the device.
        for samples, batches in groupby(self._waiting, key=itemgetter(0)):
            rows = [values for _, values in batches]
            for name, total, values in zip(self.names, self._sums, zip(*rows, strict=True), strict=True):
                shape = values[0].shape
                if shape not in ((), (samples,)):
                    raise TensorError(
                        f"{name} of a batch of {samples} must be one number or {samples}, got shape {list(shape)}. "
                        "Return the mean over the batch, for example with .mean()."
                    )
                total.add_(torch.stack(values).sum(dtype=torch.float64), alpha=1 if shape else samples)
            self._samples += samples * len(rows)
        self._waiting.clear()

"""Exact sums of floats, which depend neither on their order nor on their division among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.metrics.means import MAX_PENDING_BATCHES, Means, detached_copy, sum_of_batch

# Number of floats that represent a sum in `local_sums`. The sum of float32 values whose exponents differ by up to 135
# needs at most this many.
_MAX_COMPONENTS = 4


class ExactSum:
    """The exact sum of floats, stored as floats of different magnitudes that do not overlap.

    Jonathan Shewchuk, Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric Predicates (1997).
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._partial_sums: list[float] = []
        self._non_finite = 0.0  # the sum of the values that are infinite or NaN
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        """Add `value`, without rounding."""
        if not math.isfinite(value):
            self._non_finite += value
            return
        parts = []
        for part in self._partial_sums:
            if abs(value) < abs(part):
                value, part = part, value
            high = value + part
            low = part - (high - value)
            if low:
                parts.append(low)
            value = high
        if math.isinf(value):
            self._non_finite += value
            return
        parts.append(value)
        self._partial_sums = parts

    @property
    def components(self) -> list[float]:
        """Floats in order of increasing magnitude whose exact sum equals this sum."""
        return self._partial_sums if self._non_finite == 0.0 else [*self._partial_sums, self._non_finite]


def sum_exactly(values: Iterable[float]) -> float:
    """Return the exact sum of `values`, rounded once. The sum is not finite if a value is not finite."""
    components = ExactSum(values).components
    return math.fsum(components) if all(map(math.isfinite, components)) else sum(components)


class ExactMeans(Means):
    """Means whose sums are exact, so that they do not depend on the number of processes.

    The contribution of each batch is rounded to float64. Summing pending batches synchronizes with the device.
    """

    def add_loss(self, loss: Tensor, samples: int, tokens: Tensor | float | None, *, is_owned: bool = False) -> None:
        if tokens is None:
            self.add((loss,), samples, is_owned=is_owned)
        elif samples:
            token_count = tokens if is_owned and isinstance(tokens, Tensor) else detached_copy(tokens)
            self._pending_tokens.append((loss if is_owned else detached_copy(loss), token_count))
            if len(self._pending_tokens) >= MAX_PENDING_BATCHES:
                self.flush()

    def flush(self) -> None:
        """Sum the pending batches. Raises a deferred TensorError of `add`, on this rank only. Synchronizes with the
        device if batches are pending."""
        pending = self._pending if self.names else []  # torch cannot stack an empty list
        rows = [
            torch.stack(
                [sum_of_batch(name, value, n).to(self._device) for name, value in zip(self.names, row, strict=True)]
            )
            for n, row in pending
        ]
        for row in torch.stack(rows).tolist() if rows else ():
            for exact, value in zip(self._exact_sums, row, strict=True):
                exact.add(value)
        self._samples += sum(n for n, _ in self._pending)
        self._pending.clear()
        for loss, count in self._pending_tokens:
            self._exact_sums[0].add(loss.double().item())
            self._exact_token_count.add(count.double().item())
        self._pending_tokens.clear()

    def local_sums(self) -> Tensor:
        """Return four floats per name, which add up to this rank's sum, followed by its number of samples or tokens,
        float64 [4 * names + 1]. The sum is exact unless it needs more than four floats; see `_MAX_COMPONENTS`."""
        self.flush()
        rows: list[float] = []
        for exact in self._exact_sums:
            largest = exact.components[-_MAX_COMPONENTS:]
            rows += [*largest, *[0.0] * (_MAX_COMPONENTS - len(largest))]
        return torch.tensor(
            [*rows, self._samples + sum_exactly(self._exact_token_count.components)], dtype=torch.float64, device="cpu"
        )

    def reduce_totals(self, communicator: Communicator) -> tuple[list[float], float]:
        """Return the sum for each name and the number of samples or tokens over all ranks. All ranks must call this
        method."""
        self.flush()
        own = ([exact.components for exact in self._exact_sums], self._samples, self._exact_token_count.components)
        ranks: list[tuple[list[list[float]], int, list[float]]] = communicator.allgather_object(own)
        sums = [sum_exactly(part for sums, _, _ in ranks for part in sums[index]) for index in range(len(self.names))]
        tokens = sum_exactly(part for *_, parts in ranks for part in parts)
        return sums, sum(samples for _, samples, _ in ranks) + tokens

    def clear(self) -> None:
        """Discard all batches."""
        super().clear()
        self._exact_sums = [ExactSum() for _ in self.names]
        self._exact_token_count = ExactSum()
        self._pending_tokens: list[tuple[Tensor, Tensor]] = []

    def state(self) -> dict[str, Any]:
        """Return this rank's sums, for `load_state`."""
        self.flush()
        return {
            "exact": [exact.components for exact in self._exact_sums],
            "samples": self._samples,
            "tokens": self._exact_token_count.components,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the sums that `state` returned on any rank."""
        self.load_sum([state])

    def load_sum(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Restore the total of the sums that `state` returned on several ranks."""
        self.clear()
        states_of_ranks: Sequence[Mapping[str, Any]] = list(states)
        for index in range(len(self.names)):
            self._exact_sums[index] = ExactSum(part for state in states_of_ranks for part in state["exact"][index])
        self._exact_token_count = ExactSum(part for state in states_of_ranks for part in state["tokens"])
        self._samples = sum(state["samples"] for state in states_of_ranks)

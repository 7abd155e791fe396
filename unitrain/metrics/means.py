"""Weighted means over ranks, accumulated without host-device synchronization."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.errors import TensorError
from unitrain.validation import check_boolean, check_instance, describe_value

# Maximum number of batches that are stored before they are summed. Larger values are faster; smaller values save
# memory.
MAX_PENDING_BATCHES = 100
_MAX_INTEGER = 2**63 - 1


class Means:
    """Means of named values over the samples of all ranks, which may have different numbers of samples.

    Sums and numbers of tokens are float64 on `device`, and numbers of samples are on the host, so `add` and `add_loss`
    do not synchronize with the device.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._device = device
        self._sums: list[Tensor]
        self._samples: int
        self._tokens: Tensor
        self.clear()

    def add(self, values: Iterable[Tensor | float], samples: int, *, is_owned: bool = False) -> None:
        """Add a batch: for each name, the mean over its `samples`, or a tensor [samples] of values.

        Tensors are copied, because the caller may overwrite them, unless `is_owned` is True. A tensor of another shape
        raises TensorError, in this or a later call.
        """
        if samples:
            copies = [value if is_owned and isinstance(value, Tensor) else detached_copy(value) for value in values]
            self._pending.append((samples, copies))
            if len(self._pending) == MAX_PENDING_BATCHES:
                self.flush()

    def add_loss(self, loss: Tensor, samples: int, tokens: Tensor | float | None, *, is_owned: bool = False) -> None:
        """Add a batch with one value: the mean over its `samples` or, with `tokens`, the sum over `tokens` tokens.

        `is_owned` has the same meaning as in `add`.
        """
        if tokens is None:
            self.add((loss,), samples, is_owned=is_owned)
        elif samples:
            (total,) = self._sums
            self._sums = [total + loss.detach()]
            self._tokens = self._tokens + tokens

    def flush(self) -> None:
        """Sum the pending batches. Raises a deferred TensorError of `add`, on this rank only."""
        self._sums, self._samples = self._sum_pending()
        self._pending.clear()

    def local_sums(self) -> Tensor:
        """Return this rank's sum for each name, followed by its number of samples or tokens, float64 [names + 1].

        This does not change the state: later sums are bit-identical with and without this call.
        """
        sums, samples = self._sum_pending()
        return torch.stack([*sums, self._tokens + samples])

    def reduce_totals(self, communicator: Communicator) -> tuple[list[float], float]:
        """Return the sum for each name and the number of samples or tokens over all ranks. All ranks must call this
        method."""
        *sums, num_samples = communicator.allreduce(self.local_sums().detach(), op="sum").tolist()
        return sums, num_samples

    def clear(self) -> None:
        """Discard all batches."""
        self._pending: list[tuple[int, list[Tensor]]] = []
        self._sums = [torch.zeros((), dtype=torch.float64, device=self._device) for _ in self.names]
        self._samples = 0
        self._tokens = torch.zeros((), dtype=torch.float64, device=self._device)

    def state(self) -> dict[str, Any]:
        """Return this rank's sums and pending batches in host memory, for `load_state`. Each value must be a single
        number per batch.

        Pending batches are stored separately, so that sums after `load_state` are bit-identical to uninterrupted ones.
        """
        samples = [samples for samples, _ in self._pending]
        values = [torch.stack([value.to(self._device) for value in values]) for _, values in self._pending]
        return {
            "sums": torch.stack(self._sums).cpu(),
            "samples": self._samples,
            "tokens": self._tokens.cpu(),
            "waiting_samples": samples,
            "waiting": torch.stack(values).cpu() if values else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the sums that `state` returned on any rank."""
        self._sums = list(state["sums"].to(self._device).unbind())
        self._samples, self._tokens = state["samples"], state["tokens"].to(self._device)
        rows = [] if state["waiting"] is None else state["waiting"].to(self._device).unbind()
        self._pending = [(n, list(row.unbind())) for n, row in zip(state["waiting_samples"], rows, strict=True)]

    def load_sum(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Restore the total of the sums that `state` returned on several ranks."""
        self.clear()
        means_of_rank = Means(self.names, self._device)
        for state in states:
            means_of_rank.load_state(state)
            sums, samples = means_of_rank._sum_pending()
            self._sums = [total + addend for total, addend in zip(self._sums, sums, strict=True)]
            self._samples += samples
            self._tokens = self._tokens + means_of_rank._tokens

    def reduce(self, communicator: Communicator) -> dict[str, float]:
        """Return the mean over all ranks by name (NaN without samples), and discard all batches. All ranks must call
        this method."""
        sums, samples = self.reduce_totals(communicator)
        self.clear()
        means = [total / samples if samples else float("nan") for total in sums]
        return dict(zip(self.names, means, strict=True))

    def _sum_pending(self) -> tuple[list[Tensor], int]:
        # Nearly all batches have the same size. Therefore, sum a hundred of them with one stack, one sum and one
        # addition, without copying counts to the device, instead of with one addition per batch.
        sums, num_samples = self._sums, self._samples
        for (samples, *_), batches in groupby(self._pending, key=_layout):
            rows = [values for _, values in batches]
            sums = [
                total.add(_sum_batches(name, values, samples))
                for name, total, values in zip(self.names, sums, zip(*rows, strict=True), strict=True)
            ]
            num_samples += samples * len(rows)
        return sums, num_samples


def create_means(names: Sequence[str], device: torch.device, *, exact: bool) -> Means:
    """Return an object that computes means, with exact sums if `exact` is True."""
    from unitrain.metrics.exact_sums import ExactMeans  # which depends on this module

    return (ExactMeans if exact else Means)(names, device)


class MeanMetric:
    """Weighted mean of values over all batches of all ranks, such as an accuracy or a loss.

        accuracy = unitrain.MeanMetric(backend)
        for inputs, targets in unitrain.ShardedLoader(dataset, backend, batch_size=32, shuffle=False):
            accuracy.update((model(inputs).argmax(1) == targets).double().mean(), len(targets))
        print(accuracy.compute())

    Sums are accumulated in float64. The number of batches may differ between ranks and may be 0.

    With `exact`, sums are exact, so for the same batches the result is bit-identical for any number of ranks. Use it
    with logical ranks. `update` then synchronizes with the device once per 100 batches.
    """

    def __init__(self, backend: Communicator, *, exact: bool = False) -> None:
        check_instance("MeanMetric(backend)", backend, Communicator, "a backend", "Use MeanMetric(backend)")
        check_boolean("MeanMetric(exact=...)", exact)
        self._backend = backend
        self._means = create_means(("The value",), backend.device, exact=exact)

    def update(self, value: Tensor | float, count: Tensor | float = 1) -> None:
        """Add the mean `value` of `count` samples, tokens or pixels of this rank; or a tensor of `count` values.

        This does not communicate and, unless the metric is `exact`, does not synchronize with the device. A `count` of
        0 adds nothing. Raises TensorError for a count that is not a single non-negative number, and for a value that is
        not numeric or has the wrong shape. The shape may be checked only in a later `update` or in `compute`, and is
        not compared with a count on a GPU.
        """
        _check_value(value)
        if isinstance(count, Tensor):
            if count.is_meta:
                raise TensorError(_invalid_count_message("a tensor on device meta"))
            is_known = count.device.type == "cpu"  # reading a count on a GPU would synchronize with the device
            if count.dim() or (is_known and not 0 <= float(count) < math.inf):
                raise TensorError(_invalid_count_message(count.tolist() if count.numel() < 10 else list(count.shape)))
            value = _mean_in_float64(value, float(count) if is_known else None, self._backend.device)
            self._means.add_loss(torch.where(count > 0, value * count, 0.0), 1, count.detach())
            return
        number: Any = count  # numpy numbers are not subclasses of int and float
        is_real = isinstance(number, Real)
        if isinstance(number, bool) or not (is_real and 0 <= number <= sys.float_info.max):
            raise TensorError(_invalid_count_message(number))
        if isinstance(number, Integral) and number <= _MAX_INTEGER:
            self._means.add((value,), int(number))
        elif number:
            value = _mean_in_float64(value, float(number), self._backend.device)
            self._means.add_loss(value * float(number), 1, float(number))

    def compute(self) -> float:
        """Return the mean over all ranks, or NaN if no rank has values. All ranks must call this method. The
        result is the same on all ranks."""
        call_on_all_ranks(self._backend, self._means.flush)
        (total,), count = self._means.reduce_totals(self._backend)
        return total / count if count else math.nan

    def reset(self) -> None:
        """Discard the values of this rank."""
        self._means.clear()


def _invalid_count_message(count: object) -> str:
    return (
        f"MeanMetric.update(count=...) must be a number of at least 0, got {count}. "
        "Pass the number of samples of the mean: metric.update(loss, len(targets))."
    )


def detached_copy(value: Tensor | float) -> Tensor:
    """Return `value` as a detached copy, which the caller cannot overwrite.

    Results of differentiable operations are also copied, because `loss += penalty` overwrites them.
    """
    return (
        value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
    )


def _check_value(value: Any) -> None:
    """Raise TensorError unless `value` can be converted to a tensor of numbers."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return
        description = f"a tensor of shape {list(value.shape)} on device meta"
    else:
        try:
            if not torch.as_tensor(value, device="cpu").is_complex():
                return
            description = f"the complex number {value}"
        except (TypeError, ValueError, OverflowError, RuntimeError):
            description = describe_value(value)
    raise TensorError(
        f"MeanMetric.update(value) must be a number or a tensor of numbers, got {description}. "
        "Pass the mean over the batch: metric.update(loss, len(targets))."
    )


def _mean_in_float64(value: Tensor | float, count: float | None, device: torch.device) -> Tensor:
    """Return the mean of `value` in float64. Raises TensorError for a complex `value`, and for a shape other than []
    and [count]. The shape is not checked if `count` is None or 0."""
    value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    if value.is_complex() or (count is not None and count > 0 and value.shape not in ((), (count,))):
        raise TensorError(_invalid_value_message("The value", value, count or 0))
    return value.to(device, torch.float64).mean()


def _layout(batch: tuple[int, list[Tensor]]) -> tuple[Any, ...]:
    """Return the properties that must be equal for batches that are summed together. Stacking tensors of different
    dtypes would round values."""
    samples, values = batch
    return samples, *((value.shape, value.dtype, value.device) for value in values)


def sum_of_batch(name: str, value: Tensor, samples: int) -> Tensor:
    """Return the sum of `value` over the `samples` of one batch, float64. Raises TensorError for an invalid shape."""
    return _sum_batches(name, (value,), samples)


def _sum_batches(name: str, values: tuple[Tensor, ...], samples: int) -> Tensor:
    """Return the sum over all samples of several batches with `samples` samples each, float64."""
    shape = values[0].shape
    if shape not in ((), (samples,)) or values[0].is_complex():
        raise TensorError(_invalid_value_message(name, values[0], samples))
    total = torch.stack(values).sum(dtype=torch.float64)
    return total if shape else total * samples


def _invalid_value_message(name: str, value: Tensor, count: float) -> str:
    if value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{name} of a batch must be a real number, got dtype {dtype}. Take its absolute value: value.abs()."
    return (
        f"{name} of a batch of {count:g} must be one number or have shape [{count:g}], got shape {list(value.shape)}. "
        "Use the mean over the batch, for example with .mean()."
    )

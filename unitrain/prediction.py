"""The outputs of all ranks on all samples, put together in the dataset's order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.data.batch import map_parts
from unitrain.data.order import StrideUnit, strided_order
from unitrain.errors import DataError, ModelError

# How much of an output is gathered at a time, over all ranks: it bounds what that takes on the device.
_PIECE_BYTES = 1 << 26


@dataclass(frozen=True)
class _Kind:
    """What must be the same of an output in every batch and on every rank: its `place`, and how a sample looks."""

    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.place}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Outputs:
    """Collects the outputs of one rank, batch by batch, and gathers those of all.

    An output is a tensor whose first dimension is the sample, or lists, tuples, named tuples, mappings and dataclasses
    of such, nested at will, and None. They are kept on the CPU.
    """

    def __init__(self) -> None:
        self._layout: Any = None
        self._kinds: list[_Kind] = []
        self._batches: list[list[Tensor]] = []
        self._samples: list[int] = []

    def add_empty(self) -> None:
        """Take note of a batch without a sample, for which there is no output."""
        self._samples.append(0)

    def add(self, output: Any, samples: int) -> None:
        """Take the output of a batch of `samples`.

        Raises ModelError for what cannot be put together: an output without a first dimension of `samples`, anything
        but tensors, and what differs from the batches before.
        """
        tensors: list[Tensor] = []
        kinds: list[_Kind] = []

        def take(place: str, part: Any) -> Any:
            if part is None:
                return None
            if isinstance(part, Tensor):
                tensors.append(_on_cpu(place, part, samples))
                kinds.append(_Kind(place, tuple(part.shape[1:]), part.dtype))
                return kinds[-1]
            taken = map_parts(lambda step, inner: take(place + step, inner), part)
            if taken is part:
                raise ModelError(
                    f"predict collects tensors, and {place} is a {type(part).__name__}. "
                    "Leave it out of what forward returns, or make it a tensor with one row per sample."
                )
            return taken

        layout = take("output", output)
        if self._batches and kinds != self._kinds:
            raise ModelError(_disagreement("batches", self._kinds, kinds))
        self._layout, self._kinds = layout, kinds
        self._batches.append(tensors)
        self._samples.append(samples)

    def gather(self, communicator: Communicator, stride_unit: StrideUnit | None = None) -> Any:
        """Return the outputs of all ranks in rank order, nested as they were, on the CPU of every rank.

        Samples or batches that the ranks took in turn (`stride_unit`) are put back into the order of the data.
        All ranks call it; one without a batch takes part. Raises ModelError, on all ranks, where their outputs differ.
        """
        rows = self._samples if self._kinds or not self._batches else []
        lengths_here = rows if stride_unit == "batches" else [sum(rows)]
        here = (bool(self._batches), self._kinds, self._layout, lengths_here)
        everywhere: list[tuple[bool, list[_Kind], Any, list[int]]] = communicator.allgather_object(here)
        found = [(kinds, layout) for has_batches, kinds, layout, _ in everywhere if has_batches]
        if not found:
            raise DataError("There is no sample to predict for. Give data with at least one sample.")
        kinds, layout = found[0]
        for other, _ in found:
            if other != kinds:
                raise ModelError(_disagreement("ranks", kinds, other))
        lengths = [lengths for _, _, _, lengths in everywhere]
        counts = [sum(own) for own in lengths]
        whole = [self._gathered(index, kind, counts, communicator) for index, kind in enumerate(kinds)]
        if stride_unit is not None:
            order = strided_order(
                [torch.tensor(own if stride_unit == "batches" else [1] * sum(own)) for own in lengths]
            )
            whole = [output[order] for output in whole]
        self._batches.clear()
        self._samples.clear()
        return _filled(layout, iter(whole))

    def _gathered(self, index: int, kind: _Kind, counts: list[int], communicator: Communicator) -> Tensor:
        """Return one output of all samples, of which each rank has as many as `counts` says."""
        own = [batch[index] for batch in self._batches]
        for batch in self._batches:
            batch[index] = torch.empty(0)  # what is in `mine` is not kept twice
        mine = torch.cat(own) if own else torch.empty(0, *kind.shape, dtype=kind.dtype)
        del own
        whole = torch.empty(sum(counts), *kind.shape, dtype=kind.dtype)
        width = math.prod(kind.shape) * kind.dtype.itemsize
        if width == 0:
            return whole
        # As bytes, every dtype travels, those too that collectives do not carry.
        source, target = (tensor.reshape(-1).view(torch.uint8).reshape(-1, width) for tensor in (mine, whole))
        starts = [sum(counts[:rank]) for rank in range(communicator.size)]
        step = max(1, _PIECE_BYTES // (width * communicator.size))
        for first in range(0, max(counts), step):
            gathered = communicator.allgather(source[first : first + step].to(communicator.device)).cpu()
            taken = 0
            for start, count in zip(starts, counts, strict=True):
                length = min(max(0, count - first), step)
                target[start + first : start + first + length] = gathered[taken : taken + length]
                taken += length
        return whole


def _on_cpu(place: str, tensor: Tensor, samples: int) -> Tensor:
    if tensor.layout != torch.strided:
        raise ModelError(f"predict collects dense tensors, and {place} has layout {tensor.layout}. Use .to_dense().")
    if tensor.dim() == 0 or len(tensor) != samples:
        raise ModelError(
            f"predict collects tensors with one row per sample, and {place} has shape {list(tensor.shape)} for a batch "
            f"of {samples}. Leave it out of what forward returns, or bring the samples to the first dimension."
        )
    # A copy, also on the CPU: a part of a larger tensor would keep the whole of it.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _disagreement(between: str, one: list[_Kind], other: list[_Kind]) -> str:
    first, second = (
        ", ".join(str(kind) for kind in kinds if kind not in others) or "nothing more"
        for kinds, others in ((one, other), (other, one))
    )
    return (
        f"predict puts the outputs of all samples together, but they differ between {between}: {first} (per sample) "
        f"and {second}. Let forward return the same for every batch, for example padded to one length."
    )


def _filled(layout: Any, tensors: Any) -> Any:
    """Return `layout` with each kind of output replaced by the next of `tensors`."""
    if isinstance(layout, _Kind):
        return next(tensors)
    return map_parts(lambda _, part: _filled(part, tensors), layout)

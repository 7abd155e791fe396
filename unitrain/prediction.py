"""Collects the model outputs of all ranks in dataset order."""

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

# Maximum size of one gathered chunk over all ranks. Outputs are gathered in chunks to limit the memory on the device.
_MAX_GATHERED_BYTES = 1 << 26


@dataclass(frozen=True)
class OutputSpec:
    """Properties of an output tensor that must be equal in all batches and on all ranks.

    `path` is the expression that selects the tensor, such as "output['logits']", and `shape` the shape per sample.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.path}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Outputs:
    """Collects this rank's outputs per batch on the CPU, and gathers the outputs of all ranks.

    An output is None, a tensor whose first dimension indexes the samples, or any nesting of these in lists, tuples,
    named tuples, mappings and dataclasses.
    """

    def __init__(self) -> None:
        self._layout: Any = None
        self._specs: list[OutputSpec] = []
        self._batches: list[list[Tensor]] = []
        self._samples: list[int] = []

    def add_empty(self) -> None:
        """Record a batch without samples, for which the model is not called."""
        self._samples.append(0)

    def add(self, output: Any, samples: int) -> None:
        """Add the output of a batch of `samples` samples.

        Raises ModelError if the output cannot be concatenated: it contains objects other than tensors and None, the
        first dimension of a tensor is not `samples`, or the output differs in structure from earlier batches.
        """
        layout, specs, tensors = split_output(output, samples)
        if self._batches:
            check_same_specs("batches", self._specs, specs)
        self._layout, self._specs = layout, specs
        self._batches.append(tensors)
        self._samples.append(samples)

    def gather(self, communicator: Communicator, stride_unit: StrideUnit | None = None) -> Any:
        """Return the outputs of all ranks in rank order, with the same nesting, on the CPU of every rank.

        If samples or batches were assigned to ranks round-robin (`stride_unit`), the order of the data is restored. All
        ranks must call this method, including ranks without batches. Raises on all ranks: DataError if there are no
        samples, and ModelError if the structure of the outputs differs between ranks.
        """
        row_counts = self._samples if self._specs or not self._batches else []
        row_counts = row_counts if stride_unit == "batches" else [sum(row_counts)]
        summary = (bool(self._batches), self._specs, self._layout, row_counts)
        summaries: list[tuple[bool, list[OutputSpec], Any, list[int]]] = communicator.allgather_object(summary)
        layouts = [(specs, layout) for has_batches, specs, layout, _ in summaries if has_batches]
        if not layouts:
            raise DataError("predict got data without samples. Pass data with at least one sample.")
        specs, layout = layouts[0]
        for rank_specs, _ in layouts:
            check_same_specs("ranks", specs, rank_specs)
        row_counts_by_rank = [row_counts_of_rank for _, _, _, row_counts_of_rank in summaries]
        rows_by_rank = [sum(row_counts_of_rank) for row_counts_of_rank in row_counts_by_rank]
        outputs = [self._gather_output(index, spec, rows_by_rank, communicator) for index, spec in enumerate(specs)]
        if stride_unit is not None:
            lengths = row_counts_by_rank if stride_unit == "batches" else [[1] * num_rows for num_rows in rows_by_rank]
            order = strided_order(
                [torch.tensor(lengths_of_rank, dtype=torch.int64, device="cpu") for lengths_of_rank in lengths]
            )
            outputs = [output[order] for output in outputs]
        self._batches.clear()
        self._samples.clear()
        return _fill_layout(layout, iter(outputs))

    def _gather_output(
        self, index: int, spec: OutputSpec, rows_by_rank: list[int], communicator: Communicator
    ) -> Tensor:
        """Gather output `index` of all ranks, and return its rows in rank order on the CPU. All ranks must call this
        method. Rank i has rows_by_rank[i] rows.
        """
        batches_here = [batch[index] for batch in self._batches]
        for batch in self._batches:
            batch[index] = torch.empty(0, device="cpu")  # releases the rows, so that they are not in memory twice
        rows_here = (
            torch.cat(batches_here) if batches_here else torch.empty(0, *spec.shape, dtype=spec.dtype, device="cpu")
        )
        del batches_here
        outputs = torch.empty(sum(rows_by_rank), *spec.shape, dtype=spec.dtype, device="cpu")
        row_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        if row_bytes == 0:
            return outputs
        # The outputs are gathered as bytes, because collectives do not support every dtype.
        source, target = (
            tensor.reshape(-1).view(torch.uint8).reshape(-1, row_bytes) for tensor in (rows_here, outputs)
        )
        starts = [sum(rows_by_rank[:rank]) for rank in range(communicator.size)]
        step = max(1, _MAX_GATHERED_BYTES // (row_bytes * communicator.size))
        for first in range(0, max(rows_by_rank), step):
            gathered = communicator.allgather(source[first : first + step].to(communicator.device)).cpu()
            copied = 0
            for start, num_rows in zip(starts, rows_by_rank, strict=True):
                length = min(max(0, num_rows - first), step)
                target[start + first : start + first + length] = gathered[copied : copied + length]
                copied += length
        return outputs


def _copy_to_cpu(path: str, tensor: Tensor, samples: int) -> Tensor:
    if tensor.layout != torch.strided:
        raise ModelError(f"predict collects dense tensors, but {path} has layout {tensor.layout}. Use .to_dense().")
    if tensor.dim() == 0 or len(tensor) != samples:
        raise ModelError(
            f"predict collects tensors with one row per sample, but {path} has shape {list(tensor.shape)} for a batch "
            f"of {samples}. Do not return it from forward, or let its first dimension index the samples."
        )
    # Copy the rows even on the CPU, because a view would keep its base tensor in memory.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def split_output(output: Any, samples: int) -> tuple[Any, list[OutputSpec], list[Tensor]]:
    """Return the layout of the output of a batch, its OutputSpecs, and copies of its tensors on the CPU.

    The layout is the output with each tensor replaced by its OutputSpec.

    Raises ModelError if the output contains objects other than tensors and None, or if the first dimension of a tensor
    is not `samples`.
    """
    tensors: list[Tensor] = []
    specs: list[OutputSpec] = []

    def replace_tensors(path: str, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, Tensor):
            tensors.append(_copy_to_cpu(path, value, samples))
            specs.append(OutputSpec(path, tuple(value.shape[1:]), value.dtype))
            return specs[-1]
        copied = map_parts(lambda step, inner: replace_tensors(path + step, inner), value)
        if copied is value:
            raise ModelError(
                f"predict collects tensors, but {path} is an object of class {type(value).__name__}. "
                "Do not return it from forward, or make it a tensor with one row per sample."
            )
        return copied

    return replace_tensors("output", output), specs, tensors


def check_same_specs(subject: str, left: list[OutputSpec], right: list[OutputSpec]) -> None:
    """Raise ModelError if `left` and `right`, the OutputSpecs of two batches or ranks, differ. `subject` is "batches"
    or "ranks", for the message."""
    if left == right:
        return
    first, second = (
        ", ".join(str(spec) for spec in specs if spec not in other_specs) or "no other output"
        for specs, other_specs in ((left, right), (right, left))
    )
    raise ModelError(
        f"predict concatenates the outputs of all samples, but they differ between {subject}: {first} (per sample) "
        f"and {second}. Let forward return the same shapes for every batch, for example padded to one length, "
        "and the same names and dtypes."
    )


def _fill_layout(layout: Any, tensors: Any) -> Any:
    """Return `layout` with each OutputSpec replaced by the next tensor of the iterator `tensors`."""
    if isinstance(layout, OutputSpec):
        return next(tensors)
    return map_parts(lambda _, part: _fill_layout(part, tensors), layout)

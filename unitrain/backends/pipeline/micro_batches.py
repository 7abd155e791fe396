"""Division of a batch into micro-batches, and the weights with which their mean losses sum to the mean loss of the
batch.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unitrain.backends.tensors import as_bytes
from unitrain.errors import ModelError, TensorError
from unitrain.torch_compat import tree_leaves, tree_map_only

LossFunction = Callable[[Any, Any], Tensor]


class WeightedTargets(NamedTuple):
    """The targets of a micro-batch, and the weight of its loss: its fraction of the samples times the loss weight."""

    values: Any
    weight: float


def micro_batch_sizes(num_samples: int, max_micro_batches: int) -> list[int]:
    """Return the numbers of samples of the micro-batches, which differ by at most 1.

    A batch with fewer samples than `max_micro_batches` has one micro-batch per sample.
    """
    count = min(num_samples, max_micro_batches)
    return [num_samples // count + (index < num_samples % count) for index in range(count)]


def order_by_replica(batch: Any, num_replicas: int) -> Any:
    """Return `batch`, the batch of one process, with the samples sorted by replica: first those of replica 0, then
    those of replica 1, and so on.

    In the original batch, consecutive samples belong to consecutive replicas, as in a ShardedLoader.
    """
    return tree_map_only(
        Tensor, lambda tensor: torch.cat([tensor[replica::num_replicas] for replica in range(num_replicas)]), batch
    )


def split_batch(inputs: Any, max_micro_batches: int, num_replicas: int = 1) -> list[Tensor]:
    """Return the micro-batches of `inputs`, a dense tensor [samples, ...] sorted by replica. Each replica has at most
    `max_micro_batches` micro-batches. Raises TensorError for any other `inputs`."""
    if isinstance(inputs, Tensor) and inputs.is_nested:
        raise TensorError(
            "The inputs of a Pipeline must be one dense tensor, but the tensor is nested. Use "
            "tensor.to_padded_tensor(0.0)."
        )
    if not isinstance(inputs, Tensor) or inputs.dim() == 0 or len(inputs) == 0:
        description = (
            f"shape {list(inputs.shape)}"
            if isinstance(inputs, Tensor)
            else f"an object of class {type(inputs).__name__}"
        )
        raise TensorError(
            f"The inputs of a Pipeline must be one tensor [samples, ...], got {description}. Pass a batch."
        )
    if inputs.is_meta or inputs.layout is not torch.strided:
        problem, fix = f"has layout {inputs.layout}", "Use tensor.to_dense()"
        if inputs.is_meta:
            problem, fix = "has no data, because it is on the device 'meta'", "Pass a batch with data"
        raise TensorError(f"The inputs of a Pipeline must be one dense tensor, but the tensor {problem}. {fix}.")
    counts = [len(range(replica, len(inputs), num_replicas)) for replica in range(num_replicas)]
    sizes = [size for count in counts if count for size in micro_batch_sizes(count, max_micro_batches)]
    return list(inputs.split(sizes))


def split_targets(targets: Any, sizes: list[int], loss_weight: float) -> list[WeightedTargets]:
    """Return the targets of the micro-batches, which have `sizes` samples.

    `targets` is a tensor [samples, ...], or tuples, lists and dictionaries of such tensors. Raises TensorError if a
    tensor has a different number of samples.
    """
    samples = sum(sizes)
    for leaf in tree_leaves(targets):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != samples):
            raise TensorError(
                f"The targets of a Pipeline have shape {list(leaf.shape)}, but there are {samples} inputs. Pass "
                "targets of shape [samples, ...]."
            )
    parts = []
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        values = tree_map_only(Tensor, operator.itemgetter(part), targets)
        parts.append(WeightedTargets(values, size / samples * loss_weight))
        start += size
    return parts


def weighted_loss(loss_fn: LossFunction, output: Any, target: WeightedTargets) -> Tensor:
    """Return the loss of a micro-batch times its weight. Raises ModelError unless it is one floating-point number."""
    loss = loss_fn(output, target.values)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        description = (
            f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"an object of class {type(loss).__name__}"
        )
        raise ModelError(
            f"The loss_fn of a Pipeline must return the mean over the samples of a micro-batch, one floating-point "
            f"number, got {description}. Return loss.mean()."
        )
    return loss * target.weight


def checksum(values: Any) -> int:
    """Return a hash of the shapes, dtypes and contents of the tensors in `values`."""
    crc = 0
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            crc = zlib.crc32(f"{leaf.dtype} {list(leaf.shape)}".encode(), crc)
            crc = zlib.crc32(as_bytes(leaf.cpu()).numpy().data, crc)
    return crc


def specification(micro_batch: Tensor) -> tuple[object, ...]:
    """Return the properties of a micro-batch of inputs that determine the shapes and dtypes of the tensors between
    stages: its shape and dtype, and the autocast dtype, or None without autocast."""
    device_type = micro_batch.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return (tuple(micro_batch.shape), micro_batch.dtype, autocast)

"""Time and memory of the blocks of a sequential model, measured on one micro-batch."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.pipeline.partition import StageCost
from unitrain.errors import ModelError
from unitrain.torch_compat import TorchDispatchMode, tree_leaves, tree_map_only

_REPETITIONS = 3
# Weights, gradients and two states of an optimizer such as Adam, in the dtype of the weights.
_BYTES_PER_TRAINED_BYTE = 4


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block for one micro-batch.

    Args:
        seconds: time of its forward and backward pass, the minimum of several repetitions.
        state_bytes: weights, gradients, optimizer state (estimated as for Adam) and buffers.
        held_bytes: memory between its forward and backward pass: activations and its output.
        extra_bytes: additional memory during its forward or backward pass, such as recomputed activations.
        input_bytes: size of its input.
        can_start_stage: whether its input is a tensor that requires grad, so that a stage can start with this block.
        is_trained: whether it has trainable parameters.
    """

    seconds: float
    state_bytes: int
    held_bytes: int
    extra_bytes: int
    input_bytes: int
    can_start_stage: bool
    is_trained: bool


def measure_blocks(blocks: Sequence[tuple[str, nn.Module]], inputs: Any, device: torch.device) -> list[BlockCost]:
    """Run `inputs`, a micro-batch, through the blocks in order, with a forward and a backward pass of each block.

    Return the cost of each block. A block is on `device` only while it is measured. Parameters, gradients, buffers and
    random number generators are unchanged afterwards. Raises ModelError if a block fails.
    """
    costs = []
    values: Any = inputs
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for name, block in blocks:
            original_device = next((tensor.device for tensor in [*block.parameters(), *block.buffers()]), device)
            try:
                with _restoring_state(block.to(device)):
                    cost, values = _measure(block, values, device)
            except Exception as error:
                raise ModelError(
                    f"Block {name!r} failed on a micro-batch of example_inputs: {type(error).__name__}: {error}. Pass "
                    "inputs that model(example_inputs) accepts."
                ) from error
            finally:
                block.to(original_device)
            costs.append(cost)
    return costs


def create_time_cost(costs: Sequence[BlockCost]) -> StageCost:
    """Return the function that computes the cost of a stage, in seconds per micro-batch."""

    def cost(stage: int, start: int, stop: int) -> float:
        blocks = costs[start:stop]
        return sum(block.seconds for block in blocks) if _is_valid_stage(blocks, stage) else math.inf

    return cost


def create_memory_cost(costs: Sequence[BlockCost], stages: int, micro_batches: int, schedule: str) -> StageCost:
    """Return the function that computes the cost of a stage: its peak memory in bytes. A stage holds the activations of
    several micro-batches at the same time, and their number depends on the schedule."""

    def cost(stage: int, start: int, stop: int) -> float:
        blocks = costs[start:stop]
        if not _is_valid_stage(blocks, stage):
            return math.inf
        held_micro_batches = min(micro_batches, stages - stage) if schedule == "1f1b" else micro_batches
        held_bytes = sum(block.held_bytes for block in blocks) + (blocks[0].input_bytes if stage else 0)
        state = sum(block.state_bytes for block in blocks)
        return float(state + held_micro_batches * held_bytes + max(block.extra_bytes for block in blocks))

    return cost


def _is_valid_stage(blocks: Sequence[BlockCost], stage: int) -> bool:
    return any(block.is_trained for block in blocks) and (stage == 0 or blocks[0].can_start_stage)


def _measure(block: nn.Module, values: Any, device: torch.device) -> tuple[BlockCost, Any]:
    """Return the cost of `block` and its detached output."""
    can_start = isinstance(values, Tensor) and values.requires_grad
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    tensors = [*block.parameters(), *block.buffers()]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # as in all micro-batches but the first one
    inputs = _copy_tensors(values)
    with _LiveStorages([*tensors, *(parameter.grad for parameter in trained), *tree_leaves(inputs)]) as storages:
        output = block(inputs)
        held_bytes = storages.live_bytes
        _run_backward(output)
        peak = storages.peak_bytes
    seconds = math.inf
    for _ in range(_REPETITIONS):
        inputs = _copy_tensors(values)
        _synchronize(device)
        start_time = time.perf_counter()
        _run_backward(block(inputs))
        _synchronize(device)
        seconds = min(seconds, time.perf_counter() - start_time)
    trained_bytes = sum(parameter.nbytes for parameter in trained)
    other_bytes = sum(tensor.nbytes for tensor in tensors) - trained_bytes
    cost = BlockCost(
        seconds=seconds,
        state_bytes=_BYTES_PER_TRAINED_BYTE * trained_bytes + other_bytes,
        held_bytes=held_bytes,
        extra_bytes=peak - held_bytes,
        input_bytes=sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor)),
        can_start_stage=can_start,
        is_trained=bool(trained),
    )
    return cost, _map_tensors(output, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def _run_backward(output: Any) -> None:
    tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _copy_tensors(values: Any) -> Any:
    """Return copies of the tensors in `values`. They are not leaves, so that a block may overwrite its input."""
    return _map_tensors(values, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad).clone())


def _map_tensors(values: Any, function: Any) -> Any:
    return tree_map_only(Tensor, function, values)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _restoring_state(block: nn.Module) -> Iterator[None]:
    """Context manager that restores the gradients and buffers of `block`."""
    gradients = [(parameter, parameter.grad) for parameter in block.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of the tensors that are created inside the context and still exist. Tensors that share memory
    with a tensor in `known_tensors` are not counted."""

    def __init__(self, known_tensors: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._addresses = {value.untyped_storage().data_ptr() for value in known_tensors if isinstance(value, Tensor)}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._addresses:
            return
        self._addresses.add(address)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._addresses.discard(address)
        self.live_bytes -= size

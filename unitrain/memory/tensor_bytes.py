"""Bytes of the parameters, gradients and optimizer state of a training process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Number of parameter-sized tensors that torch.optim's optimizers store per parameter.
_STATE_TENSORS: dict[type[Optimizer], int] = {
    torch.optim.Adadelta: 2, torch.optim.Adagrad: 1, torch.optim.Adam: 2, torch.optim.Adamax: 2,
    torch.optim.AdamW: 2, torch.optim.ASGD: 1, torch.optim.NAdam: 2, torch.optim.RAdam: 2,
    torch.optim.RMSprop: 1, torch.optim.Rprop: 2, torch.optim.SGD: 0,
}  # fmt: skip
_OPTIONS_THAT_ADD_STATE = ("amsgrad", "centered", "momentum")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor (torch's DTensor or a ShardedGradient), or `tensor` itself."""
    if hasattr(tensor, "to_local"):
        part: Tensor = tensor.to_local()
    else:
        part = getattr(tensor, "local", tensor)
    return part.detach()


def element_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the elements of `tensors` on this rank. Each tensor object counts once."""
    return sum(part.numel() * part.element_size() for part in map(_dense, _distinct_tensors(tensors)))


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of `tensors` by address. A storage that several tensors share has one entry."""
    storages = {}
    for tensor in tensors:
        storage = _dense(tensor).untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return storages


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of the storages of `tensors`, including elements that no tensor uses."""
    return sum(storage.nbytes() for storage in storages_of(tensors).values())


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors in the state of `optimizer`, including those in nested containers."""
    for entry in optimizer.state.values():
        yield from _tensors(entry)


def is_state_complete(optimizer: Optimizer) -> bool:
    """Return whether this rank has the complete state of each parameter with a gradient. If not, the state is
    sharded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter.grad is None:
                continue
            if hasattr(parameter, "to_local"):
                return False
            if parameter not in optimizer.state:
                if _num_state_tensors(optimizer, group) == 0:  # SGD without momentum
                    continue
                return False
            for value in optimizer.state[parameter].values():
                # The state of a shard of a parameter is one-dimensional.
                if isinstance(value, Tensor) and value.dim() == 1 != parameter.dim() and value.numel() != 1:
                    return False
    return True


def formula_state_bytes(optimizer: Optimizer) -> int | None:
    """Return the bytes of the complete state, computed from the optimizer class: Adam, for example, stores two tensors
    per parameter.

    Step counters are not included. Returns None for optimizers outside torch.optim, and for optimizers whose state does
    not have the size of the parameters, such as LBFGS.
    """
    total = 0
    for group in optimizer.param_groups:
        copies = _num_state_tensors(optimizer, group)
        if copies is None:
            return None
        total += copies * sum(
            parameter.numel() * parameter.element_size() for parameter in group["params"] if parameter.requires_grad
        )
    return total


def _num_state_tensors(optimizer: Optimizer, group: dict[str, Any]) -> int | None:
    """Return the number of tensors that `optimizer` stores per parameter of `group`, or None if it is unknown."""
    count = _STATE_TENSORS.get(type(optimizer))
    return None if count is None else count + sum(bool(group.get(name)) for name in _OPTIONS_THAT_ADD_STATE)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _distinct_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor with the elements of `tensor`: the values of a sparse gradient, or this rank's shard."""
    part = local_tensor(tensor)
    return part.coalesce().values() if part.layout == torch.sparse_coo else part

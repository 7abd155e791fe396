"""The optimizer state of one rank as chunks of tensors, for checkpoints that all ranks write and read independently.

The state may be replicated, sharded by `ShardedState` (ZeRO-1), or consist of DTensors (FSDP2). Parameters are
identified by their index in `param_groups`, as in `Optimizer.state_dict`. Nothing in this module communicates. If
parameters are DTensors, call its functions inside the context manager `state_dicts_of_shards`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.backends.optimizer_loading import load_optimizer_state
from unitrain.backends.sharding.optimizer_state import ShardedState, sharded_state
from unitrain.backends.sharding.tensor_chunks import (
    TensorChunk,
    empty_like_local,
    is_distributed_tensor,
    is_storable,
    local_chunks,
    own_chunks,
    range_chunks,
    whole_chunk,
)


@dataclass(frozen=True)
class StateKey:
    """Location of a tensor in the state of an optimizer: `state[index][key]`."""

    index: int
    key: Any


@dataclass
class OwnState:
    """The portion of an optimizer's state that this rank writes.

    `keys` maps the names of the tensors in `chunks` to their locations. `values` contains all other values, by
    index and key.
    """

    chunks: list[TensorChunk] = field(default_factory=list)
    keys: dict[str, StateKey] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)


class StoredState(ABC):
    """The optimizer state in a checkpoint."""

    @abstractmethod
    def tensor_names(self, index: int) -> Mapping[Any, str]:
        """Return the names of the tensors in the state of parameter `index`, by key."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of tensor `name`."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of tensor `name`."""

    @abstractmethod
    def values(self) -> Mapping[Any, Any]:
        """Return the values that are not tensors, by index and key."""

    @abstractmethod
    def read(self, chunks: Iterable[TensorChunk]) -> None:
        """Copy the stored elements of each chunk into its data."""


def own_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str], rank: int, size: int) -> OwnState:
    """Return the portion of the state of `optimizer` that this rank writes. Exactly one rank writes each element.

    `names` are the names of the parameters. The tensor `state[parameter][key]` is named `state.NAME.KEY`, as in
    `torch.distributed.checkpoint.state_dict` with `flatten_optimizer_state_dict`.
    """
    sharded = sharded_state(optimizer)
    state = (optimizer.state_dict() if sharded is None else sharded.local_state_dict(optimizer))["state"]
    own, replicated = OwnState(), dict[str, Tensor]()
    if rank == 0:
        own.values = {key: entry for key, entry in state.items() if not _is_entry(key, entry)}
    for index, parameter in enumerate(_parameters(optimizer)):
        entry = state.get(index)
        if not _is_entry(index, entry):
            continue
        for key, value in entry.items():
            name = f"state.{names.get(parameter, index)}.{key}"
            is_tensor = is_storable(value) and isinstance(key, str | int)
            if sharded is None:
                if is_tensor:
                    replicated[name] = value
                elif rank == 0:
                    own.values.setdefault(index, {})[key] = value
            elif is_tensor:
                own.chunks += _chunks_of_sharded(sharded, parameter, name, value)
            elif sharded.owns_start(parameter):
                own.values.setdefault(index, {})[key] = value
            own.keys[name] = StateKey(index, key)
    own.chunks += own_chunks(replicated, rank, size)
    kept = {chunk.name for chunk in own.chunks}
    own.keys = {name: place for name, place in own.keys.items() if name in kept}
    return own


def _is_entry(key: Any, entry: Any) -> bool:
    return isinstance(key, int) and isinstance(entry, dict)


def _chunks_of_sharded(sharded: ShardedState, parameter: nn.Parameter, name: str, value: Tensor) -> list[TensorChunk]:
    owned = sharded.owned_range(parameter)
    assert owned is not None
    start, stop = owned
    if stop - start < parameter.numel() and value.shape == (stop - start,):
        return range_chunks(name, parameter, start, stop, value.detach())
    return [whole_chunk(name, value)] if sharded.owns_start(parameter) else []


def parameter_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups as in `Optimizer.state_dict()["param_groups"]`: hyperparameters and parameter
    indices. Does not communicate."""
    sharded = sharded_state(optimizer)
    state_dict = optimizer.state_dict() if sharded is None else sharded.local_state_dict(optimizer)
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    return groups


def load_own_state(optimizer: Optimizer, stored: StoredState) -> None:
    """Load this rank's portion of the state from `stored`. The hyperparameters do not change.

    Raises ModelError on every rank if the state is sharded by element and a shape does not match its parameter.
    """
    sharded = sharded_state(optimizer)
    loaded = {key: value for key, value in stored.values().items() if not _is_entry(key, value)}
    for index, parameter in enumerate(_parameters(optimizer)):
        tensors, values = stored.tensor_names(index), stored.values().get(index)
        if sharded is not None:
            for key, name in tensors.items():
                sharded.check_state_shape(parameter, key, stored.shape(name))
            if sharded.owned_range(parameter) is None:
                continue
        entry = {key: _load_tensor(sharded, parameter, name, stored) for key, name in tensors.items()}
        if isinstance(values, dict):
            entry |= values
        if entry or isinstance(values, dict):
            loaded[index] = entry
    state_dict = {"state": loaded, "param_groups": parameter_groups(optimizer)}
    if sharded is None:
        load_optimizer_state(optimizer, state_dict)
    else:
        sharded.load_local_state_dict(optimizer, state_dict)


def _load_tensor(sharded: ShardedState | None, parameter: nn.Parameter, name: str, stored: StoredState) -> Tensor:
    """Return the elements of tensor `name` that this rank stores as state of `parameter`."""
    shape, dtype = stored.shape(name), stored.dtype(name)
    loaded: Tensor
    if is_distributed_tensor(parameter) and shape == tuple(parameter.shape):
        _, loaded = empty_like_local(parameter, dtype)
        stored.read(local_chunks(name, loaded))
        return loaded
    owned = None if sharded is None else sharded.owned_range(parameter)
    if owned is not None and owned[1] - owned[0] < parameter.numel() and shape == tuple(parameter.shape):
        loaded = torch.empty(owned[1] - owned[0], dtype=dtype, device="cpu")
        stored.read(range_chunks(name, parameter, *owned, loaded))
        return loaded
    same_shape = shape == tuple(parameter.shape)
    loaded = (
        torch.empty_like(parameter, dtype=dtype, device="cpu")
        if same_shape
        else torch.empty(shape, dtype=dtype, device="cpu")
    )
    loaded = loaded.detach().requires_grad_(False)
    stored.read([whole_chunk(name, loaded)])
    return loaded


def _parameters(optimizer: Optimizer) -> Sequence[nn.Parameter]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))

"""ZeRO-1: optimizer state sharded across ranks. Each rank updates its shards of the parameters and broadcasts them.

Source: Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054. The optimizer remains the user's object. Its
`param_groups` contain all parameters, except during `step`, when they contain only this rank's shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain import validation
from unitrain.backends import checks
from unitrain.backends.base import Communicator, ShardingMode
from unitrain.backends.broadcasts import MAX_GATHERED_BYTES
from unitrain.backends.capabilities import SupportsAsyncBroadcasts
from unitrain.backends.gradients.local_gradients import step_pre_hook
from unitrain.backends.objects import broadcast_with_tensors
from unitrain.backends.optimizer_loading import load_optimizer_state
from unitrain.backends.sharding.gradient import ShardedGradient
from unitrain.backends.sharding.gradient_reducer import GradientReducer
from unitrain.backends.sharding.partition import (
    ParameterShard,
    divide_elements,
    divide_tensors,
    flat_view,
    flatten_like,
    iterate_batches,
)
from unitrain.errors import ModelError
from unitrain.torch_compat import (
    add_innermost_step_hooks,
    disable_compile,
    is_nested_step,
    step_without_hooks,
)

# Elementwise optimizers. Their tensors can be divided among ranks.
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
# Each rank updates about this many bytes, or fewer in large jobs, and broadcasts them while it updates the next ones.
_BATCH_BYTES = 2**24

# Starts to broadcast pairs of a tensor and its root in place, and returns a function that waits for all broadcasts.
StartBroadcasts = Callable[[list[tuple[Tensor, int]]], Callable[[], None]]

_sharded_states: WeakKeyDictionary[Optimizer, ShardedState] = WeakKeyDictionary()


def shard_optimizer_state(
    optimizer: Optimizer,
    communicator: Communicator,
    *,
    shard: ShardingMode = "state",
    reducer: GradientReducer | None = None,
    start_broadcasts: StartBroadcasts | None = None,
) -> None:
    """Shard the state of `optimizer` across the ranks of `communicator`. All ranks must call this function, with equal
    parameters.

    Elementwise optimizers of torch.optim are sharded by element, all others by tensor. The state must be complete and
    equal on all ranks. Afterwards, all ranks must call `optimizer.state_dict()`, which gathers the complete state on
    every rank. An unsharded optimizer can load this state. With `shard="gradients"`, `reducer` shards the gradients in
    the same way; it is None if gradients are complete. `start_broadcasts` starts the broadcasts of updated parameters,
    by default those of `communicator`. Raises ModelError if the optimizer is already sharded by a different backend or
    with a different model.
    """
    checks.check_is_optimizer("shard_optimizer_state(optimizer)", optimizer)
    fix = "Use shard_optimizer_state(optimizer, backend)"
    validation.check_instance("shard_optimizer_state(communicator)", communicator, Communicator, "a backend", fix)
    sharded = _sharded_states.get(optimizer)
    if sharded is None:
        _sharded_states[optimizer] = ShardedState(
            optimizer, communicator, shard, reducer, start_broadcasts or partial(_start_broadcasts, communicator)
        )
    elif not sharded.belongs_to(communicator, reducer):
        raise ModelError(
            "The state of this optimizer is sharded over the ranks of another backend or model. Build a new optimizer, "
            "and load the state that was saved before: optimizer.load_state_dict(state)."
        )


def sharded_state(optimizer: Optimizer) -> ShardedState | None:
    """Return the hooks that shard the state of `optimizer`, or None if `shard_optimizer_state` was not called for
    it."""
    return _sharded_states.get(optimizer)


@dataclass
class _OwnShard:
    """The shard of `parameter` that this rank updates. `local` is the parameter itself, or a view of some elements."""

    parameter: nn.Parameter
    local: nn.Parameter
    shard: ParameterShard

    @property
    def is_whole(self) -> bool:
        return self.local is self.parameter


@dataclass
class _Batch:
    """Shards of parameters that the ranks update and broadcast together.

    `own_shards_by_group` contains this rank's shards per parameter group, and `shards` the shards of all ranks.
    """

    own_shards_by_group: defaultdict[int, list[_OwnShard]] = field(default_factory=lambda: defaultdict(list))
    shards: list[tuple[nn.Parameter, ParameterShard]] = field(default_factory=list)


class ShardedState:
    """Hooks with which `optimizer` updates this rank's shards of the parameters in each step.

    Outside `step`, the optimizer has all parameters, and `optimizer.state` has entries for the parameters that this
    rank owns completely or partially. State tensors of a partially owned parameter are 1-D, in storage order.
    Parameters added by `add_param_group` are partitioned at the next step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        communicator: Communicator,
        shard: ShardingMode,
        reducer: GradientReducer | None,
        start_broadcasts: StartBroadcasts,
    ) -> None:
        self._communicator, self.sharding_mode, self._reducer = communicator, shard, reducer
        self._start_broadcasts = start_broadcasts
        # Sharded gradients of completely owned parameters, which are replaced by plain tensors during a step.
        self._replaced_gradients: list[tuple[nn.Parameter, ShardedGradient]] = []
        self._is_elementwise = type(optimizer) in ELEMENTWISE
        self._own_shards: dict[nn.Parameter, _OwnShard] = {}
        self._shards: dict[nn.Parameter, list[ParameterShard]] = {}
        self._batches: list[_Batch] = []
        # Optimizers that are not part of torch may also update parameters without gradients.
        self._may_update_unused = not type(optimizer).__module__.startswith("torch.optim.")
        self._known_parameter_ids: list[list[int]] = []
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}
        self._is_stepping, self._nested_steps = False, 0
        self._has_local_state_dicts = False  # whether state dicts contain only the state of this rank's shards
        self._complete_groups: list[list[nn.Parameter]] | None = None  # during a step: the original parameters
        # (address of the parameter, view) by parameter and start of the shard.
        self._views: dict[tuple[nn.Parameter, int], tuple[int, Tensor]] = {}
        self._pending_broadcasts: list[Callable[[], None]] = []
        self._divide_new_parameters(optimizer)
        begin = step_pre_hook(self._begin_step)
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self._restore_unless_nested(optimizer))
        add_innermost_step_hooks(
            optimizer,
            lambda optimizer, args, kwargs: None if self._nested_steps else begin(optimizer, args, kwargs),
            lambda optimizer, args, kwargs: self._end_step(optimizer),
        )
        optimizer.register_state_dict_pre_hook(self._restore)
        optimizer.register_state_dict_post_hook(self._complete_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._select_own_state)
        optimizer.__getstate__ = reject_copy  # type: ignore[method-assign]

    def belongs_to(self, communicator: Communicator, reducer: GradientReducer | None) -> bool:
        """Return whether the state is sharded across the ranks of `communicator`, with the gradients of `reducer`."""
        return self._communicator is communicator and self._reducer is reducer

    def local_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict with only the state of this rank's shards. Does not communicate."""
        with self._local_state_dicts():
            return optimizer.state_dict()

    def load_local_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a state dict with the state of this rank's shards, as returned by `local_state_dict`. Does not
        communicate.
        """
        with self._local_state_dicts():
            load_optimizer_state(optimizer, state_dict)

    def owned_range(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return the range of elements of `parameter`, in storage order, whose state this rank stores, or None."""
        own_shard = self._own_shards.get(parameter)
        if own_shard is None:
            return None
        self._check_storage_order(parameter)
        return own_shard.shard.start, own_shard.shard.stop

    def owns_start(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank stores the state of the first element of `parameter`. Exactly one rank does."""
        own_shard = self._own_shards.get(parameter)
        return own_shard is not None and own_shard.shard.start == 0

    def check_state_shape(self, parameter: nn.Parameter, key: Any, shape: Sequence[int]) -> None:
        """Raise ModelError if a loaded tensor, the state `key` of `parameter`, has an unsuitable `shape`. The error is
        the same on every rank."""
        if self._is_elementwise:
            _check_shape(parameter, key, shape)

    @contextmanager
    def _local_state_dicts(self) -> Iterator[None]:
        self._has_local_state_dicts = True
        try:
            yield
        finally:
            self._has_local_state_dicts = False

    # --- partitioning of the parameters ---

    def _divide_new_parameters(self, optimizer: Optimizer) -> None:
        """Partition the parameters that are not yet partitioned, and drop the state of other ranks' shards."""
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if ids == self._known_parameter_ids:
            return
        self._known_parameter_ids = ids
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        new = [parameter for parameter in parameters if parameter not in self._shards]
        # Frozen parameters have no state, so they are partitioned separately from the others.
        for requires_grad in (True, False):
            self._divide([parameter for parameter in new if parameter.requires_grad == requires_grad])
        self._arrange_batches(optimizer, parameters)
        for parameter in new:
            if parameter in optimizer.state:
                entry = self._own_entry(parameter, optimizer.state.pop(parameter))
                if entry is not None:
                    optimizer.state[parameter] = entry

    def _divide(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            self._strides[parameter] = parameter.stride()
            self._shards[parameter] = self._assigned_shards(parameter) or []
        new = [parameter for parameter in parameters if not self._shards[parameter]]
        for shard in self._new_shards(new):
            self._shards[new[shard.index]].append(shard)
        if self._reducer is not None:
            for parameter in new:
                self._reducer.assign(parameter, self._shards[parameter])
        for parameter in parameters:
            for shard in self._shards[parameter]:
                if shard.owner == self._communicator.rank:
                    is_whole = shard.stop - shard.start == parameter.numel()
                    view = parameter if is_whole else self._view(parameter, shard)
                    local = parameter if is_whole else nn.Parameter(view, parameter.requires_grad)
                    self._own_shards[parameter] = _OwnShard(parameter, local, shard)

    def _assigned_shards(self, parameter: nn.Parameter) -> list[ParameterShard] | None:
        """Return the shards of the gradient of `parameter`, or None if there are none or if the optimizer cannot use
        them for its state."""
        shards = None if self._reducer is None else self._reducer.shards_of(parameter)
        return shards if shards is None or self._is_elementwise or len(shards) == 1 else None

    def _new_shards(self, parameters: Sequence[nn.Parameter]) -> list[ParameterShard]:
        sizes = [parameter.numel() for parameter in parameters]
        if not self._is_elementwise:
            return divide_tensors(sizes, self._communicator.size)
        if self._reducer is not None:
            return self._reducer.divide(parameters)
        return divide_elements(sizes, self._communicator.size)

    def _arrange_batches(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        groups = [group_index for group_index, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        shards = [
            replace(shard, index=index)
            for index, parameter in enumerate(parameters)
            for shard in self._shards[parameter]
        ]
        # `step` of an elementwise optimizer is called once per batch. Other optimizers may count the calls, so they get
        # a single batch.
        limit = min(_BATCH_BYTES, MAX_GATHERED_BYTES // self._communicator.size) if self._is_elementwise else 2**62
        self._batches = []
        for batch_shards in iterate_batches(shards, [parameter.element_size() for parameter in parameters], limit):
            batch = _Batch(shards=[(parameters[shard.index], shard) for shard in batch_shards])
            for shard in batch_shards:
                if shard.owner == self._communicator.rank:
                    own_shard = self._own_shards[parameters[shard.index]]
                    batch.own_shards_by_group[groups[shard.index]].append(own_shard)
            self._batches.append(batch)

    def _view(self, parameter: nn.Parameter, shard: ParameterShard) -> Tensor:
        """Return the elements of `shard` as a 1-D view. Views are cached until the memory of the parameter changes."""
        key, address = (parameter, shard.start), parameter.data_ptr()
        cached_address, view = self._views.get(key, (None, None))
        if view is None or cached_address != address:
            self._check_storage_order(parameter)
            _, view = self._views[key] = (address, flat_view(parameter.detach())[shard.start : shard.stop])
        return view

    def _check_storage_order(self, parameter: nn.Parameter) -> None:
        """Raise ModelError if the memory format has changed, because the shards would then contain different
        elements."""
        if len(self._shards[parameter]) > 1 and parameter.stride() != self._strides[parameter]:
            raise ModelError(
                f"A parameter of shape {list(parameter.shape)} had stride {list(self._strides[parameter])} when its "
                f"optimizer state was sharded, and has stride {list(parameter.stride())} now. Change the memory format "
                "before backend.distributed_optimizer: model.to(memory_format=torch.channels_last)."
            )

    # --- a step ---

    @disable_compile
    def _restore_unless_nested(self, optimizer: Optimizer) -> None:
        """Start a step. A nested step, such as `super().step()`, updates the shards that the optimizer currently
        holds."""
        if self._is_stepping and is_nested_step(optimizer):
            self._nested_steps += 1
            return
        self._is_stepping, self._nested_steps = True, 0
        self._restore(optimizer)

    def _begin_step(self, optimizer: Optimizer) -> None:
        """Update and broadcast all batches except the last one, which the optimizer's own step updates."""
        if self._complete_groups is not None:
            raise ModelError(
                f"{type(optimizer).__name__} calls its closure several times in one step, so its state cannot be "
                'sharded. Use shard="none".'
            )
        self._divide_new_parameters(optimizer)
        self._complete_groups = [group["params"] for group in optimizer.param_groups]
        self._pending_broadcasts = []
        for batch in self._batches[:-1]:
            self._enter_batch(optimizer, batch)
            step_without_hooks(optimizer)
            self._exit_batch(optimizer, batch)
            self._start_batch_broadcast(batch)
        if self._batches:
            self._enter_batch(optimizer, self._batches[-1])

    @disable_compile
    def _end_step(self, optimizer: Optimizer) -> None:
        if self._nested_steps:
            self._nested_steps -= 1
            return
        self._is_stepping = False
        if self._batches:
            self._exit_batch(optimizer, self._batches[-1])
            self._start_batch_broadcast(self._batches[-1])
        self._restore(optimizer)
        waits, self._pending_broadcasts = self._pending_broadcasts, []
        for wait in waits:
            wait()

    def _enter_batch(self, optimizer: Optimizer, batch: _Batch) -> None:
        """Replace the optimizer's parameters with this rank's shards of `batch`."""
        for group_index, group in enumerate(optimizer.param_groups):
            group["params"] = [own_shard.local for own_shard in batch.own_shards_by_group.get(group_index, ())]
        if self._reducer is not None:
            self._set_complete_gradients(batch)
        for own_shard in self._partial_shards(batch):
            local, parameter, shard = own_shard.local, own_shard.parameter, own_shard.shard
            local.data = self._view(parameter, shard)
            gradient = parameter.grad
            if self._reducer is not None and isinstance(gradient, ShardedGradient):
                local.grad = gradient.local
            elif gradient is not None:
                local.grad = flatten_like(gradient, parameter)[shard.start : shard.stop]
            if parameter in optimizer.state:
                optimizer.state[local] = optimizer.state.pop(parameter)

    def _set_complete_gradients(self, batch: _Batch) -> None:
        """Replace the sharded gradients of the parameters that this rank owns completely with complete gradients."""
        for own_shard in chain.from_iterable(batch.own_shards_by_group.values()):
            parameter, gradient, shard = own_shard.parameter, own_shard.parameter.grad, own_shard.shard
            if not isinstance(gradient, ShardedGradient):
                continue
            if (gradient.start, gradient.stop) != (shard.start, shard.stop):
                raise ModelError(
                    f"The gradient of a parameter of shape {list(parameter.shape)} is sharded for another optimizer. "
                    "Pass each parameter to only one optimizer."
                )
            if own_shard.is_whole:
                self._replaced_gradients.append((parameter, gradient))
                parameter.grad = gradient.local.as_strided(parameter.shape, parameter.stride())

    def _exit_batch(self, optimizer: Optimizer, batch: _Batch) -> None:
        for parameter, gradient in self._replaced_gradients:
            gradient.clear_cached_norms()
            parameter.grad = gradient
        self._replaced_gradients.clear()
        for own_shard in self._partial_shards(batch):
            own_shard.local.grad = None
            if own_shard.local in optimizer.state:
                optimizer.state[own_shard.parameter] = optimizer.state.pop(own_shard.local)

    def _restore(self, optimizer: Optimizer) -> None:
        """Restore all parameters of the optimizer, even after a step that raised an exception."""
        complete_groups, self._complete_groups = self._complete_groups, None
        if complete_groups is None:
            return
        for batch in self._batches:
            self._exit_batch(optimizer, batch)
        for group, parameters in zip(optimizer.param_groups, complete_groups, strict=True):
            group["params"] = parameters

    def _partial_shards(self, batch: _Batch) -> Iterable[_OwnShard]:
        own_shards = chain.from_iterable(batch.own_shards_by_group.values())
        return (own_shard for own_shard in own_shards if not own_shard.is_whole)

    def _start_batch_broadcast(self, batch: _Batch) -> None:
        # Gradients are reduced over ranks, so a parameter has a gradient on all ranks or on none.
        updated = [
            (self._view(parameter, shard), shard.owner)
            for parameter, shard in batch.shards
            if (parameter.grad is not None or (self._may_update_unused and parameter.requires_grad))
            and shard.stop > shard.start
        ]
        if updated and self._communicator.size > 1:
            self._pending_broadcasts.append(self._start_broadcasts(updated))

    # --- the state dict ---

    def _complete_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return `state_dict` with the state of all ranks. All ranks must call this method."""
        if self._has_local_state_dicts:
            return state_dict
        parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        own = {key: value for key, value in state_dict["state"].items() if isinstance(key, int)}
        states_by_rank = [
            broadcast_with_tensors(self._communicator, own, root=rank) for rank in range(self._communicator.size)
        ]
        state: dict[Any, Any] = {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)}
        for index, parameter in enumerate(parameters):
            shards = self._shards.get(parameter, [])
            entries = [states_by_rank[shard.owner].get(index) for shard in shards]
            if all(entry is None for entry in entries):
                continue
            self._check_storage_order(parameter)
            state[index] = entries[0] if len(entries) == 1 else _join_entries(parameter, entries, shards)
        return {**state_dict, "state": state}

    def _select_own_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the complete `state_dict`, restricted to the state of this rank's shards."""
        self._restore(optimizer)
        self._divide_new_parameters(optimizer)
        if self._has_local_state_dicts:
            return state_dict
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        state = dict(state_dict["state"])
        # torch raises an error for groups of different lengths.
        for key, parameter in zip(saved, parameters, strict=False):
            if key in state:
                entry = self._own_entry(parameter, state.pop(key))
                if entry is not None:
                    state[key] = entry
        return {**state_dict, "state": state}

    def _own_entry(self, parameter: nn.Parameter, entry: Any) -> Any:
        """Return this rank's shard of the complete `entry`, the state of `parameter`, or None if this rank owns no
        shard."""
        if self._is_elementwise and isinstance(entry, dict):
            check_shapes(parameter, entry)
        own_shard = self._own_shards.get(parameter)
        if own_shard is None or own_shard.is_whole or not isinstance(entry, dict):
            return None if own_shard is None else entry
        self._check_storage_order(parameter)
        start, stop = own_shard.shard.start, own_shard.shard.stop
        return {
            key: flatten_like(value, parameter)[start:stop].clone()
            if isinstance(value, Tensor) and value.shape == parameter.shape
            else value
            for key, value in entry.items()
        }


def reject_copy() -> Any:
    """Raise ModelError. Replaces `__getstate__` of optimizers with sharded state."""
    raise ModelError(
        "This optimizer cannot be copied or pickled, because its state is sharded over ranks: a copy contains "
        "only the shards of this rank. Call optimizer.state_dict() on every rank, and copy or save the result."
    )


def check_shapes(parameter: nn.Parameter, entry: dict[Any, Any]) -> None:
    """Raise ModelError if a tensor in the complete `entry` differs in shape from `parameter`, unless it has one
    element. The error is the same on every rank. Without this check, a step would fail only on the ranks that own the
    parameter."""
    for key, value in entry.items():
        if isinstance(value, Tensor):
            _check_shape(parameter, key, value.shape)


def _check_shape(parameter: nn.Parameter, key: Any, shape: Sequence[int]) -> None:
    if prod(shape) != 1 and tuple(shape) != tuple(parameter.shape):
        raise ModelError(
            f"The loaded optimizer state has {key!r} of shape {list(shape)} for a parameter of shape "
            f"{list(parameter.shape)}. Load the state of an optimizer with the same parameters in the same order."
        )


def _start_broadcasts(communicator: Communicator, shards: list[tuple[Tensor, int]]) -> Callable[[], None]:
    """Start to broadcast each tensor in `shards` in place from its root, and return a function that waits for all
    broadcasts. Without SupportsAsyncBroadcasts, complete the broadcasts before returning."""
    if isinstance(communicator, SupportsAsyncBroadcasts):
        return communicator.start_broadcasts(shards)
    with torch.no_grad():
        for tensor, root in shards:
            tensor.copy_(communicator.broadcast(tensor, root))
    return lambda: None


def _join_entries(
    parameter: nn.Parameter, entries: list[dict[Any, Any]], shards: list[ParameterShard]
) -> dict[Any, Any]:
    """Return the complete state of `parameter`, joined from the `entries` of the ranks that own its `shards`."""
    joined = {}
    keys = [list(entry or ()) for entry in entries]
    if any(keys_of_rank != keys[0] for keys_of_rank in keys):
        raise ModelError(
            f"The optimizer's state of a parameter of shape {list(parameter.shape)} differs between ranks: {keys[0]} "
            f"on rank {shards[0].owner}, and {next(keys_of_rank for keys_of_rank in keys if keys_of_rank != keys[0])} "
            "on another rank. Load the same complete state on every rank: optimizer.load_state_dict(state)."
        )
    for key, value in entries[0].items():
        if isinstance(value, Tensor) and value.shape == (shards[0].stop - shards[0].start,):
            complete = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
            torch.cat([entry[key] for entry in entries], out=flat_view(complete))
            value = complete
        joined[key] = value
    return joined

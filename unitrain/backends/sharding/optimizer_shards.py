"""Optimizers of sharded parameters: each rank updates its shards and stores their state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unitrain.backends.base import Communicator
from unitrain.backends.gradients.local_gradients import step_pre_hook
from unitrain.backends.objects import broadcast_with_tensors
from unitrain.backends.sharding.optimizer_state import check_shapes, reject_copy
from unitrain.backends.sharding.parameters import ShardedParameters
from unitrain.backends.sharding.shards import local_rows
from unitrain.backends.sharding.state_format import gather_rows, keeps_shards
from unitrain.torch_compat import add_innermost_step_hooks, disable_compile, local_shard

_optimizers: WeakKeyDictionary[Optimizer, ShardedStepHooks] = WeakKeyDictionary()


def replace_parameters(optimizer: Optimizer, sharded_parameters: ShardedParameters) -> None:
    """Replace the complete parameters of an `optimizer` that was built before `distributed_model` with their shards.

    The state does not change. Does not communicate.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            current = sharded_parameters.parameter_after_sharding(parameter)
            if current is not parameter:
                group["params"][index] = current
                if parameter in optimizer.state:
                    optimizer.state[current] = optimizer.state.pop(parameter)


def shard_optimizer(optimizer: Optimizer, communicator: Communicator) -> None:
    """Shard rank 0's optimizer state across all ranks. `optimizer` has sharded parameters. All ranks must call this
    function.

    The state of each parameter is broadcast separately, except DTensors, whose rows each rank already has. A second
    call for the same optimizer only broadcasts the settings of its parameter groups.
    """
    own = optimizer.state_dict() if optimizer not in _optimizers else {"param_groups": []}
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    settings = broadcast_with_tensors(communicator, settings)
    for group, received in zip(optimizer.param_groups, settings, strict=True):
        group.update(received)
    if optimizer in _optimizers:
        return
    _optimizers[optimizer] = ShardedStepHooks(optimizer, communicator)
    indices = communicator.broadcast_object(list(own.get("state", ())))
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    optimizer.state.clear()
    for index in indices:
        entry = own["state"].get(index, {})
        shards = {key: value for key, value in entry.items() if isinstance(value, DTensor)}
        complete = {key: None if key in shards else value for key, value in entry.items()}
        entry = broadcast_with_tensors(communicator, complete)
        entry = {key: shards.get(key) if value is None else value for key, value in entry.items()}
        optimizer.state[parameters[index]] = _select_own_rows(parameters[index], entry, communicator)


class ShardedStepHooks:
    """Hooks with which each step of `optimizer` updates plain tensors: the shards of this rank.

    Outside `step`, the parameters in the optimizer's groups are DTensors. A step on plain tensors avoids the dispatch
    overhead of DTensors. `optimizer.state` always contains plain tensors: the rows of this rank.
    """

    def __init__(self, optimizer: Optimizer, communicator: Communicator) -> None:
        self._communicator = communicator
        self._local_parameters: dict[nn.Parameter, nn.Parameter] = {}
        self._distributed_groups: list[list[nn.Parameter]] | None = None  # during a step: the original parameters
        begin = step_pre_hook(self._begin_step)
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self._restore(optimizer))
        add_innermost_step_hooks(optimizer, begin, lambda optimizer, args, kwargs: self._restore(optimizer))
        optimizer.register_state_dict_pre_hook(self._restore)
        optimizer.register_state_dict_post_hook(self._complete_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._select_own_state)
        optimizer.__getstate__ = reject_copy  # type: ignore[method-assign]

    def _begin_step(self, optimizer: Optimizer) -> None:
        """Replace the parameters, gradients and state of `optimizer` with this rank's shards of them."""
        self._distributed_groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._prepare_local_parameter(optimizer, parameter) for parameter in group["params"]]

    def _prepare_local_parameter(self, optimizer: Optimizer, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's shard of `parameter`, with its gradient, and move its optimizer state to the shard."""
        if not isinstance(parameter, DTensor):
            return parameter
        local, rows = self._local_parameters.get(parameter), local_shard(parameter)
        if local is None or local.data_ptr() != rows.data_ptr():
            local = self._local_parameters[parameter] = nn.Parameter(rows.detach(), parameter.requires_grad)
        local.grad = None if parameter.grad is None else local_shard(parameter.grad)
        if parameter in optimizer.state:
            optimizer.state[local] = optimizer.state.pop(parameter)
        return local

    @disable_compile
    def _restore(self, optimizer: Optimizer) -> None:
        """Restore the parameters of the optimizer, even after a step that raised an exception."""
        distributed_groups, self._distributed_groups = self._distributed_groups, None
        if distributed_groups is None:
            return
        for group, parameters in zip(optimizer.param_groups, distributed_groups, strict=True):
            for parameter, local in zip(parameters, group["params"], strict=True):
                if local is not parameter:
                    local.grad = None
                    if local in optimizer.state:
                        optimizer.state[parameter] = optimizer.state.pop(local)
            group["params"] = parameters

    # --- the state dict ---

    def _complete_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return `state_dict` with complete tensors, or in the format that a context manager of `state_format` selects.
        All ranks must call this method."""
        parameters = list(_parameters_of(optimizer))
        state = dict(state_dict["state"])
        for index in sorted(key for key in state if isinstance(key, int)):
            parameter = parameters[index]
            if isinstance(parameter, DTensor):
                state[index] = {key: self._state_dict_value(parameter, value) for key, value in state[index].items()}
        return {**state_dict, "state": state}

    def _state_dict_value(self, parameter: DTensor, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != local_shard(parameter).shape:
            return value
        if keeps_shards():
            return DTensor.from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return gather_rows(value, parameter.shape, self._communicator)

    def _select_own_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the complete `state_dict`, restricted to the rows of this rank."""
        self._restore(optimizer)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        state = dict(state_dict["state"])
        # torch raises an error for groups of different lengths.
        for key, parameter in zip(saved, _parameters_of(optimizer), strict=False):
            if isinstance(state.get(key), dict):
                state[key] = _select_own_rows(parameter, state[key], self._communicator)
        return {**state_dict, "state": state}


def _parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _select_own_rows(parameter: nn.Parameter, entry: dict[str, Any], communicator: Communicator) -> dict[str, Any]:
    """Return the state `entry` of `parameter`, restricted to this rank's rows. `entry` contains complete tensors or
    DTensors.
    """
    if not isinstance(parameter, DTensor):
        return entry
    check_shapes(parameter, entry)
    selected = {}
    for key, value in entry.items():
        if isinstance(value, DTensor):
            value = local_shard(value)
        elif isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
            value = local_rows(value, communicator)
        selected[key] = value
    return selected

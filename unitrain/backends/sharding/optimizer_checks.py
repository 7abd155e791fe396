"""Checks, without communication, of optimizers whose state will be sharded."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from unitrain.backends import checks
from unitrain.backends.base import ShardingMode
from unitrain.backends.sharding.optimizer_state import ELEMENTWISE, sharded_state
from unitrain.backends.sharding.partition import is_dense
from unitrain.errors import ModelError

_INSEPARABLE = (torch.optim.LBFGS,)
# Optimizers that update each parameter independently of all others, but not each element.
_PER_PARAMETER = tuple(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
_SWITCH = "updates_parameters_independently"


def check_sharded_optimizer(optimizer: Optimizer, model: nn.Module, shard: ShardingMode) -> None:
    """Check the arguments of `distributed_optimizer`. Does not communicate.

    Raises ConfigError for an unknown `shard`, and ModelError for parameters of a different model and for an optimizer
    that is already sharded with another setting. With `shard="state"` and "gradients", also raises ModelError for
    LBFGS, whose update of one parameter depends on others, for optimizers that are not part of torch and do not state
    that they update parameters independently, for parameters that share memory or have gaps in their memory, and for an
    optimizer whose state dict methods do not call the registered hooks. With `shard="parameters"`, raises ModelError
    unless the optimizer is an elementwise optimizer of torch.optim.
    """
    checks.check_optimizer_of_model(optimizer, model)
    checks.check_shard("distributed_optimizer", shard)
    state = sharded_state(optimizer)
    if state is not None and state.sharding_mode != shard:
        raise ModelError(
            "The state of this optimizer is already sharded over ranks. Pass the same setting again, "
            f'shard="{state.sharding_mode}", or build a new optimizer.'
        )
    if shard == "parameters":
        _check_elementwise(optimizer)
    if shard in ("none", "parameters"):
        return
    if isinstance(optimizer, _INSEPARABLE):
        name = type(optimizer).__name__
        raise ModelError(
            f"The state of {name} cannot be sharded, because its update of one parameter depends on all others. "
            'Use shard="none", or another optimizer: torch.optim.AdamW(model.parameters(), ...).'
        )
    _check_independent_updates(optimizer, shard)
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if not is_dense(parameter):
            raise ModelError(
                f"A parameter of shape {list(parameter.shape)} and stride {list(parameter.stride())} has gaps in its "
                "memory, so its state cannot be sharded. Build it from a contiguous tensor: "
                "nn.Parameter(tensor.contiguous())."
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    updated = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    checks.check_no_shared_memory({names[parameter]: parameter for parameter in updated}, f'shard="{shard}"')
    if state is None:
        _check_state_dict_methods(optimizer)


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` has a train and an eval mode, in which the model has different weights, like the
    optimizers of schedulefree."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def _check_independent_updates(optimizer: Optimizer, shard: ShardingMode) -> None:
    name = type(optimizer).__name__
    if has_modes(optimizer):
        raise ModelError(
            f"The state of {name} cannot be sharded, because {name}.eval() and {name}.train() compute the weights of "
            'all parameters from the complete state. Use shard="none".'
        )
    is_known = type(optimizer) in (*ELEMENTWISE, *_PER_PARAMETER)
    if not is_known and getattr(optimizer, _SWITCH, False) is not True:
        raise ModelError(
            f"It is unknown whether {name} updates each parameter independently of all others. With "
            f"shard={shard!r}, each rank updates only some parameters, so an optimizer that uses a norm or an estimate "
            'over all parameters would compute different results. Use shard="none" or, if the updates are '
            f"independent, state it before the optimizer is distributed: optimizer.{_SWITCH} = True."
        )


def _check_elementwise(optimizer: Optimizer) -> None:
    if type(optimizer) not in ELEMENTWISE:
        supported = ", ".join(sorted(optimizer_class.__name__ for optimizer_class in ELEMENTWISE))
        raise ModelError(
            'distributed_optimizer(shard="parameters") updates shards of parameters, so it needs an elementwise '
            f'optimizer of torch.optim, got {type(optimizer).__name__}. Use one of {supported}, or shard="state".'
        )


def _check_state_dict_methods(optimizer: Optimizer) -> None:
    """Raise ModelError unless `state_dict` and `load_state_dict` call the registered hooks, which exchange the state of
    all ranks."""
    optimizer_class, called = type(optimizer), set[str]()
    methods = [
        name
        for name in ("state_dict", "load_state_dict")
        if getattr(optimizer_class, name) is not getattr(Optimizer, name)
    ]
    if not methods:
        return
    handles = [
        optimizer.register_state_dict_post_hook(lambda optimizer, state: called.add("state_dict")),
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: called.add("load_state_dict")),
    ]
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    class_name = optimizer_class.__name__
    for name in methods:
        if name not in called:
            raise ModelError(
                f"The state of {class_name} cannot be sharded, because {class_name}.{name} does not call "
                f"super().{name}, whose hooks exchange the state of all ranks. Call super().{name} in it, or use "
                'shard="none".'
            )

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


def check_sharded_optimizer(optimizer: Optimizer, model: nn.Module, shard: ShardingMode) -> None:
    """Check the arguments of `distributed_optimizer`. Does not communicate.

    Raises ConfigError for an unknown `shard`, and ModelError for parameters of a different model and for an optimizer
    that is already sharded with another setting. With `shard="state"` and "gradients", also raises ModelError for
    LBFGS, whose update of one parameter depends on others, for parameters that share memory or have gaps in their
    memory, and for an optimizer whose state dict methods do not call the registered hooks. With `shard="parameters"`,
    raises ModelError unless the optimizer is an elementwise optimizer of torch.optim.
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

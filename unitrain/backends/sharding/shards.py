"""Conversion between shards of parameters (DTensors divided along dim 0) and complete tensors.

`fully_shard` assigns the rows [r * n, (r + 1) * n) of a parameter to rank r, with n = ceil(rows / ranks). The shards of
the last ranks may have fewer rows, or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unitrain.backends.base import Communicator
from unitrain.backends.sharding.state_format import gather_rows, keeps_shards
from unitrain.torch_compat import local_shard, parameters_by_name


def rows_of_rank(num_rows: int, rank: int, size: int) -> slice:
    """Return the rows of `rank` in a parameter with `num_rows` rows."""
    count = -(-num_rows // size)
    return slice(min(rank * count, num_rows), min((rank + 1) * count, num_rows))


def local_rows(complete: Tensor, communicator: Communicator) -> Tensor:
    """Return a copy of this rank's rows of `complete`, on the rank's device."""
    rows = complete[rows_of_rank(len(complete), communicator.rank, communicator.size)]
    return rows.detach().to(communicator.device, copy=True, memory_format=torch.contiguous_format)


def shard_like(parameter: DTensor, complete: Tensor, communicator: Communicator) -> DTensor:
    """Return this rank's shard of `complete` as a DTensor with the shape of `parameter`. Does not communicate."""
    return DTensor.from_local(
        local_rows(complete, communicator),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def make_state_dicts_complete(model: nn.Module, communicator: Communicator) -> None:
    """Make `state_dict` of `model` and its submodules return complete tensors, and `load_state_dict` accept them.

    Afterwards, all ranks must call `state_dict`, which gathers the shards, unless `state_format` selects another
    format. `load_state_dict` does not communicate: each rank selects its shard.
    """

    def gather(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in parameters_by_name(module):
            value = state.get(prefix + name)
            if isinstance(value, DTensor) and not keeps_shards():
                state[prefix + name] = gather_rows(local_shard(value), value.shape, communicator)

    def select(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in parameters_by_name(module).items():
            value = state.get(prefix + name)
            if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == parameter.shape:  # otherwise torch raises an error with both shapes
                state[prefix + name] = shard_like(parameter, value, communicator)

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(gather)
            module.register_load_state_dict_pre_hook(select)

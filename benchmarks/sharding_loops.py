"""Training loops with Adam, replicated or with sharded state, gradients or parameters, run in turns."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain

import torch
from loops import BATCH, CLASSES, FEATURES, MODELS, network
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy

from unitrain.backends.base import Backend, ShardingMode
from unitrain.backends.sharding.gradient import ShardedGradient

REPLICATED, ZERO, FULLY_SHARD = "none", "ZeroRedundancyOptimizer", "fully_shard"
SHARDS: dict[str, ShardingMode] = {
    REPLICATED: "none",
    "state": "state",
    "gradients": "gradients",
    "parameters": "parameters",
}
METHODS = (*SHARDS, ZERO, FULLY_SHARD)

_prepared: dict[tuple[str, str], tuple[nn.Module, torch.optim.Optimizer]] = {}


def take_turn(backend: Backend, method: str, model: str, round_number: int) -> float:
    """Train some steps with `method`, a value in METHODS. Return the seconds per step, measured between barriers. All
    ranks must call this function."""
    distributed, optimizer = _prepare(backend, method, model)
    generator = torch.Generator().manual_seed(round_number * backend.size + backend.rank)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    steps = MODELS[model][1]
    backend.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        cross_entropy(distributed(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    backend.barrier()
    return (time.perf_counter() - started) / steps


def measure_persistent_bytes(backend: Backend, method: str, model: str) -> tuple[float, float]:
    """Return the bytes per parameter of weights, gradients and optimizer state on this rank, and the expected value.

    The function trains one step and keeps the gradients. For a view, the complete underlying storage is counted.
    """
    distributed, optimizer = _prepare(backend, method, model)
    count = sum(parameter.numel() for parameter in distributed.parameters())
    distributed(torch.randn(BATCH, FEATURES)).sum().backward()
    optimizer.step()
    held = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    states = (value for entry in held.state.values() for value in entry.values() if isinstance(value, Tensor))
    gradients = [parameter.grad for parameter in distributed.parameters() if parameter.grad is not None]
    total = sum(_storages(chain(distributed.parameters(), gradients, states)).values())
    optimizer.zero_grad()
    _prepared.clear()
    return total / count, formula_bytes(method, backend.size)


def formula_bytes(method: str, size: int) -> float:
    """Return the bytes per parameter of weights, gradients and Adam's state in float32 (ZeRO, section 3)."""
    sharded = {REPLICATED: 0, "state": 8, ZERO: 8, "gradients": 12, "parameters": 16, FULLY_SHARD: 16}[method]
    return 16 - sharded + sharded / size


def _prepare(backend: Backend, method: str, model: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if (method, model) not in _prepared:
        torch.manual_seed(1)
        local_model = network(MODELS[model][0])
        if method == FULLY_SHARD:
            from torch.distributed.fsdp import fully_shard

            for module in [*local_model.modules()][::-1]:
                if isinstance(module, nn.Linear) or module is local_model:
                    fully_shard(module)
                    module.set_force_sum_reduction_for_comms(True)  # Gloo does not support AVG
            _prepared[method, model] = local_model, torch.optim.Adam(local_model.parameters(), lr=1e-4)
        elif method == ZERO:
            distributed = backend.distributed_model(local_model)
            _prepared[method, model] = (
                distributed,
                ZeroRedundancyOptimizer(local_model.parameters(), torch.optim.Adam, lr=1e-4),
            )
        else:
            shard, blocks = SHARDS[method], (nn.Linear,) if method == "parameters" else ()
            distributed = backend.distributed_model(local_model, shard=shard, shard_blocks=blocks)
            optimizer = torch.optim.Adam(local_model.parameters(), lr=1e-4)
            _prepared[method, model] = distributed, backend.distributed_optimizer(optimizer, distributed, shard=shard)
    return _prepared[method, model]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of `tensors` by address, without duplicates."""
    local = (
        tensor.local if isinstance(tensor, ShardedGradient) else getattr(tensor, "_local_tensor", tensor)
        for tensor in tensors
    )
    storages = (tensor.untyped_storage() for tensor in local)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}

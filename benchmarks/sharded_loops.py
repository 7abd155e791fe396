"""Training loops with Adam that replicate everything, or shard the optimizer state or the gradients; run in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain

import torch
from loops import BATCH, CLASSES, FEATURES, MODELS, network
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy

from unitrain.backends.base import Backend, Shard
from unitrain.backends.sharding.gradient import ShardedGradient

REPLICATED, TORCH = "replicated", "ZeroRedundancyOptimizer"
SHARDS: dict[str, Shard] = {REPLICATED: "none", 'shard="state"': "state", 'shard="gradients"': "gradients"}
WAYS = (*SHARDS, TORCH)

_prepared: dict[tuple[str, str], tuple[nn.Module, torch.optim.Optimizer]] = {}


def take_turn(backend: Backend, way: str, model: str, number: int) -> float:
    """Train some steps in one of WAYS and return seconds per step, from barrier to barrier. All ranks call it."""
    distributed, optimizer = _prepare(backend, way, model)
    generator = torch.Generator().manual_seed(number * backend.size + backend.rank)
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


def persistent_bytes(backend: Backend, way: str, model: str) -> tuple[float, float]:
    """Return the bytes per parameter of weights, gradients and optimizer state on this rank, and those of the formula.

    Adam in float32 takes 16 bytes per parameter, 8 + 8 / size with a sharded state, and 4 + 12 / size with sharded
    gradients (ZeRO, section 3). It trains one step and keeps its gradients.
    """
    distributed, optimizer = _prepare(backend, way, model)
    distributed(torch.randn(BATCH, FEATURES)).sum().backward()
    optimizer.step()
    held = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    states = (value for entry in held.state.values() for value in entry.values() if isinstance(value, Tensor))
    parameters = list(distributed.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    stored = [one.local if isinstance(one, ShardedGradient) else one for one in gradients]
    total = sum(_bytes(tensor) for tensor in chain(parameters, stored, _of_one_storage(states)))
    if way == 'shard="gradients"':  # the slices are views, which must not keep other memory alive
        assert sum(map(_bytes, stored)) == sum({one.data_ptr(): one.nbytes() for one in map(_storage, stored)}.values())
    optimizer.zero_grad()
    formulas = {REPLICATED: 16.0, 'shard="gradients"': 4 + 12 / backend.size}
    return total / sum(parameter.numel() for parameter in parameters), formulas.get(way, 8 + 8 / backend.size)


def _prepare(backend: Backend, way: str, model: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if (way, model) not in _prepared:
        torch.manual_seed(1)
        own = network(MODELS[model][0])
        shard = SHARDS.get(way, "none")
        distributed = backend.distributed_model(own, shard=shard)
        optimizer: torch.optim.Optimizer
        if way == TORCH:
            optimizer = ZeroRedundancyOptimizer(own.parameters(), torch.optim.Adam, lr=1e-4)
        else:
            optimizer = torch.optim.Adam(own.parameters(), lr=1e-4)
            backend.distributed_optimizer(optimizer, distributed, shard=shard)
        _prepared[way, model] = distributed, optimizer
    return _prepared[way, model]


def _of_one_storage(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that occupy all of their memory; a view would hide memory that it keeps alive."""
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == _bytes(tensor)
        yield tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""Training loops with Adam whose parameters are replicated, sharded by unitrain, or sharded by torch; run in turns."""

from __future__ import annotations

import time

import torch
from loops import BATCH, CLASSES, FEATURES, MODELS, network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unitrain.backends.base import Backend

REPLICATED, SHARDED, TORCH = "replicated", 'shard="parameters"', "torch's fully_shard"
WAYS = (REPLICATED, SHARDED, TORCH)

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

    Adam in float32 takes 16 bytes per parameter, and 16 / size with sharded parameters (ZeRO, section 3). It trains one
    step and keeps its gradients.
    """
    distributed, optimizer = _prepare(backend, way, model)
    count = sum(parameter.numel() for parameter in distributed.parameters())
    distributed(torch.randn(BATCH, FEATURES)).sum().backward()
    optimizer.step()
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    for parameter in distributed.parameters():
        assert parameter.grad is not None
        tensors += [parameter.detach(), parameter.grad]
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    optimizer.zero_grad()
    return total / count, 16.0 if way == REPLICATED else 16 / backend.size


def _prepare(backend: Backend, way: str, model: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if (way, model) not in _prepared:
        torch.manual_seed(1)
        own = network(MODELS[model][0])
        if way == TORCH:
            from torch.distributed.fsdp import fully_shard

            for module in [*own.modules()][::-1]:
                if isinstance(module, nn.Linear) or module is own:
                    fully_shard(module)
                    module.set_force_sum_reduction_for_comms(True)  # Gloo has no average
            _prepared[way, model] = own, torch.optim.Adam(own.parameters(), lr=1e-4)
        else:
            blocks = (nn.Linear,) if way == SHARDED else ()
            shard = "parameters" if way == SHARDED else "none"
            distributed = backend.distributed_model(own, shard=shard, shard_blocks=blocks)
            optimizer = torch.optim.Adam(own.parameters(), lr=1e-4)
            _prepared[way, model] = distributed, backend.distributed_optimizer(optimizer, distributed, shard=shard)
    return _prepared[way, model]

"""Training loops with different methods of gradient compression, run in turns on the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from loops import BATCH, CLASSES, FEATURES, MODELS, network
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy

from unitrain import PowerSGD
from unitrain.backends.base import Backend
from unitrain.backends.compression_setting import Compression

COMPRESSIONS: dict[str, Compression] = {
    "none": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "PowerSGD, rank 1": PowerSGD(rank=1, start_step=0),
    "PowerSGD, rank 4": PowerSGD(rank=4, start_step=0),
}
HOOKS: dict[str, Callable] = {
    "fp16, torch's hook": default_hooks.fp16_compress_hook,
    "bf16, torch's hook": default_hooks.bf16_compress_hook,
}

_prepared: dict[tuple[str, str], tuple[nn.Module, torch.optim.Optimizer]] = {}


def take_turn(backend: Backend, compression: str, model: str, round_number: int) -> float:
    """Train a few steps and return the seconds per step, measured between barriers. All ranks must call this
    function."""
    if (compression, model) not in _prepared:
        _prepared[compression, model] = _prepare(backend, compression, model)
    wrapped, optimizer = _prepared[compression, model]
    steps = MODELS[model][1]
    generator = torch.Generator().manual_seed(round_number * backend.size + backend.rank)
    inputs = torch.randn(steps, BATCH, FEATURES, generator=generator)
    targets = torch.randint(0, CLASSES, (steps, BATCH), generator=generator)
    backend.barrier()
    started = time.perf_counter()
    for step in range(steps):
        cross_entropy(wrapped(inputs[step]), targets[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    backend.barrier()
    return (time.perf_counter() - started) / steps


def _prepare(backend: Backend, compression: str, model_name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = network(MODELS[model_name][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if compression in HOOKS:
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, HOOKS[compression])
    else:
        wrapped = backend.distributed_model(model, compression=COMPRESSIONS[compression])
    return wrapped, optimizer

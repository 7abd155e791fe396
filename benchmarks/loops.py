"""The same training steps with a library, with unitrain's interface and with the Trainer, run in turns."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend

BATCH, FEATURES, CLASSES = 32, 64, 10
# Hidden layers, and the number of steps per turn. The tiny model measures overhead, and the large model measures
# communication. `trial` is for tests of the benchmarks.
MODELS = {"tiny": ([64, 64], 600), "25M": ([2048, 3072, 3072, 2816], 10), "trial": ([32, 32], 8)}
MEASURED = ("tiny", "25M")
Turn = Callable[[int], float]

_prepared: dict[tuple[str, str], Turn] = {}


def pin_to_core(backend: Backend) -> int:
    """Bind this rank to one core, like launchers do, and return the process ID.

    If the scheduler moved ranks between cores, the variation between rounds would exceed the differences between the
    loops.
    """
    cores = sorted(os.sched_getaffinity(0))
    if backend.size <= len(cores):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[backend.rank]})
    return os.getpid()


def take_turn(backend: Backend, loop: str, model: str, round_number: int) -> float:
    """Train one epoch with `loop`, a key of LOOPS. Return the seconds per step, measured between barriers. All ranks
    must call this function."""
    steps = MODELS[model][1]
    if (loop, model) not in _prepared:
        _prepared[loop, model] = _prepare(backend, loop, model)
    backend.barrier()
    started = time.perf_counter()
    _prepared[loop, model](round_number)
    backend.barrier()
    return (time.perf_counter() - started) / steps


def _prepare(backend: Backend, loop: str, model: str) -> Turn:
    hidden, steps = MODELS[model]
    torch.manual_seed(1)
    samples = steps * BATCH * backend.size
    data = TensorDataset(torch.randn(samples, FEATURES), torch.randint(0, CLASSES, (samples,)))
    return LOOPS[loop](backend, network(hidden), data)


def network(hidden: list[int]) -> nn.Sequential:
    """Return a network with these hidden layers."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([FEATURES, *hidden, CLASSES]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, which has the same settings in all loops."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, backend: Backend, mean: Any) -> Turn:
    """Return a function that runs a plain loop over this rank's shard of the data. The function returns the sum of the
    losses of all steps, averaged over ranks."""
    inputs, targets = data.tensors

    def turn(epoch: int) -> float:
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(inputs), generator=generator)[backend.rank :: backend.size]
        total = torch.zeros(())
        for chosen in order.split(BATCH):
            loss = cross_entropy(model(inputs.index_select(0, chosen)), targets.index_select(0, chosen))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        return float(mean(total))

    return turn


def _distributed_data_parallel(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    def mean(value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value / backend.size

    optimizer = sgd(model)
    return _loop(nn.parallel.DistributedDataParallel(model), optimizer, data, backend, mean)


def _distributed_optimizer(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    import horovod.torch as hvd

    optimizer = sgd(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return _loop(model, optimizer, data, backend, hvd.allreduce)


def _own_loop(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    optimizer = sgd(model)
    model = backend.distributed_model(model)
    return _loop(model, backend.distributed_optimizer(optimizer, model), data, backend, backend.allreduce)


def _trainer(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    config = unitrain.TrainConfig(max_epochs=1, batch_size=BATCH, progress="off")
    trainer = unitrain.Trainer(model, sgd(model), cross_entropy, backend=backend, config=config)

    def turn(epoch: int) -> float:
        trainer.progress.reset()
        return trainer.fit(data)["train_loss"]

    return turn


LOOPS = {
    "DistributedDataParallel": _distributed_data_parallel,
    "hvd.DistributedOptimizer": _distributed_optimizer,
    "own loop": _own_loop,
    "Trainer": _trainer,
}

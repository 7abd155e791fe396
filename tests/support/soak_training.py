"""Program of the soak tests: runs many steps of one mode, and prints the resources of each rank at several steps.

Arguments: the mode, and the number of steps. `MODES` contains a generator function per mode, which yields after each
step.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unitrain
from unitrain.backends.base import Backend

Steps = Iterator[None]
INPUTS, TARGETS = torch.ones(4, 16), torch.zeros(4, 1)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 1))


def train(
    backend: Backend, shard: Any = "none", *, accumulates: bool = False, syncs_norm: bool = False, **arguments: Any
) -> Steps:
    inner: nn.Module = build()
    if syncs_norm:
        inner = unitrain.sync_batch_norm(inner, backend)
    model = backend.distributed_model(inner, shard=shard, **arguments)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    backend.distributed_optimizer(optimizer, model, shard=shard)
    while True:
        if accumulates:
            with backend.no_sync(model):
                nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
        nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def freezing(backend: Backend) -> Steps:
    """Train another layer in each step."""
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    model = backend.distributed_model(layers)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(layers.parameters(), lr=1e-3), model)
    while True:
        for layer in layers:
            layers.requires_grad_(requires_grad=False)
            layer.requires_grad_()
            model(INPUTS).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def wrapping(backend: Backend) -> Steps:
    """Distribute the same model and optimizer again every fifth step, as a second Trainer does."""
    inner = build()
    optimizer = torch.optim.SGD(inner.parameters(), lr=1e-3)
    while True:
        model = backend.distributed_model(inner)
        backend.distributed_optimizer(optimizer, model)
        for _ in range(5):
            model(INPUTS).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def collectives(backend: Backend) -> Steps:
    while True:
        backend.allreduce(torch.ones(2000))
        backend.allgather(INPUTS)
        backend.broadcast(INPUTS)
        backend.reducescatter(torch.ones(2 * backend.size))
        backend.allgather_object({"rank": backend.rank})
        backend.barrier()
        yield


def loading(backend: Backend) -> Steps:
    """Begin a new epoch every fourth step."""
    data = torch.utils.data.TensorDataset(torch.ones(32, 16), torch.zeros(32, 1))
    loader = unitrain.ShardedLoader(data, backend, batch_size=4)
    model = backend.distributed_model(build())
    while True:
        for inputs, targets in loader:
            (nn.functional.mse_loss(model(inputs), targets) * loader.loss_weight).backward()
            yield


def logical(backend: Backend) -> Steps:
    data = torch.utils.data.TensorDataset(torch.ones(32, 16), torch.zeros(32, 1))
    inner = build()
    model = backend.distributed_model(inner, logical_ranks=4)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(inner.parameters(), lr=1e-3), model)
    loader = unitrain.ShardedLoader(data, backend, batch_size=4, logical_ranks=4)
    while True:
        for inputs, targets in loader:
            with nullcontext() if loader.ends_step else backend.no_sync(model):
                (nn.functional.mse_loss(model(inputs), targets) * loader.loss_weight).backward()
            if loader.ends_step:
                optimizer.step()
                optimizer.zero_grad()
                yield


def local_sgd(backend: Backend) -> Steps:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    local = unitrain.LocalSGD(model, optimizer, backend, unitrain.LocalSGDConfig(steps=4, overlap_steps=2))
    while True:
        nn.functional.mse_loss(model(INPUTS), TARGETS).backward()
        local.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
        yield


def pipeline(backend: Backend) -> Steps:
    blocks = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    pipe = unitrain.Pipeline(blocks, backend, nn.functional.mse_loss, stages=2, micro_batches=2, balance=[2, 1])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    while True:
        pipe.forward_backward(INPUTS, TARGETS)
        optimizer.step()
        optimizer.zero_grad()
        pipe.forward(INPUTS)
        yield


def saving(backend: Backend) -> Steps:
    """Gather the sharded state of the optimizer, and load it."""
    inner = build()
    model = backend.distributed_model(inner, shard="state")
    optimizer = backend.distributed_optimizer(torch.optim.Adam(inner.parameters()), model, shard="state")
    while True:
        model(INPUTS).mean().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        yield


MODES: dict[str, Callable[[Backend], Steps]] = {
    "none": train,
    "no_sync": lambda backend: train(backend, accumulates=True),
    "find_unused_parameters": lambda backend: train(backend, find_unused_parameters=True),
    "sync_batch_norm": lambda backend: train(backend, syncs_norm=True),
    "bf16": lambda backend: train(backend, compression="bf16"),
    "powersgd": lambda backend: train(backend, compression="powersgd"),
    "state": lambda backend: train(backend, "state"),
    "gradients": lambda backend: train(backend, "gradients"),
    "parameters": lambda backend: train(backend, "parameters"),
    "freezing": freezing,
    "wrapping": wrapping,
    "collectives": collectives,
    "loading": loading,
    "local_sgd": local_sgd,
    "pipeline": pipeline,
    "saving": saving,
    "logical": logical,  # the last one, because other models reject batches of logical ranks
}


def snapshot(backend: Any) -> dict[str, float]:
    """Return the resources of this process, and, on rank 0, the number of keys in the store."""
    gc.collect()
    process = Path("/proc/self")
    resident_pages = int((process / "statm").read_text().split()[1])
    return {
        "rss_mebibytes": resident_pages * resource.getpagesize() / 2**20,
        "descriptors": sum(1 for _ in (process / "fd").iterdir()),
        "threads": sum(1 for _ in (process / "task").iterdir()),
        "store_keys": backend._rendezvous.store.num_keys() if backend.rank == 0 else 0,
    }


def run_steps(steps: Steps, count: int) -> float:
    """Run `count` steps, and return the median time of a step in seconds."""
    seconds = []
    for _ in range(count):
        start_time = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - start_time)
    return sorted(seconds)[len(seconds) // 2]


def soak(backend: Backend, mode: str, count: int) -> None:
    """Print a snapshot after each quarter of the steps, the first of which are a warm-up."""
    steps = MODES[mode](backend)
    for quarter in range(4):
        seconds = run_steps(steps, count // 4)
        backend.barrier()
        print(json.dumps({"mode": mode, "quarter": quarter, "step_seconds": seconds, **snapshot(backend)}), flush=True)


def restart(count: int) -> None:
    """Start and shut down the backend repeatedly."""
    for number in range(count):
        with unitrain.init(device="cpu", timeout_seconds=60) as backend:
            steps = train(backend, find_unused_parameters=number % 2 == 0)
            next(steps)
            backend.barrier()
            if (number + 1) % (count // 4) == 0:
                values = {"quarter": (number + 1) // (count // 4) - 1, "step_seconds": 0.0, **snapshot(backend)}
                print(json.dumps({"mode": "restart", **values, "store_keys": 0}), flush=True)
            del steps


if __name__ == "__main__":
    names, count = sys.argv[1].split(","), int(sys.argv[2])
    if "restart" in names:
        restart(max(count // 100, 8))
    if modes := [name for name in names if name != "restart"]:
        with unitrain.init(device="cpu", timeout_seconds=60) as backend:
            for name in modes:
                soak(backend, name, count)

"""Correct jobs with long passes, and with different operations or orders on different ranks, are not ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import running_ranks

PROGRAM = """\
import contextlib, sys, threading, time
import torch
from torch import nn
import unitrain

SECONDS, NAMES = float(sys.argv[1]), sys.argv[2].split(",")


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, seconds):
        ctx.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Model(nn.Module):
    '''A model that uses one of two branches. The gradients of `large` are a bucket of their own.'''

    def __init__(self):
        super().__init__()
        self.first, self.small, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.large, self.last = nn.Sequential(nn.Linear(16, 20000), nn.Linear(20000, 16)), nn.Linear(16, 1)

    def forward(self, inputs, seconds=0.0, branch="both"):
        hidden = Sleep.apply(self.first(inputs), seconds)
        hidden = (self.small(hidden) if branch != "large" else 0) + (self.large(hidden) if branch != "small" else 0)
        return self.last(self.norm(hidden))


def seconds_of(step):
    return SECONDS if step == 0 or backend.rank % 2 else 0.0


def train(shard="none", branches=("both",) * 4, compiles=False, prepare=lambda model: model, **arguments):
    inner = prepare(Model())
    model = backend.distributed_model(inner, shard=shard, **arguments)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(inner.parameters(), lr=0.01), model, shard=shard)
    called = torch.compile(model, backend="eager") if compiles else model
    for step in range(2):
        called(torch.ones(4, 16), seconds_of(step), branches[(backend.rank + step) % 4]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sync(model):
    return unitrain.sync_batch_norm(model, backend)


def evaluation():
    '''The ranks evaluate different numbers of batches, with gradients.'''
    model = backend.distributed_model(Model())
    for step in range(2):
        model(torch.ones(4, 16)).mean().backward()
        model.eval()
        for _ in range(backend.rank + 1):
            model(torch.ones(4, 16))
            time.sleep(SECONDS / 4)
        model.train()


def loading():
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            time.sleep(SECONDS if backend.rank == 1 and index % 8 == 0 else 0.0)
            return torch.ones(16)

    model = backend.distributed_model(Model())
    for batch in unitrain.ShardedLoader(Slow(), backend, batch_size=2):
        model(batch).mean().backward()


def logical():
    data = torch.utils.data.TensorDataset(torch.ones(32, 16), torch.ones(32, 1))
    inner = Model()
    model = backend.distributed_model(inner, logical_ranks=8)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(inner.parameters(), lr=0.01), model)
    loader = unitrain.ShardedLoader(data, backend, batch_size=2, logical_ranks=8)
    for index, (inputs, targets) in enumerate(loader):
        with contextlib.nullcontext() if loader.ends_step else backend.no_sync(model):
            loss = nn.functional.mse_loss(model(inputs, seconds_of(index // 2) / 2), targets)
            (loss * loader.loss_weight).backward()
        if loader.ends_step:
            optimizer.step()
            optimizer.zero_grad()


def local_sgd():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = unitrain.LocalSGDConfig(steps=2, synchronous_ranks=2, overlap_steps=1)
    local = unitrain.LocalSGD(model, optimizer, backend, config)
    for step in range(5):
        model(torch.ones(4, 16), seconds_of(step) / 2).mean().backward()
        local.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    local.synchronize()


class Slow(nn.Linear):
    def forward(self, inputs):
        return Sleep.apply(super().forward(inputs), SECONDS if self.training and not backend.rank % 2 else 0.0)


def pipeline():
    '''One replica runs an additional forward pass.'''
    model = nn.Sequential(Slow(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    pipe = unitrain.Pipeline(model, backend, nn.functional.mse_loss, stages=2, micro_batches=2, balance=[2, 2])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    inputs, targets = torch.ones(4, 8), torch.ones(4, 1)
    if pipe.replicas.rank == 0:
        pipe.forward(inputs)
    pipe.forward_backward(inputs, targets)
    optimizer.step()
    if pipe.replicas.rank == 1:
        pipe.forward(inputs)


def threads():
    '''A thread of each rank runs slow backward passes of a model that is not distributed.'''
    other, ends = Model(), threading.Event()

    def run():
        while not ends.is_set():
            other(torch.ones(4, 16), SECONDS).mean().backward()

    thread = threading.Thread(target=run)
    thread.start()
    train(prepare=sync)
    ends.set()
    thread.join()


FEATURES = {
    "unused": lambda: train(
        branches=("small", "large", "both", "small"), prepare=sync, find_unused_parameters=True
    ),
    "pipeline": pipeline,
    "evaluation": evaluation,
    "norm": lambda: train(prepare=sync),
    "compression": lambda: train(compression="bf16"),
    "power_sgd": lambda: train(compression="powersgd"),
    "state": lambda: train(shard="state"),
    "gradients": lambda: train(shard="gradients"),
    "gradients_unused": lambda: train(
        shard="gradients", branches=("small", "large", "both", "small"), prepare=sync, find_unused_parameters=True
    ),
    "parameters": lambda: train(shard="parameters", prepare=sync),
    "logical": logical,
    "local_sgd": local_sgd,
    "loading": loading,
    "threads": threads,
    "compile": lambda: train(compiles=True),
}

with unitrain.init(device="cpu", timeout_seconds=60) as backend:
    for name in NAMES or FEATURES:
        torch.manual_seed(0)
        FEATURES[name]()
        backend.barrier()
        if backend.rank == 0:
            print("finished", name, flush=True)
    if backend.rank == 0:  # the other ranks have shut down
        Model()(torch.ones(4, 16), SECONDS).mean().backward()
print("end", flush=True)
"""
FEATURES = [
    "unused",
    "pipeline",
    "evaluation",
    "norm",
    "compression",
    "power_sgd",
    "state",
    "gradients",
    "gradients_unused",
    "parameters",
    "logical",
    "local_sgd",
    "loading",
    "threads",
    "compile",
]


@pytest.mark.parametrize(
    ("names", "seconds"),
    [
        pytest.param(FEATURES[:3], 4.5, marks=pytest.mark.ci, id="short"),
        *(pytest.param([name], 5.0, marks=pytest.mark.nightly, id=name) for name in FEATURES),
    ],
)
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_job_with_long_passes_is_not_ended(backend: str, names: list[str], seconds: float, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with running_ranks(script, backend, 4, str(seconds), ",".join(names)) as processes:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    together = "\n".join(outputs)
    assert not any(process.returncode for process in processes), together
    assert [f"finished {name}" in together for name in names] == [True] * len(names), together
    assert together.count("end\n") == 4, together

"""Scripts converted by `unitrain migrate` have the same losses and parameters as the original scripts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from unitrain.backends.base import Backend
from unitrain.migrate import migrate
from unitrain.testing import run_ranks

_DATA = """
torch.manual_seed(0)
inputs = torch.randn(40, 6, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
"""
_MODEL = """
    torch.manual_seed(RANK)  # rank 0's parameters are broadcast
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
"""
HOROVOD = f"""
import torch
import horovod.torch as hvd
{_DATA}

def mean_over_ranks(value, name):
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name).item()

def train():
    hvd.init()
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    {_MODEL.replace("RANK", "hvd.rank()").strip()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for index, (batch, targets) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            if index % 2:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
            losses.append(mean_over_ranks(loss.item(), "loss"))
        optimizer.step()
        optimizer.zero_grad()
    state.update(model.state_dict())

if __name__ == "__main__":
    train()
"""
DDP = f"""
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
{_DATA}

def setup():
    dist.init_process_group("gloo")

def train():
    setup()
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    {_MODEL.replace("RANK", 'int(os.environ["RANK"])').strip()}
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for index, (batch, targets) in enumerate(loader):
            if index % 2 == 0:
                with model.no_sync():
                    torch.nn.functional.mse_loss(model(batch), targets).backward()
                continue
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total, op=dist.ReduceOp.SUM)
            losses.append(total.item() / dist.get_world_size())
    state.update(model.module.state_dict())
    dist.destroy_process_group()

if __name__ == "__main__":
    train()
"""
Outcome = tuple[list[float], list[str], list[float]]  # losses, parameter names and parameters


def execute(source: str) -> Outcome:
    """Run the source as a script."""
    names: dict[str, Any] = {"__name__": "__main__", "losses": [], "state": {}}
    exec(compile(source, "script", "exec"), names)
    state: dict[str, torch.Tensor] = names["state"]
    return names["losses"], [*state], torch.cat([tensor.flatten() for tensor in state.values()]).tolist()


def run_scripts(backend: Backend, converted: dict[str, str]) -> dict[tuple[str, str], Outcome]:
    """Run each original script with its own library, and the converted scripts on each backend."""
    # The backend has already initialized Horovod, so hvd.init() has no effect.
    outcomes = {("horovod", "original"): execute(HOROVOD)}
    backend.shutdown()
    outcomes["ddp", "original"] = execute(DDP)
    for name in ("ddp", "horovod"):
        os.environ["UNITRAIN_BACKEND"] = name
        for script, source in converted.items():
            outcomes[script, name] = execute(source)
    return outcomes


def test_converted_script_trains_with_the_same_numbers_as_the_original() -> None:
    converted = {name: migrate(source).source or "" for name, source in (("horovod", HOROVOD), ("ddp", DDP))}
    assert "hvd" not in converted["horovod"]
    assert "DDP(" not in converted["ddp"]
    ranks = run_ranks(run_scripts, 2, args=(converted,), backend="horovod")
    assert len(ranks) == 2
    for outcomes in ranks:
        for script in converted:
            losses, names, parameters = outcomes[script, "original"]
            assert losses[-1] < losses[0]
            assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
            for backend in ("ddp", "horovod"):
                assert outcomes[script, backend][0] == pytest.approx(losses, rel=1e-12), (script, backend)
                assert outcomes[script, backend][1] == names, (script, backend)
                assert outcomes[script, backend][2] == pytest.approx(parameters, rel=1e-12), (script, backend)

"""Random training loops of models with BatchNorm equal plain torch, also after a resume with another value of
`shard`."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from groups import nightly
from torch import Tensor, nn

import unitrain
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

SHARDS: Any = ("none", "state", "gradients", "parameters")
PAIRS = list(product(SHARDS, SHARDS))
FEW_CASES = list(range(0, len(PAIRS), 3))  # each value of `shard` before and after the resume
OTHER_CASES = [number for number in range(4 * len(PAIRS)) if number not in FEW_CASES]
# The gradient of a bias before a BatchNorm is zero except for rounding. With a large eps, Adam does not amplify it.
EPS = 1e-3
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"foreach": False, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
]
STEPS = 3  # both before and after the resume
SAMPLES = 5  # per rank and micro-batch
INPUTS = 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.norm(self.linear(inputs)).tanh()


def draw_case(number: int) -> dict[str, Any]:
    """Return random case `number`. Consecutive numbers have different pairs of `shard` values."""
    r = random.Random(number)
    return {
        "number": number,
        "shards": PAIRS[number % len(PAIRS)],
        "optimizer": r.choice(OPTIMIZERS),
        "synced": r.random() < 0.5,
        "width": r.choice([3, 4, 7, 130]),  # the weights of a wide block are large enough to be sharded
        "channels": r.choice([2, 5]),
        "channels_last": r.random() < 0.4,
        "micro_batches": r.choice([1, 1, 2]),
        "loads_late": r.random() < 0.5,
        "shard_blocks": r.choice([(), ("Block",), 20]),
    }


def build(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(case["number"])
    channels, width = case["channels"], case["width"]
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, INPUTS // 2)), nn.Conv2d(1, channels, 2, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Flatten(), nn.Linear(channels * 3 * (INPUTS // 2 + 1), width), Block(width), Block(width),
        nn.BatchNorm1d(width, momentum=None), nn.Linear(width, 2),
    ).double()  # fmt: skip
    return model.to(memory_format=torch.channels_last) if case["channels_last"] else model


def make_optimizer(case: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    optimizer_class, settings = case["optimizer"]
    layers = list(model.children())
    groups = [
        {"params": [parameter for layer in layers[:5] for parameter in layer.parameters()], "lr": 0.02},
        {"params": [parameter for layer in layers[5:] for parameter in layer.parameters()]},
    ]
    if optimizer_class is not torch.optim.SGD:
        settings = {**settings, "eps": EPS}
    return optimizer_class(groups, lr=0.01, **settings)  # type: ignore[call-arg]


def batch(case: dict[str, Any], step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * case["number"] + 100 * step + 10 * micro_batch + rank)
    values = torch.randn(SAMPLES, INPUTS + 2, generator=generator, dtype=torch.float64)
    return values[:, :INPUTS], values[:, INPUTS:]


def reference_backward(case: dict[str, Any], size: int, step: int, model: nn.Module) -> None:
    """Accumulate the mean gradient over ranks in plain torch. If BatchNorm is not synchronized, each rank computes
    separate statistics, and rank 0's buffers are kept."""
    for micro_batch in range(case["micro_batches"]):
        batches = [batch(case, step, micro_batch, rank) for rank in range(size)]
        if case["synced"]:
            inputs, targets = (torch.cat(some) for some in zip(*batches, strict=True))
            (nn.functional.mse_loss(model(inputs), targets) / case["micro_batches"]).backward()
            continue
        kept: list[Tensor] = []
        for rank, (inputs, targets) in enumerate(batches):
            (nn.functional.mse_loss(model(inputs), targets) / case["micro_batches"] / size).backward()
            if rank == 0:
                kept = [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)


def distribute(
    backend: Backend, case: dict[str, Any], shard: Any, states: tuple[Any, Any] | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(case)
    if case["synced"]:
        unitrain.sync_batch_norm(model, backend)
    if states is not None:
        model.load_state_dict(states[0])
    optimizer = make_optimizer(case, model)
    if states is not None and not case["loads_late"]:
        optimizer.load_state_dict(states[1])
    blocks = case["shard_blocks"] if shard == "parameters" else ()
    distributed = backend.distributed_model(model, shard=shard, shard_blocks=blocks)
    backend.distributed_optimizer(optimizer, distributed, shard=shard)
    if states is not None and case["loads_late"]:
        optimizer.load_state_dict(states[1])
    return distributed, optimizer


def assert_close(found: Any, expected: Any, where: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=lambda text: f"{where}: {text}")


def compare_with_plain_torch(backend: Backend, number: int) -> None:
    """Train both on all ranks and in plain torch, and compare the parameters, buffers and optimizer states."""
    case = draw_case(number)
    expected = build(case)
    expected_optimizer = make_optimizer(case, expected)
    states = None
    for part, shard in enumerate(case["shards"]):
        model, optimizer = distribute(backend, case, shard, states)
        for step in range(part * STEPS, (part + 1) * STEPS):
            for micro_batch in range(case["micro_batches"]):
                is_last = micro_batch == case["micro_batches"] - 1
                inputs, targets = batch(case, step, micro_batch, backend.rank)
                with nullcontext() if is_last else backend.no_sync(model):
                    loss = nn.functional.mse_loss(model(inputs), targets) / case["micro_batches"]
                    loss.backward()
            reference_backward(case, backend.size, step, expected)
            for one in (optimizer, expected_optimizer):
                one.step()
                one.zero_grad()
            where = f"step {step} of {case}"
            unitrain.broadcast_buffers(model, backend)
            assert_close(backend.unwrap(model).state_dict(), expected.state_dict(), where)
        states = copy.deepcopy((backend.unwrap(model).state_dict(), optimizer.state_dict()))
        found, wanted = states[1], expected_optimizer.state_dict()
        assert found["param_groups"] == wanted["param_groups"], case
        assert_close(found["state"], wanted["state"], f"optimizer state after part {part} of {case}")


def compare_all(backend: Backend, numbers: list[int]) -> None:
    for number in numbers:
        compare_with_plain_torch(backend, number)


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [("horovod", 3), *nightly(("ddp", 2), ("ddp", 3), ("horovod", 2))])
@pytest.mark.parametrize("cases", [FEW_CASES, *nightly(OTHER_CASES)], ids=["few", "others"])
def test_batch_norm_models_resume_with_any_sharding(ranks: tuple[str, int], cases: list[int]) -> None:
    backend, size = ranks
    with RankGroup(backend, size) as group:
        group.run(compare_all, cases, timeout_seconds=280)

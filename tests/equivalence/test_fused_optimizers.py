"""Fused and unfused optimizers produce the same results on every backend, with clipping, fp16 and a scaled learning
rate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from groups import GROUPS_ON_DDP
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.backends.sharding.state_format import gather_complete_tensor
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
SCALING: dict[str, Any] = {"lr_scaling": "linear", "reference_batch_size": 6, "warmup_steps": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped, scaled": {"max_grad_norm": 0.5, **SCALING},
    "fp16": {"precision": "fp16"},
    "fp16, clipped, scaled": {"precision": "fp16", "max_grad_norm": 0.5, **SCALING},
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
CASES = list(itertools.product(OPTIMIZERS, VARIANTS))


class Network(nn.Module):
    """A network whose gradient is infinite in step `overflow` (counted from 1) of an fp16 run."""

    def __init__(self, overflow: int) -> None:
        super().__init__()
        self.overflow = overflow
        torch.manual_seed(0)
        self.first, self.second, self.backwards = nn.Linear(6, 16), nn.Linear(16, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if hidden.dtype == torch.float16 and hidden.requires_grad:
            hidden.register_hook(self._overflow)
        result: Tensor = self.second(hidden)
        return result

    def _overflow(self, gradient: Tensor) -> Tensor | None:
        self.backwards += 1
        return gradient * float("inf") if self.backwards == self.overflow else None


def train(
    backend: Backend, name: str, settings: dict[str, Any], overflow: int = 4, **options: Any
) -> tuple[list[Tensor], int]:
    """Return the parameters and the number of scheduler steps."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator))
    model = Network(overflow)
    more: dict[str, Any] = (
        {"momentum": 0.9} if name == "sgd" else {"eps": 1e-2}
    )  # with a large eps, Adam does not magnify fp16 rounding of small gradients
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.02, **more, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    config = TrainConfig(**{"max_epochs": 3, "batch_size": 12 // backend.size, "progress": "off", **settings})
    trainer = Trainer(
        model, optimizer, nn.functional.cross_entropy, backend=backend, config=config, scheduler=scheduler
    )
    trainer.fit(data)
    return [parameter.detach().clone() for parameter in model.parameters()], scheduler.last_epoch


def train_all(backend: Backend, folder: str) -> dict[tuple[str, str], list[tuple[list[Tensor], int]]]:
    """Run every case with a fused and with a foreach optimizer. Except in fp16, also resume a run with a fused
    optimizer."""
    found = {}
    for name, variant in CASES:
        settings = VARIANTS[variant]
        found[name, variant] = [
            train(backend, name, settings, **options) for options in ({"fused": True}, {"foreach": True})
        ]
        if "precision" not in settings:  # in fp16, the overflow would recur after the resume
            output = {"output_dir": f"{folder}/{backend.name}{backend.size}-{name}-{variant}", "resume": True}
            train(backend, name, {**settings, **output, "max_epochs": 1}, fused=True)
            found[name, variant].append(train(backend, name, {**settings, **output}, fused=True))
    return found


@pytest.fixture(scope="module", params=GROUPS_ON_DDP, ids=str)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with RankGroup(*request.param) as group:
        yield group.run(train_all, str(tmp_path_factory.mktemp("runs")), timeout_seconds=120)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_fused_optimizer_equals_the_unfused_one(runs: list[Any], case: tuple[str, str]) -> None:
    name, variant = case
    alone, steps = train(LOCAL, name, VARIANTS[variant], foreach=False, fused=False)
    fp16 = "precision" in VARIANTS[variant]
    assert steps == (11 if fp16 else 12), "the scheduler must not step when the optimizer step is skipped"
    for rank in runs:
        for parameters, scheduled in rank[case]:
            assert scheduled == steps
            for found, wanted in zip(parameters, alone, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3 if fp16 else 1e-6)
        fused, loops = rank[case][:2]
        for found, wanted in zip(fused[0], loops[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def compare_after_a_skipped_first_step(backend: Backend) -> None:
    """Compare fused and foreach optimizers whose first step overflows, for every value of `shard`."""
    for name in OPTIMIZERS:
        expected, _ = train(backend, name, VARIANTS["fp16"], overflow=1, foreach=True)
        for shard in ("none", "state", "gradients", "parameters"):
            settings = {**VARIANTS["fp16"], "shard": shard}
            found, scheduled = train(backend, name, settings, overflow=1, fused=True)
            assert scheduled == 11, (name, shard)
            for value, wanted in zip(found, expected, strict=True):
                complete = gather_complete_tensor(value, backend)
                torch.testing.assert_close(
                    complete, wanted, rtol=0, atol=1e-5, msg=lambda text, where=(name, shard): f"{where}: {text}"
                )


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_fused_optimizer_continues_after_a_skipped_first_step(backend: str) -> None:
    with RankGroup(backend, 2) as group:
        group.run(compare_after_a_skipped_first_step)

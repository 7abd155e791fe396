"""Mixed precision: dtypes of operations and parameters, loss scaling, and steps that are skipped after an overflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import SEVERAL_RANKS
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
OVERFLOW_STEP = 3  # the step, counted from 0, in which a gradient is made infinite


class Network(nn.Module):
    """Records the dtypes of its activations. With `overflows`, its gradient is infinite in step OVERFLOW_STEP."""

    def __init__(self, *, overflows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.dtypes: set[torch.dtype] = set()
        self.overflows, self.backwards = overflows, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        self.dtypes.add(hidden.dtype)
        if hidden.requires_grad:
            hidden.register_hook(self._overflow)
        result: Tensor = self.second(hidden)
        return result

    def _overflow(self, gradient: Tensor) -> Tensor | None:
        self.backwards += 1
        return gradient * float("inf") if self.overflows and self.backwards == OVERFLOW_STEP + 1 else None


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator))


def make_trainer(backend: Backend, model: Network, **settings: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = TrainConfig(**{"max_steps": 8, "batch_size": 12 // backend.size, "progress": "off", **settings})
    scheduler = StepLR(optimizer, 1, gamma=0.9)
    return Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config, scheduler=scheduler)


def train(backend: Backend, overflowing_rank: int | None, settings: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return the parameters and the number of scheduler steps."""
    model = Network(overflows=backend.rank == overflowing_rank)
    trainer = make_trainer(backend, model, **settings)
    trainer.fit(data())
    return [parameter.detach().clone() for parameter in model.parameters()], trainer.scheduler.last_epoch


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_forward_uses_the_precision_and_parameters_keep_their_dtype(precision: str, dtype: torch.dtype) -> None:
    model = Network()
    make_trainer(LOCAL, model, precision=precision).fit(data(), data())
    assert model.dtypes == {dtype}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_results_are_close_to_single_precision() -> None:
    expected, _ = train(LOCAL, None, {})
    for precision, tolerance in (("bf16", 2e-2), ("fp16", 2e-3)):
        found, _ = train(LOCAL, None, {"precision": precision})
        difference = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
        assert 0 < difference < tolerance, precision


def test_loss_scale_is_restored_from_a_checkpoint(tmp_path: Path) -> None:
    uninterrupted, _ = train(LOCAL, 0, {"precision": "fp16"})
    settings = {"precision": "fp16", "output_dir": tmp_path, "resume": True}
    train(LOCAL, 0, {**settings, "max_steps": 5})
    resumed = make_trainer(LOCAL, Network(), **settings)
    state = resumed._precision.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (32768.0, 1), "one overflow, then one step"
    parts, _ = train(LOCAL, None, settings)
    assert all(torch.equal(one, other) for one, other in zip(uninterrupted, parts, strict=True))


@pytest.fixture(scope="module", params=SEVERAL_RANKS, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.5}], ids=["plain", "clipped"])
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(group: RankGroup, settings: dict[str, Any]) -> None:
    settings = {"precision": "fp16", **settings}
    alone, steps = train(LOCAL, 0, settings)
    assert steps == 7, "the scheduler must not step when the optimizer step is skipped"
    results = group.run(train, 1, settings)
    for parameters, scheduled in results:
        assert scheduled == 7
        for found, first, wanted in zip(parameters, results[0][0], alone, strict=True):
            assert torch.equal(found, first)
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
    undisturbed, _ = train(LOCAL, None, settings)
    assert max(float((one - other).abs().max()) for one, other in zip(alone, undisturbed, strict=True)) > 5e-3


def test_bf16_results_are_the_same_on_every_rank(group: RankGroup) -> None:
    alone, _ = train(LOCAL, None, {"precision": "bf16"})
    results = group.run(train, None, {"precision": "bf16"})
    for parameters, _ in results:
        for found, first, wanted in zip(parameters, results[0][0], alone, strict=True):
            assert torch.equal(found, first)
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)

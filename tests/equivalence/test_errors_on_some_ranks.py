"""An exception of a user's function on one rank is raised on every rank, and the ranks can then continue together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from groups import GROUPS
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.errors import CallbackError, RankFailedError
from unitrain.testing import RankGroup


class UnpicklableError(Exception):
    """An exception whose class cannot be called with its arguments only, so that it cannot be unpickled."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Faults:
    """Raises an exception in the selected function on the last rank."""

    def __init__(self, backend: Backend) -> None:
        self.where, self.error = "", Exception()
        self._is_last = backend.rank == backend.size - 1

    def check(self, where: str) -> None:
        if self._is_last and where == self.where:
            raise self.error


class FaultyData(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, faults: Faults, length: int) -> None:
        self._faults, self._length = faults, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._faults.check("dataset")
        return torch.full((2,), float(index)), torch.full((1,), float(index))


class FaultyCallback(unitrain.Callback):
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def on_fit_start(self, trainer: Any) -> None:
        self._faults.check("on_fit_start")

    def on_epoch_end(self, trainer: Any, results: dict[str, float]) -> None:
        self._faults.check("on_epoch_end")

    def on_fit_end(self, trainer: Any) -> None:
        self._faults.check("on_fit_end")


def create_trainer(backend: Backend, faults: Faults, shard: str) -> unitrain.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            faults.check("loss_fn")
        return nn.functional.mse_loss(output, target)

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        output = model(batch[0])
        if not torch.is_grad_enabled():
            faults.check("forward")
        return output, batch[1]

    def metric(output: Tensor, target: Tensor) -> Tensor:
        faults.check("metric")
        return (output - target).abs().mean(1)

    config = unitrain.TrainConfig(max_epochs=1, batch_size=4, progress="off", shard=shard)  # type: ignore[arg-type]
    return unitrain.Trainer(
        model,
        torch.optim.SGD(model.parameters(), 1e-3),
        loss_fn,
        backend=backend,
        config=config,
        metrics={"mae": metric},
        callbacks=[FaultyCallback(faults)],
        forward=forward,
    )


def check_errors(backend: Backend, shard: str) -> None:
    faults = Faults(backend)
    trainer = create_trainer(backend, faults, shard)
    train_data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))

    def fit() -> object:
        return create_trainer(backend, faults, shard).fit(
            train_data, {"v": FaultyData(faults, 7), "w": FaultyData(faults, 3)}
        )

    def evaluate() -> object:
        return trainer.evaluate(FaultyData(faults, 7))

    def predict() -> object:
        return trainer.predict(FaultyData(faults, 7))

    calls: list[tuple[Callable[[], object], str]] = [
        *[(evaluate, where) for where in ("dataset", "loss_fn", "forward", "metric")],
        *[(predict, where) for where in ("dataset", "forward")],
        *[(fit, where) for where in ("on_fit_start", "loss_fn", "metric", "on_epoch_end", "on_fit_end")],
    ]
    own_errors = {RuntimeError("boom"): RuntimeError, KeyError("boom"): KeyError, UnpicklableError("boom", 3): None}
    for call, where in calls:
        for error, error_class in own_errors.items():
            expected: Any = error_class
            if where.startswith("on_"):
                expected = CallbackError
            elif error_class is None:
                expected = UnpicklableError if backend.rank == backend.size - 1 else RankFailedError
            faults.where, faults.error = where, error
            with pytest.raises(expected, match="boom") as caught:
                call()
            assert type(caught.value) is expected, (call, where)
            if backend.rank < backend.size - 1 and expected is not RankFailedError:
                (note,) = caught.value.__notes__
                assert note.startswith(f"Rank {backend.size - 1} raised this error")
            faults.where = ""
            results = backend.allgather_object(trainer.evaluate(FaultyData(faults, 7)))
            assert all(result == results[0] for result in results)
            assert len(trainer.predict(FaultyData(faults, 3))) == 3
    fit()


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_error_on_one_rank_is_raised_on_every_rank_and_the_ranks_continue(group: RankGroup, shard: str) -> None:
    group.run(check_errors, shard, timeout_seconds=120)

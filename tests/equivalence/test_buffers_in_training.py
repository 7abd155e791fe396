"""Saving, evaluating and resuming do not change the training of a model whose forward pass reads and writes buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import GROUPS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

STEPS, SAMPLES, GLOBAL_BATCH = 14, 60, 12


class Codebook(nn.Module):
    """Codebook of a VQ-VAE: moves each input towards the nearest code, and each code towards its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encode, self.norm = nn.Linear(4, 3).double(), nn.BatchNorm1d(3).double()
        self.decode = nn.Linear(3, 2).double()
        self.codes: Tensor
        self.register_buffer("codes", torch.randn(5, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.encode(x))
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        output: Tensor = self.decode(hidden + 0.5 * (self.codes[nearest] - hidden))
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, 0.1 * (hidden - self.codes[nearest]))
        return output


def train(backend: Backend, folder: str | None, steps: int = STEPS, validate: bool = False, **settings: Any) -> Any:
    model = Codebook()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator).double(), torch.randn(SAMPLES, 2, generator=generator).double()
    )
    config = TrainConfig(
        max_steps=steps, batch_size=GLOBAL_BATCH // backend.size, output_dir=folder, progress="off", **settings
    )
    trainer = Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config)
    trainer.fit(data, data if validate else None)
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert all(torch.equal(one, parameters) for one in backend.allgather(parameters[None]))
    return [*parameters.tolist(), *(model.codes.flatten().tolist() if backend.rank == 0 else [])]


def train_all(backend: Backend, folder: str) -> dict[str, Any]:
    found = {"undisturbed": train(backend, None), "validated": train(backend, None, validate=True)}
    for every in (1, 3):
        found[f"saved every {every}"] = train(backend, f"{folder}/{every}", checkpoint_every_steps=every)
    train(backend, f"{folder}/stopped", steps=7)
    found["resumed"] = train(backend, f"{folder}/stopped", resume=True)
    return found


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as group:
        yield group


def test_training_does_not_depend_on_saving_evaluating_and_resuming(ranks: RankGroup, tmp_path: Path) -> None:
    found = ranks.run(train_all, str(tmp_path), timeout_seconds=120)[0]
    resumed = found.pop("resumed")
    assert {name: values == found["undisturbed"] for name, values in found.items()} == dict.fromkeys(found, True)
    # DDP rebuilds its buckets after the first backward pass of every run, including a resumed one. This changes the
    # summation order of three ranks, and thus rounding.
    tolerance = 1e-9 if ranks.size > 2 else 0.0
    assert resumed == pytest.approx(found["undisturbed"], rel=tolerance, abs=tolerance)


class Scaled(nn.Module):
    """A layer whose buffer is an expanded view: its elements share memory."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 2).double()
        self.scale: Tensor
        self.register_buffer("scale", torch.full((1, 1), scale).double().expand(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) * self.scale[0]
        return output


def train_scaled(backend: Backend) -> tuple[list[float], list[float]]:
    model = Scaled(1.0 + backend.rank)
    config = TrainConfig(max_steps=2, batch_size=2, ema_decay=0.9, progress="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config)
    data = TensorDataset(torch.ones(8, 4).double(), torch.ones(8, 2).double())
    trainer.fit(data, data)
    assert trainer.averaged_model is not None
    assert torch.equal(trainer.averaged_model.scale, model.scale)  # type: ignore[arg-type]
    return model.scale.flatten().tolist(), model.linear.weight.flatten().tolist()


@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("ddp", 2), ("horovod", 2)])
def test_rank_0_broadcasts_an_expanded_buffer(backend: str, size: int) -> None:
    with RankGroup(backend, size) as group:
        results = group.run(train_scaled)
    assert all(result == results[0] for result in results)
    assert results[0][0] == [1.0] * 6


class Views(nn.Module):
    """A model whose tensors are views of larger storages: slices, an expanded view, and a tied slice."""

    def __init__(self, value: float) -> None:
        super().__init__()
        weights = torch.full((5, 4), value).double()  # an LSTM on a GPU stores its weights like this
        self.first, self.second = nn.Parameter(weights[:2]), nn.Parameter(weights[2:4])
        self.tied = self.second
        self.scale: Tensor
        self.register_buffer("scale", torch.full((1, 1), value).double().expand(3, 2))
        self.register_buffer("slice", torch.arange(9.0)[2:4] * value)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = (x @ self.first.T + x @ self.tied.T) * self.scale[0]
        return output


def train_views(backend: Backend, folder: str, steps: int, asynchronous: bool) -> dict[str, Tensor]:
    """Train until `steps` steps are complete, resuming from `folder`. The initial values of the model differ from the
    values in the checkpoint. Return the state of the model and of its average."""
    model = Views(float(steps))
    config = TrainConfig(
        max_steps=steps, batch_size=2, ema_decay=0.9, progress="off", output_dir=folder, resume=True,
        async_checkpoints=asynchronous,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config)
    trainer.fit(TensorDataset(torch.ones(8, 4).double(), torch.ones(8, 2).double()))
    assert model.scale.stride() == (0, 0)
    assert model.tied is model.second
    assert trainer.averaged_model is not None
    found = {**model.state_dict(), **{f"average {n}": v for n, v in trainer.averaged_model.state_dict().items()}}
    found = {name: value.clone() for name, value in found.items()}
    model.scale.data = torch.zeros(1, 1).double().expand(3, 2)
    trainer.load_weights(folder)
    assert torch.equal(model.scale, found["scale"])
    return found


@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("ddp", 2), ("horovod", 2)])
def test_views_of_larger_storages_are_saved_and_restored(backend: str, size: int, tmp_path: Path) -> None:
    with RankGroup(backend, size) as group:
        for asynchronous in (False, True):
            folder = str(tmp_path / str(asynchronous))
            (first, *_) = group.run(train_views, folder, 1, asynchronous)
            resumed = group.run(train_views, folder, 2, asynchronous)
            assert first["scale"].tolist() == [[1.0, 1.0]] * 3
            for found in resumed:
                for name in ("scale", "average scale", "slice"):
                    assert torch.equal(found[name], first[name]), name
                assert not torch.equal(found["second"], first["second"])
                assert (
                    float((found["second"] - first["second"]).abs().max()) < 0.5
                )  # the elements of a new model are 2.0
                for name, value in found.items():
                    assert torch.equal(value, resumed[0][name]), name

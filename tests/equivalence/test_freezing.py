"""Training with the callback of examples/freezing.py equals plain torch with frozen parameters, also after a resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import ci
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.order import epoch_order
from unitrain.testing import RankGroup

RANKS_IMPORT = ("sklearn.datasets",)  # of the example
LOCAL = LocalBackend(torch.device("cpu"))
GROUPS = [("local", 1), ("horovod", 2), *ci(("ddp", 3))]
SAMPLES, BATCH, EPOCHS, FROZEN = 48, 12, 4, 2
EXAMPLES = str(Path(__file__).parents[2] / "examples")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 2, generator=generator))


def build_model_and_optimizer() -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def train(backend: Backend, epochs: int = EPOCHS, **settings: Any) -> list[list[float]]:
    """Return the parameters of the first layer and of the last layer."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    from freezing import Freeze

    model, optimizer = build_model_and_optimizer()
    config = TrainConfig(max_epochs=epochs, global_batch_size=BATCH, progress="off", max_grad_norm=0.5, **settings)
    callbacks = [Freeze([model[0]], FROZEN)]
    Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config, callbacks=callbacks).fit(data())
    return [nn.utils.parameters_to_vector(layer.parameters()).tolist() for layer in (model[0], model[2])]


def train_in_plain_torch(epochs: int = EPOCHS) -> list[Tensor]:
    model, optimizer = build_model_and_optimizer()
    inputs, targets = data().tensors
    for epoch in range(epochs):
        model[0].requires_grad_(epoch >= FROZEN)
        for chosen in epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True).split(BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return [nn.utils.parameters_to_vector(layer.parameters()).detach() for layer in (model[0], model[2])]


def train_all(backend: Backend, folder: str) -> dict[str, list[list[float]]]:
    runs = {"complete": train(backend), "frozen": train(backend, FROZEN)}
    for first in (1, 3):  # resume before and after unfreezing
        output = f"{folder}/{first}"
        train(backend, first, output_dir=output)
        runs[f"resumed after {first}"] = train(backend, output_dir=output, resume=True)
    if backend.size > 1:
        runs["sharded"] = train(backend, shard="state")
    return runs


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def test_training_with_frozen_layers_equals_plain_torch(group: tuple[str, int], tmp_path: Path) -> None:
    if group[0] == "local":
        ranks = [train_all(LOCAL, str(tmp_path))]
    else:
        with RankGroup(*group) as started:
            ranks = started.run(train_all, str(tmp_path))
    initial = nn.utils.parameters_to_vector(build_model_and_optimizer()[0][0].parameters()).tolist()
    for runs in ranks:
        frozen = runs.pop("frozen")
        assert frozen[0] == initial  # bit-identical
        torch.testing.assert_close(torch.tensor(frozen[1]), train_in_plain_torch(FROZEN)[1], atol=1e-6, rtol=0)
        for found in runs.values():
            for layer, expected in zip(found, train_in_plain_torch(), strict=True):
                torch.testing.assert_close(torch.tensor(layer), expected, atol=1e-6, rtol=0)


def test_frozen_running_statistics_do_not_change() -> None:
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    from freezing import Freeze

    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
    found = {}
    for epochs in (FROZEN, EPOCHS):
        config = TrainConfig(max_epochs=epochs, batch_size=BATCH, progress="off")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(
            model, optimizer, nn.MSELoss(), backend=LOCAL, config=config, callbacks=[Freeze([model[0]], FROZEN)]
        )
        trainer.fit(data(), data())
        found[epochs] = int(model[0].num_batches_tracked)
    assert found == {FROZEN: 0, EPOCHS: (EPOCHS - FROZEN) * SAMPLES // BATCH}

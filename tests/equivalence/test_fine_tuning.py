"""Fine-tuning with a callback that freezes and unfreezes layers between epochs equals fine-tuning in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from groups import SEVERAL_RANKS
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
TRAINED = [[2], [1, 2], [0, 1, 2], [0, 1]]  # the trained layers of each epoch


class ChangeTrainedLayers(Callback):
    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        set_trained_layers(trainer.backend.unwrap(trainer.model), trainer.progress.epoch)


def set_trained_layers(model: nn.Module, epoch: int) -> None:
    for number, layer in enumerate(model.children()):
        layer.requires_grad_(number in TRAINED[epoch % len(TRAINED)])


def train(backend: Backend) -> tuple[list[Tensor], list[bool]]:
    """Return the parameters and their averages, and whether each parameter has changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_trained_layers(model, 0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(38, 6, generator=generator), torch.randint(3, (38,), generator=generator))
    config = TrainConfig(max_epochs=len(TRAINED), batch_size=12 // backend.size, ema_decay=0.5, progress="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    callbacks = [ChangeTrainedLayers()]
    trainer = Trainer(
        model, optimizer, nn.functional.cross_entropy, backend=backend, config=config, callbacks=callbacks
    )
    trainer.fit(data)
    assert trainer.averaged_model is not None
    found = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    changed = [not torch.equal(one, other) for one, other in zip(found, before, strict=True)]
    return [*found, *trainer.averaged_model.parameters()], changed


@pytest.fixture(scope="module", params=SEVERAL_RANKS, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


def test_fine_tuning_equals_one_process(group: RankGroup) -> None:
    expected, changed = train(LOCAL)
    assert all(changed)
    for parameters, _ in group.run(train):
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)

"""A run that resumes on another backend and number of ranks equals an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

GLOBAL_BATCH, SAMPLES, EPOCHS = 12, 50, 4


def train(backend: Backend, folder: str, epochs: int) -> list[Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    generator = torch.Generator().manual_seed(6)
    data = TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator).double(), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )
    config = TrainConfig(
        max_epochs=epochs, batch_size=GLOBAL_BATCH // backend.size, output_dir=folder, resume=True, progress="off"
    )
    trainer = Trainer(
        model, optimizer, nn.functional.cross_entropy, backend=backend, config=config, scheduler=scheduler
    )
    trainer.fit(data)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "route",
    [
        [("ddp", 2), ("horovod", 2)],
        [("horovod", 2), ("ddp", 3)],
        [("local", 1), ("horovod", 3), ("ddp", 2), ("local", 1)],
    ],
    ids=lambda route: "-".join(f"{backend}{size}" for backend, size in route),
)
def test_every_sequence_of_resumes_equals_one_process(route: list[tuple[str, int]], tmp_path: Path) -> None:
    with RankGroup("local", 1) as group:
        (expected,) = group.run(train, str(tmp_path / "alone"), EPOCHS)
    for stage, (backend, size) in enumerate(route, start=1):
        with RankGroup(backend, size) as group:
            results = group.run(train, str(tmp_path / "route"), stage * EPOCHS // len(route))
    for parameters in results:
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)

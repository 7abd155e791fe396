"""Training with sharded state or gradients gives the same results as replicated training. Checkpoints can be loaded
with any sharding, backend and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.sharding.partition import MIN_DIVIDED_ELEMENTS
from unitrain.checkpoint import files
from unitrain.errors import ConfigError
from unitrain.testing import RankGroup

INPUTS, CLASSES = 8, 4
WIDTH = MIN_DIVIDED_ELEMENTS // INPUTS + 8  # large enough to be sharded


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(50, INPUTS, generator=generator), torch.randint(CLASSES, (50,), generator=generator)
    )


def train(backend: Backend, settings: dict[str, Any]) -> tuple[list[Tensor], dict[str, float]]:
    """Train for `max_steps`. Return the parameters, their average and the results."""
    torch.manual_seed(0)
    embedding, head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(embedding, nn.BatchNorm1d(WIDTH), nn.ReLU(), head).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    config = TrainConfig(
        global_batch_size=12, gradient_accumulation_steps=2, sync_batch_norm=True, max_grad_norm=0.5, ema_decay=0.5,
        progress="off", **settings,
    )  # fmt: skip
    trainer = Trainer(
        model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, scheduler=scheduler,
        forward=lambda model, batch: (model(batch[0].double()), batch[1]),
    )  # fmt: skip
    results = trainer.fit(data(), data())
    assert trainer.averaged_model is not None
    return [value.detach() for module in (model, trainer.averaged_model) for value in module.parameters()], results


def assert_equal(one: tuple[list[Tensor], dict[str, float]], other: tuple[list[Tensor], dict[str, float]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-10)
    assert one[1] == pytest.approx(other[1], abs=1e-10)


def test_sharded_training_equals_and_resumes_replicated_training(tmp_path: Path) -> None:
    """Resume one run with 2, 3 and 1 ranks on both backends, with and without sharding, in both checkpoint formats."""
    with RankGroup("local", 1) as group:
        expected = {steps: group.run(train, {"max_steps": steps})[0] for steps in (3, 6, 9, 11, 13, 15)}
    parts = [
        ("ddp", 2, 3, "state", "auto", 2),
        ("horovod", 3, 6, "gradients", "auto", 3),
        ("ddp", 3, 9, "none", "sharded", 3),
        ("local", 1, 11, "gradients", "auto", 1),
        ("ddp", 2, 13, "gradients", "full", None),
        ("ddp", 2, 15, "none", "auto", None),
    ]
    for backend, size, steps, shard, checkpoint_format, ranks in parts:
        with RankGroup(backend, size) as group:
            settings = {
                "shard": shard, "checkpoint_format": checkpoint_format, "output_dir": tmp_path, "resume": True,
                "max_steps": steps,
            }  # fmt: skip
            for found in group.run(train, settings):
                assert_equal(found, expected[steps])
        assert files.read_manifest(files.checkpoint_path(tmp_path, steps)).get("ranks") == ranks


def test_unknown_sharding_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Unknown TrainConfig.shard 'states'. Did you mean 'state'\?"):
        TrainConfig(max_steps=1, shard="states")  # type: ignore[arg-type]

"""Counting FLOPs for the MFU does not change the results of training, with any setting of the Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import ci
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Backend
from unitrain.testing import RankGroup

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "state": {"shard": "state"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "powersgd": {"compression": "powersgd"},
    "logical ranks": {"logical_ranks": 4},
    "local steps": {"local_sgd": 2},
    "precision": {"precision": "bf16", "ema_decay": 0.9, "sync_batch_norm": True},
    "activations": {"checkpoint_activations": ("Block",)},
}
SAMPLES, WIDTH = 32, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(torch.relu(self.norm(self.linear(inputs))))


def train(backend: Backend, folder: Path, settings: dict[str, Any], peak_flops: float | None) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(0, 3, (SAMPLES,)))
    config = unitrain.TrainConfig(
        max_steps=5,
        batch_size=4,
        output_dir=folder,
        progress="off",
        log_every_n_steps=1,
        peak_flops=peak_flops,
        **settings,
    )
    trainer = unitrain.Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config)
    trainer.fit(data)
    trainer.load_weights(folder)
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare_counted_with_plain(backend: Backend, folder: Path) -> dict[str, bool]:
    """For each of SETTINGS, return whether the results with and without counting are equal."""
    found = {}
    for name, settings in SETTINGS.items():
        pair = [
            [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in parameters]
            for parameters in (
                train(backend, folder / name / "counted", settings, 1e9),
                train(backend, folder / name / "plain", settings, None),
            )
        ]
        found[name] = all(map(torch.equal, *pair))
    return found


@pytest.mark.parametrize("backend", ci("ddp", "horovod"))
def test_counting_flops_does_not_change_the_results(backend: str, tmp_path: Path) -> None:
    with RankGroup(backend, 2) as group:
        results = group.run(compare_counted_with_plain, tmp_path, timeout_seconds=250)
    assert results == [dict.fromkeys(SETTINGS, True)] * 2
    flops = {}
    for case in SETTINGS:
        first, *_ = [
            json.loads(line) for line in (tmp_path / case / "counted" / "steps.jsonl").read_text().splitlines()
        ]
        flops[case] = first["mfu"] * 2e9 / first["samples_per_second"]
    # The expected FLOPs are the matrix products of the forward pass and of the backward pass. The backward pass
    # computes gradients of weights and, except in the first layer, of inputs. PowerSGD adds matrix products of the
    # gradients.
    products = 2 * (2 * WIDTH * WIDTH + WIDTH * 3)
    wanted = 3 * products - 2 * WIDTH * WIDTH
    compressed = flops.pop("powersgd")
    assert flops == pytest.approx(dict.fromkeys(flops, wanted))
    assert compressed >= wanted * (1 - 1e-12)

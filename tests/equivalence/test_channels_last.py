"""TrainConfig(channels_last=True) changes the memory layout, but not the results, parameter names or checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.modules.acceleration import use_channels_last
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))


class Network(nn.Module):
    """Records the memory layouts of its activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(4, 5)
        self.layouts: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        self.layouts.add(x.is_contiguous(memory_format=torch.channels_last))
        result: Tensor = self.head(self.second(x).mean((2, 3)))
        return result


def train(backend: Backend, settings: dict[str, Any]) -> tuple[dict[str, Tensor], set[bool], bool]:
    """Return the model's state, the layouts of its activations, and whether its final weights are channels last."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(50, 3, 8, 8, generator=generator), torch.randint(5, (50,), generator=generator))
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = TrainConfig(
        **{"max_epochs": 4, "batch_size": 12 // backend.size, "sync_batch_norm": True, "progress": "off", **settings}
    )
    Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config).fit(data, data)
    last = model.second.weight.is_contiguous(memory_format=torch.channels_last)
    return {name: value.contiguous() for name, value in model.state_dict().items()}, model.layouts, last


@pytest.fixture(scope="module", params=[("local", 1), ("ddp", 2), ("horovod", 3)], ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


def test_channels_last_gives_the_same_results(group: RankGroup, tmp_path: Path) -> None:
    expected, layouts, last = train(LOCAL, {})
    assert (layouts, last) == ({False}, False)
    settings = {"channels_last": True, "output_dir": str(tmp_path), "resume": True}
    train(LOCAL, {**settings, "channels_last": False, "max_epochs": 1})  # the next run resumes in another layout
    for more in ({"max_epochs": 2}, {"ema_decay": 0.9}):
        results = group.run(train, {**settings, **more})
    for state, layouts, last in results:
        assert (layouts, last) == ({True}, True)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)


def test_only_4d_tensors_are_converted_to_channels_last() -> None:
    found: list[Any] = []

    class Keep(nn.Module):
        def forward(self, *inputs: Any, **named: Any) -> None:
            found.extend([*inputs, *named.values()])

    model = Keep()
    use_channels_last(model)
    use_channels_last(model)
    assert len(model._forward_pre_hooks) == 1
    images, masks, words = torch.rand(2, 3, 4, 4), torch.ones(2, 3, 4, 4).long(), torch.rand(2, 3, 4)
    model([images, (masks, "text")], words=words, more={"images": images})
    (first, (second, text)), third, fourth = found
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert fourth["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first, images)
    assert (second is masks, text, third is words) == (True, "text", True)

"""A rank without data runs a step with a dummy batch, which does not affect the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

RATE, DECAY = 0.1, 0.2
FEATURES = 4


class Routed(nn.Module):
    """A model that passes a batch to the expert with the index given in the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(FEATURES).double()
        self.experts = nn.ModuleList([nn.Linear(FEATURES, 1).double() for _ in range(4)])
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: tuple[int, Tensor]) -> Tensor:
        expert, x = batch
        self.seen += len(x)
        output: Tensor = self.experts[expert](self.norm(x))
        return output


def batches(rank: int, counts: list[int]) -> list[tuple[int, Tensor]]:
    """Return the batches of a rank as pairs (expert index, inputs)."""
    generator = torch.Generator().manual_seed(rank)
    return [(rank, torch.randn(3, FEATURES, generator=generator).double()) for _ in range(counts[rank])]


class OwnStream(IterableDataset[Any]):
    def __init__(self, rank: int, counts: list[int]) -> None:
        self.rank, self.counts = rank, counts

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(self.rank, self.counts))


def loss_fn(output: Tensor, target: None) -> Tensor:
    return output.sin().mean()


def train(backend: Backend, counts: list[int], tokens: bool) -> dict[str, Tensor]:
    from torch.utils.data import DataLoader

    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY, momentum=0.5)
    config = TrainConfig(max_epochs=1, stream="own", find_unused_parameters=True, progress="off")

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        return model(batch), None

    def summed_loss(output: Tensor, target: None) -> tuple[Tensor, int]:
        return output.sin().sum(), len(output)

    trainer = Trainer(
        model, optimizer, summed_loss if tokens else loss_fn, backend=backend, config=config, forward=forward
    )  # fmt: skip
    trainer.fit(DataLoader(OwnStream(backend.rank, counts), batch_size=None))
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_in_plain_torch(counts: list[int]) -> dict[str, Tensor]:
    """Train with plain torch on the existing batches. Return the parameters and the statistics of rank 0's batches."""
    model, statistics = Routed(), Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY, momentum=0.5)
    for step in range(max(counts)):
        present = [batches(rank, counts)[step] for rank in range(len(counts)) if step < counts[rank]]
        for batch in present:
            (loss_fn(model(batch), None) / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < counts[0]:
            statistics(batches(0, counts)[step])
    return {**statistics.state_dict(), **dict(model.named_parameters())}


@pytest.fixture(scope="module", params=[("ddp", 2), ("horovod", 3)], ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as group:
        yield group


@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize("counts", [[3, 1, 3], [1, 3, 2]], ids=["rank 1 runs out", "rank 0 runs out"])
def test_a_dummy_batch_does_not_change_parameters_or_statistics(
    ranks: RankGroup, counts: list[int], tokens: bool
) -> None:
    counts = counts[: ranks.size]
    wanted = train_in_plain_torch(counts)
    found = ranks.run(train, counts, tokens)
    for rank, state in enumerate(found):
        for name, value in wanted.items():
            if rank == 0 or not name.startswith(("norm.running", "norm.num", "seen")):
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=f"{name} on rank {rank}")

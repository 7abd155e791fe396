"""A dataset item that raises StopIteration is an error, and does not end the epoch early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from unitrain import DataError, ShardedLoader, TrainConfig, Trainer
from unitrain.backends.local import LocalBackend

LOCAL = LocalBackend(torch.device("cpu"))
SAMPLES, BATCH = 24, 4


class Ends(Dataset[tuple[Tensor, Tensor]]):
    """A dataset whose item `last` calls next() on an iterator that has ended."""

    def __init__(self, last: int | None) -> None:
        self.last = last

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.last:
            next(iter(()))
        return torch.ones(4), torch.ones(1)


def collate(samples: Any) -> Any:
    return default_collate(samples)


def collate_and_end(samples: Any) -> Any:
    return next(iter(()))


def make_trainer(**settings: Any) -> Trainer:
    model = nn.Linear(4, 1)
    config = TrainConfig(max_epochs=1, progress="off", **settings)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), backend=LOCAL, config=config)


@pytest.mark.parametrize(("last", "workers"), [(0, 0), (13, 0), (SAMPLES - 1, 0), (13, 2)])
def test_stop_iteration_of_an_item_names_the_items_of_its_batch(last: int, workers: int) -> None:
    loader = DataLoader(Ends(last), BATCH, num_workers=workers)
    collated = DataLoader(Ends(last), BATCH, num_workers=workers, collate_fn=collate)
    sampled = DataLoader(Ends(last), BATCH, num_workers=workers, sampler=range(SAMPLES))
    start = last // BATCH * BATCH
    items = ", ".join(str(index) for index in range(start, start + BATCH))
    message = (
        rf"StopIteration was raised while a batch of Ends was loaded, of the items {items}; it would end the epoch"
    )
    for data in (loader, collated, sampled):
        for run in [
            make_trainer().fit, make_trainer().evaluate, make_trainer().predict,
            lambda data: list(ShardedLoader(data, LOCAL)),
            lambda data: list(ShardedLoader(data, LOCAL, shuffle=False)),
        ][: 1 if workers else None]:  # fmt: skip
            with pytest.raises(DataError, match=message):
                run(data)
        if workers:
            break  # starting workers takes long
    with pytest.raises(DataError, match="StopIteration was raised while a batch of"):
        make_trainer(logical_ranks=2).fit(loader)


def test_stop_iteration_of_a_collate_function_is_an_error() -> None:
    with pytest.raises(DataError, match="of the items 0, 1, 2, 3; it would end"):
        make_trainer().fit(DataLoader(Ends(None), BATCH, collate_fn=collate_and_end))


@pytest.mark.parametrize("workers", [0, 2])
def test_data_without_stop_iteration_is_complete_in_every_epoch(workers: int) -> None:
    data = DataLoader(Ends(None), BATCH, num_workers=workers, persistent_workers=workers > 0)
    loader = ShardedLoader(data, LOCAL)
    for _ in range(3):
        assert sum(len(batch[0]) for batch in loader) == SAMPLES
        for _ in zip(range(2), loader, strict=False):  # ends within an epoch
            pass

"""Data that a callback changes is used as by a plain DataLoader, which reads each sample when a batch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import GROUPS_ON_HOROVOD
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from unitrain import Callback, CheckpointError, DataError, ShardedLoader, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.loading import _index_dataset
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
GLOBAL_BATCH = 4


class Listed(Dataset[Any]):
    """A dataset whose samples are in a list."""

    def __init__(self, samples: int) -> None:
        self.items = [float(index) for index in range(samples)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.items[index]]), torch.zeros(1)


def tensors(samples: int = 8, first: float = 0.0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + samples)[:, None], torch.zeros(samples, 1))


def replace_tensors(dataset: Any) -> None:
    dataset.tensors = (dataset.tensors[0] + 100, dataset.tensors[1])


def replace_indices(dataset: Any) -> None:
    dataset.indices = [7, 6, -1, 4]


def replace_indices_by_an_array(dataset: Any) -> None:
    dataset.indices = np.array([3, 2, 1, 5], dtype=np.int32)


def reverse_indices(dataset: Any) -> None:
    dataset.indices.reverse()


def replace_inner_tensors(dataset: Any) -> None:
    replace_tensors(dataset.dataset.dataset)


def append_item(dataset: Any) -> None:
    dataset.items.append(50.0)


def remove_items(dataset: Any) -> None:
    del dataset.items[3:]


def grow_tensors(dataset: Any) -> None:
    dataset.tensors = tensors(13, 20.0).tensors


def grow_indices(dataset: Any) -> None:
    dataset.indices += [6, 7, 7]


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "tensors replaced": (tensors, replace_tensors),
    "indices replaced": (lambda: Subset(tensors(), [0, 1, 2, 3]), replace_indices),
    "indices replaced by an array": (lambda: Subset(tensors(), [0, 1, 2, 3]), replace_indices_by_an_array),
    "indices reversed in place": (lambda: Subset(tensors(), [0, 1, 2, 3]), reverse_indices),
    "tensors of nested subsets replaced": (
        lambda: Subset(Subset(tensors(), [4, 5, 6, 7]), [3, 2]),
        replace_inner_tensors,
    ),
    "item appended": (lambda: Listed(8), append_item),
    "items removed": (lambda: Listed(8), remove_items),
    "tensors grow": (tensors, grow_tensors),
    "indices grow": (lambda: Subset(tensors(), [0, 1, 2, 3]), grow_indices),
}


class Change(Callback):
    """Changes a dataset after an epoch or after a step, and records the samples of this rank."""

    def __init__(self, change: Callable[[Any], None], dataset: Any, *, after_step: int | None = None) -> None:
        self.change, self.dataset, self.after_step, self.samples = change, dataset, after_step, list[list[float]]()

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: Any, loss: Any) -> None:
        self.samples.append(batch[0][: micro_batch.samples].flatten().tolist())

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.after_step:
            self.change(self.dataset)

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        if self.after_step is None:
            self.change(self.dataset)


def fit(
    backend: Backend, case: str, form: str = "dataset", epochs: int = 3, val_data: bool = False, **settings: Any
) -> tuple[list[list[float]], list[float]]:
    make, change = CASES[case]
    dataset, model = make(), nn.Linear(1, 1)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    callback = Change(change, dataset, after_step=settings.pop("after_step", None))
    batch_size = GLOBAL_BATCH // backend.size
    data = dataset if form == "dataset" else DataLoader(dataset, batch_size, num_workers=2 * (form == "workers"))
    if form == "dataset":
        settings["batch_size"] = batch_size
    config = TrainConfig(max_epochs=epochs, shuffle=False, progress="off", **settings)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.0), nn.L1Loss(), backend=backend, config=config,
        callbacks=[callback],
    )  # fmt: skip
    results = [trainer.fit(data, dataset if val_data else None).get("val_loss", 0.0)]
    return callback.samples, results


def plain_epochs(case: str, after_step: int | None = None) -> list[list[float]]:
    make, change = CASES[case]
    dataset, steps = make(), list[list[float]]()
    for _ in range(3):
        for inputs, _ in DataLoader(dataset, batch_size=GLOBAL_BATCH):
            steps.append(inputs.flatten().tolist())
            if len(steps) == after_step:
                change(dataset)
        if after_step is None:
            change(dataset)
    return steps


def merge(ranks: list[list[list[float]]]) -> list[list[float]]:
    return [sorted(sample for part in step for sample in part) for step in zip(*ranks, strict=True)]


@pytest.fixture(scope="module", params=GROUPS_ON_HOROVOD, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["dataset", "loader", "workers"])
def test_changes_between_epochs_are_used(group: RankGroup, case: str, form: str) -> None:
    if form == "workers" and case != "tensors grow":
        form = "loader"
    wanted = [sorted(step) for step in plain_epochs(case)]
    assert merge([samples for samples, _ in group.run(fit, case, form)]) == wanted


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.partition(" ")[2] not in ("grow", "appended", "removed")]
)
def test_changes_within_an_epoch_are_used(case: str) -> None:
    assert fit(LOCAL, case, after_step=1)[0] == plain_epochs(case, after_step=1)


@pytest.mark.parametrize("case", ["tensors replaced", "item appended", "items removed", "indices grow"])
def test_validation_uses_the_current_data(group: RankGroup, case: str) -> None:
    make, change = CASES[case]
    dataset = make()
    change(dataset)
    wanted = float(torch.stack([inputs for inputs, _ in dataset]).mean())
    assert [losses for _, losses in group.run(fit, case, "dataset", 2, True)] == [[pytest.approx(wanted)]] * group.size


def grow_on_one_rank(backend: Backend) -> str:
    dataset, model = Listed(8), nn.Linear(1, 1)

    def change(data: Any) -> None:
        if backend.rank:
            append_item(data)

    config = TrainConfig(max_epochs=2, batch_size=2, progress="off")
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.0), nn.L1Loss(), backend=backend, config=config,
        callbacks=[Change(change, dataset)],
    )  # fmt: skip
    try:
        trainer.fit(dataset)
    except DataError as error:
        return str(error)
    return "accepted"


def test_a_change_on_one_rank_raises_on_every_rank(group: RankGroup) -> None:
    for text in group.run(grow_on_one_rank):
        if group.size > 1:
            assert text == (
                "The training data does not have the same number of samples on every rank: [8, 9]. Give every rank the "
                "complete dataset; unitrain shards it."
            )


# In one process.


def test_an_epoch_that_began_with_another_length_cannot_be_resumed(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 3:
                trainer.stop("within the second epoch")

    def make_trainer(dataset: Any, *callbacks: Callback) -> Trainer:
        model = nn.Linear(1, 1)
        config = TrainConfig(
            max_epochs=2, batch_size=4, progress="off", log_every_n_steps=1, output_dir=tmp_path, resume="auto"
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        return Trainer(model, optimizer, nn.L1Loss(), backend=LOCAL, config=config, callbacks=callbacks)

    dataset = Listed(8)
    make_trainer(dataset, Change(append_item, dataset), Stop()).fit(dataset)
    with pytest.raises(CheckpointError, match=r"of training data with length=9, but this data has length=8"):
        make_trainer(Listed(8)).fit(Listed(8))
    assert make_trainer(Listed(9)).fit(Listed(9))


def test_schedule_rejects_an_epoch_of_another_length() -> None:
    dataset, model = Listed(8), nn.Linear(1, 1)
    change = Change(append_item, dataset)
    config = TrainConfig(max_epochs=2, batch_size=4, progress="off")
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.L1Loss(), backend=LOCAL, config=config, callbacks=[change],
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"planned for 4 steps, but this run has 5, .* limit the run with max_st"):
        trainer.fit(dataset)
    assert len(change.samples) == 2, "the epoch must not begin"


def test_sharded_loader_uses_changed_data_in_training_and_rejects_it_in_evaluation() -> None:
    dataset = Listed(8)
    training = ShardedLoader(dataset, LOCAL, batch_size=4)
    evaluation = ShardedLoader(dataset, LOCAL, batch_size=4, shuffle=False)
    for samples in (8, 9):
        assert sum(len(batch[0]) for batch in training) == samples == len(dataset)
        append_item(dataset)
    with pytest.raises(DataError, match=r"^The evaluation data had 8 samples when it was divided among the ranks, but"):
        next(iter(evaluation))


def test_batches_of_tensors_equal_batches_of_samples() -> None:
    inner = TensorDataset(torch.arange(12.0)[:, None], torch.arange(12))
    indices: list[Any] = [
        [3, -1, 5, 0], (3, 4, 5, 6), range(2, 6), torch.tensor([1, -2, 3, 4]), np.array([4, 5, 6, 7], dtype=np.uint8),
        np.array([4, 5, 6, 7], dtype=np.int16), torch.tensor([4, 5, 6, 7], dtype=torch.int32),
    ]  # fmt: skip
    for chosen in indices:
        for dataset in (Subset(inner, chosen), Subset(Subset(inner, range(11, -1, -1)), chosen)):
            found = _index_dataset(dataset, torch.tensor([3, 0, 2]))
            wanted = [torch.stack(parts) for parts in zip(*(dataset[index] for index in (3, 0, 2)), strict=True)]
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), chosen
    with pytest.raises(IndexError):
        _index_dataset(Subset(inner, [1, 12]), torch.tensor([0, 1]))

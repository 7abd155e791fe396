"""Datasets and loaders with `state_dict` resume within an epoch without reading the items that were already used."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset as HuggingFaceDataset
from datasets.distributed import split_dataset_by_node
from groups import GROUPS_ON_DDP
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import unitrain
from unitrain import CheckpointError, DataError, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.sharding import open_training_data
from unitrain.data.stream_state import is_stateful, load_snapshot, take_snapshot
from unitrain.data.training_data import ShardSettings
from unitrain.testing import RankGroup

# Constructors of StatefulDataLoader in torchdata 0.11 call a function that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
RANKS_IMPORT = ("datasets",)
LOCAL = LocalBackend(torch.device("cpu"))
LENGTHS = (31, 22, 9)  # lengths of the ranks' own streams


class Numbers(IterableDataset[Tensor]):
    """Yields numbers in a random order, divided among the workers. Counts how often each number is read."""

    def __init__(self, first: int, length: int, *, seed: int = 0) -> None:
        self.first, self.length, self.seed, self.epoch, self.next = first, length, seed, 0, 0
        self.reads = torch.zeros(200, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        info = get_worker_info()
        order = order if info is None else order[info.id :: info.num_workers]
        while self.next < len(order):
            number = self.first + order[self.next]
            self.reads[number] += 1
            self.next += 1
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class UnstorableState(Numbers):
    """A dataset whose state cannot be stored in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": {self.next}}


class Batches(DataLoader[Any]):
    """A loader that creates its own batches, which differ between ranks."""

    def __init__(self, first: int, length: int) -> None:
        super().__init__(range(length))  # type: ignore[arg-type]
        self.first, self.length, self.used, self.reads = first, length, 0, torch.zeros(200, dtype=torch.int64)

    def __iter__(self) -> Iterator[Any]:
        start, self.used = self.used, 0
        for at in range(start, self.length, 3):
            batch = torch.arange(self.first + at, self.first + min(at + 3, self.length))
            self.reads[batch] += 1
            self.used = at + 3
            yield batch
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


def hugging_face(length: int, shards: int = 6) -> Any:
    return HuggingFaceDataset.from_dict({"number": list(range(length))}).to_iterable_dataset(num_shards=shards)


def make_data(source: str, backend: Backend, workers: int, persistent: bool) -> tuple[Any, Any]:
    """Return the data, and the dataset or loader that counts the items read."""
    first, length = sum(LENGTHS[: backend.rank]), LENGTHS[backend.rank]
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent}
    if source == "loader":
        loader = Batches(first, length)
        return loader, loader
    if source in ("own", "stateful"):
        dataset: Any = Numbers(first, length)
    elif source == "shared":
        dataset = Numbers(0, 62)
    elif source == "hugging face":
        dataset = split_dataset_by_node(hugging_face(62), backend.rank, backend.size)
    else:
        dataset = hugging_face(62).map(lambda rows: {"number": rows["number"]}, batched=True, batch_size=5)
    return (StatefulDataLoader if source == "stateful" else DataLoader)(dataset, **settings), dataset


def numbers_of(batch: Any) -> list[int]:
    return list((batch["number"] if isinstance(batch, dict) else batch).tolist())


def read_steps(shard: Any, epoch: int, start: int = 0) -> list[tuple[list[int], int, int, Any]]:
    """For each step, return this rank's samples, the number of samples, the end position, and the state after the
    step."""
    steps, numbers = [], list[int]()
    for batch, micro_batch in shard.micro_batches(epoch, start):
        numbers += numbers_of(batch) if micro_batch.samples else []
        if micro_batch.ends_step:
            steps.append((numbers, micro_batch.step_samples, micro_batch.step_end, micro_batch.data_state))
            numbers = []
    return steps


def compare_remainders(
    backend: Backend, source: str, workers: int, persistent: bool, accumulate: int, uneven: str
) -> list[list[list[int]]]:
    """Resume after the first, the middle and the last step of the second epoch. Return this rank's samples of each step
    of both epochs."""
    shared = source in ("shared", "hugging face shared")
    settings = ShardSettings(
        seed=3, stream="shared" if shared else "own", gradient_accumulation_steps=accumulate, uneven=uneven  # type: ignore[arg-type]
    )  # fmt: skip
    data, _ = make_data(source, backend, workers, persistent)
    uninterrupted = open_training_data(data, backend, settings)
    epochs = [read_steps(uninterrupted, epoch) for epoch in (0, 1)]
    steps = epochs[1]
    for number in sorted({0, len(steps) // 2, len(steps) - 1}):
        *_, position, state = steps[number]
        saved = uninterrupted.gather_state(state, 1, position)
        # With accumulation, the end position of an epoch's last step may be beyond the end of the stream.
        assert saved is not None or number == len(steps) - 1
        data, dataset = make_data(source, backend, workers, persistent)
        resumed = open_training_data(data, backend, settings)
        resumed.resume_from(saved)
        remainder = read_steps(resumed, 1, position)
        assert [step[:3] for step in remainder] == [step[:3] for step in steps[number + 1 :]]
        if saved is not None and hasattr(dataset, "reads") and uneven != "pad":
            used = [one for step in steps[: number + 1] for one in step[0]]
            assert dataset.reads[used].sum() == 0
        if source != "shared" and number:  # later epochs start at the beginning
            assert [step[:3] for step in read_steps(resumed, 0)] == [step[:3] for step in epochs[0]]
    return [[numbers for numbers, *_ in epoch] for epoch in epochs]


@pytest.fixture(scope="module", params=GROUPS_ON_DDP, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("source", "workers", "persistent", "accumulate", "uneven"),
    [
        ("own", 0, False, 1, "weight"),
        pytest.param("own", 2, False, 1, "weight", marks=pytest.mark.nightly),
        ("own", 3, True, 2, "weight"),
        pytest.param("own", 0, False, 2, "drop", marks=pytest.mark.nightly),
        ("own", 2, False, 1, "pad"),
        pytest.param("shared", 0, False, 2, "weight", marks=pytest.mark.nightly),
        ("shared", 2, True, 1, "weight"),
        pytest.param("stateful", 2, False, 1, "weight", marks=pytest.mark.nightly),
        ("loader", 0, False, 2, "weight"),
        ("hugging face", 0, False, 1, "weight"),
        pytest.param("hugging face", 2, False, 1, "weight", marks=pytest.mark.nightly),
        ("hugging face shared", 0, False, 1, "weight"),
    ],
)
def test_a_stateful_dataset_resumes_and_reads_only_the_remaining_samples(
    group: RankGroup, source: str, workers: int, persistent: bool, accumulate: int, uneven: str
) -> None:
    ranks = group.run(compare_remainders, source, workers, persistent, accumulate, uneven)
    shared = "shared" in source or "hugging face" in source
    expected = list(range(62 if shared else sum(LENGTHS[: group.size])))
    for epoch in (0, 1):
        seen = sorted(itertools.chain.from_iterable(step for rank in ranks for step in rank[epoch]))
        assert (sorted(set(seen)) if uneven == "pad" else seen) == expected or (
            uneven == "drop" and set(seen) < set(expected) and len(set(seen)) == len(seen)
        )


# Iterations that end early.


class ResetOnlyAtEnd(Numbers):
    """Stores its position in an attribute, and resets it only at the end of a complete iteration."""

    def __iter__(self) -> Iterator[Tensor]:
        self.reads[self.first] += 1
        while self.next < self.length:
            self.next += 1
            if self.reads[0] < 0:  # set by a test
                raise OSError("the file is gone")
            yield torch.tensor(self.first + self.next - 1)
        self.next = 0


def read_first_steps(shard: Any, steps: int, epoch: int = 0) -> list[list[int]]:
    """Return the samples of the first `steps` steps of an epoch, and end the iteration."""
    found = [numbers_of(batch) for batch, _ in itertools.islice(shard.micro_batches(epoch), steps)]
    shard.end_epoch()
    return found


@pytest.mark.parametrize(
    ("source", "stream"),
    [("dataset", "shared"), ("dataset", "own"), ("loader", "own"), ("workers", "shared"), ("workers", "own")],
)
def test_an_epoch_starts_at_the_beginning_if_the_preceding_one_ended_early(source: str, stream: str) -> None:
    dataset = ResetOnlyAtEnd(0, 20)
    data: Any = {"dataset": dataset, "loader": Batches(0, 20)}.get(source)
    if data is None:
        data = DataLoader(dataset, batch_size=3, num_workers=1, persistent_workers=True)
    settings = ShardSettings(batch_size=3 if source == "dataset" else None, stream=stream)  # type: ignore[arg-type]
    shard = open_training_data(data, LOCAL, settings)
    complete = [list(range(first, min(first + 3, 20))) for first in range(0, 20, 3)]
    begin = complete[:2]
    assert read_first_steps(shard, 2) == begin
    assert read_first_steps(shard, 1, epoch=1) == begin[:1]
    steps = read_steps(shard, 2)
    assert [step[0] for step in steps] == complete
    assert read_first_steps(shard, 2, epoch=3) == begin
    if source != "workers":
        assert read_first_steps(open_training_data(data, LOCAL, settings), 2) == begin  # the same object in another run
    # A resumed iteration that ends early.
    *_, position, state = steps[0]
    shard.resume_from(shard.gather_state(state, 2, position))
    assert [numbers_of(batch) for batch, _ in itertools.islice(shard.micro_batches(2, position), 1)] == complete[1:2]
    shard.end_epoch()
    assert read_first_steps(shard, 2, epoch=3) == begin


def test_an_epoch_starts_at_the_beginning_after_an_exception_that_is_kept() -> None:
    dataset = ResetOnlyAtEnd(0, 11)
    shard = open_training_data(dataset, LOCAL, ShardSettings(batch_size=3))
    kept = []
    for source in ("dataset", "loop"):
        try:
            for step, _ in enumerate(shard.micro_batches(0)):
                if step == 1 and source == "dataset":
                    dataset.reads[0] = -1
                elif step == 1:
                    raise KeyError("a mistake in the loop")
        except Exception as error:
            kept.append(error)  # the traceback keeps the iterator alive
        dataset.reads[0] = 0
        assert [step[0] for step in read_steps(shard, 0)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert len(kept) == 2


class CountsEpochs(ResetOnlyAtEnd):
    """Starts every iteration at the beginning, and stores the number of completed epochs in its state."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.tensor(100 * self.next + number) for number in range(3))
        self.next += 1


def test_state_that_a_dataset_keeps_over_complete_epochs_is_not_reset() -> None:
    shard = open_training_data(CountsEpochs(0, 3), LOCAL, ShardSettings(batch_size=3))
    assert [read_first_steps(shard, 5, epoch) for epoch in range(3)] == [
        [[0, 1, 2]],
        [[100, 101, 102]],
        [[200, 201, 202]],
    ]


class NoStateBeforeIteration(ResetOnlyAtEnd):
    """Has a state only after the start of an iteration."""

    def state_dict(self) -> dict[str, Any]:
        if not self.next:
            raise RuntimeError("iterate first")
        return super().state_dict()


def test_a_dataset_without_a_state_before_its_first_iteration_can_be_used() -> None:
    shard = open_training_data(NoStateBeforeIteration(0, 6), LOCAL, ShardSettings(batch_size=3))
    assert [step[0] for step in read_steps(shard, 0)] == [[0, 1, 2], [3, 4, 5]]


def test_hugging_face_dataset_that_was_read_before_is_read_from_the_beginning() -> None:
    data = hugging_face(62)
    next(iter(data))
    shard = open_training_data(data, LOCAL, ShardSettings(batch_size=3))
    assert [read_first_steps(shard, 2) for _ in range(3)] == [[[0, 1, 2], [3, 4, 5]]] * 3


# The Trainer.


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, numbers: Tensor) -> Tensor:
        values = numbers.double()[:, None]
        result: Tensor = self.layers(torch.sin(values * torch.tensor([0.1, 0.3, 0.7, 1.1])))
        return result


def fit(backend: Backend, folder: str | None, stream: str, max_steps: int, batch_size: int) -> tuple[list[Any], int]:
    """Train, resuming if possible. Return the parameters and the number of items that this rank read."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Numbers(0, 62) if stream == "shared" else Numbers(sum(LENGTHS[: backend.rank]), LENGTHS[backend.rank])
    settings: dict[str, Any] = {"batch_size": batch_size, "stream": stream, "max_steps": max_steps, "progress": "off"}
    if folder is not None:
        settings |= {"output_dir": folder, "checkpoint_every_steps": 1, "resume": True}
    config = TrainConfig(**settings)
    loss_fn = nn.functional.cross_entropy
    trainer = Trainer(
        model,
        optimizer,
        loss_fn,
        backend=backend,
        config=config,
        forward=lambda model, batch: (model(batch), batch % 2),
    )
    trainer.fit(data)
    return [parameter.detach().tolist() for parameter in model.parameters()], int(data.reads.sum())


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-9)


@pytest.mark.parametrize("stream", ["shared", "own"])
def test_the_trainer_resumes_from_the_state_in_the_checkpoint(group: RankGroup, stream: str, tmp_path: Path) -> None:
    batch_size = 12 // group.size if stream == "shared" else 4
    expected, folder = group.run(fit, None, stream, 8, batch_size), str(tmp_path / "run")
    group.run(fit, folder, stream, 3, batch_size)
    resumed = group.run(fit, folder, stream, 4, batch_size)
    # The resumed run may read the items of two steps, and one more item to detect the end of the epoch.
    limit = 2 * batch_size * (group.size if stream == "shared" else 1) + 1
    assert all(reads <= limit for _, reads in resumed)
    # A shared stream can also resume on another number of ranks.
    found = [fit(LOCAL, folder, stream, 8, 12)] if stream == "shared" else group.run(fit, folder, stream, 8, batch_size)
    assert_close(found[0][0], expected[0][0])
    if stream == "shared":  # equals one process with the global batch size
        assert_close(found[0][0], fit(LOCAL, None, stream, 8, 12)[0])


def test_limited_epochs_evaluations_and_later_runs_start_at_the_beginning() -> None:
    seen = list[list[int]]()

    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(numbers_of(batch))
        return model(batch), batch % 2

    def make_trainer(**settings: Any) -> Trainer:
        model = Network()
        config = TrainConfig(batch_size=3, progress="off", **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = nn.functional.cross_entropy
        return Trainer(model, optimizer, loss_fn, backend=LOCAL, config=config, forward=forward)

    data, validation, begin = ResetOnlyAtEnd(0, 12), ResetOnlyAtEnd(50, 12), [[0, 1, 2], [3, 4, 5]]
    make_trainer(max_epochs=2, limit_train_steps=2, limit_val_batches=1).fit(data, validation)
    assert seen == [*begin, [50, 51, 52]] * 2
    seen.clear()
    make_trainer(max_steps=2).fit(data)
    assert seen == begin


def error_of_resume(backend: Backend, folder: str) -> str:
    with pytest.raises(CheckpointError) as error:
        fit(backend, folder, "own", 8, 4)
    return str(error.value)


def test_an_own_stream_resumes_on_the_same_number_of_ranks_only(group: RankGroup, tmp_path: Path) -> None:
    folder, other = str(tmp_path / "run"), 2 if group.size != 2 else 3
    group.run(fit, folder, "own", 2, 4)
    if group.size > 1:
        messages = [error_of_resume(LOCAL, folder)]
    else:
        with RankGroup("ddp", other) as ranks:
            messages = ranks.run(error_of_resume, folder)
    assert len(set(messages)) == 1
    assert f"with ranks={group.size}, but this data has ranks=" in messages[0]
    assert f"unitrain launch -np {group.size} train.py" in messages[0]


# ShardedLoader.


def resume_loader(backend: Backend, stream: str, all_ranks: bool) -> None:
    def create() -> tuple[unitrain.ShardedLoader, Numbers]:
        shared = stream == "shared"
        data = Numbers(0, 62) if shared else Numbers(sum(LENGTHS[: backend.rank]), LENGTHS[backend.rank])
        return unitrain.ShardedLoader(data, backend, batch_size=4, stream=stream, gradient_accumulation_steps=2), data  # type: ignore[arg-type]

    loader, _ = create()
    state: dict[str, Any] = {}
    remainder = []
    for number, batch in enumerate(loader):
        if number >= 4:
            remainder.append(batch.tolist() if loader.num_samples else [])
        if number == 3:
            assert loader.ends_step
            state = loader.state_dict(all_ranks=all_ranks)
    resumed, data = create()
    # Without `all_ranks`, rank 0 saves the state, as described in the documentation.
    resumed.load_state_dict(state if all_ranks else backend.broadcast_object(state))
    found = [batch.tolist() if resumed.num_samples else [] for batch in resumed]
    assert found[: len(remainder)] == remainder
    if all_ranks or stream == "shared" or backend.rank == 0:
        remaining = 62 - 16 * backend.size if stream == "shared" else sum(map(len, remainder))
        assert data.reads.max() <= 1
        assert data.reads.sum() == remaining


@pytest.mark.parametrize(("stream", "all_ranks"), [("shared", False), ("own", True), ("own", False)])
def test_a_sharded_loader_resumes_from_the_state(group: RankGroup, stream: str, all_ranks: bool) -> None:
    group.run(resume_loader, stream, all_ranks)


# Detection of stateful datasets.


def test_a_shuffle_buffer_is_not_resumed_because_its_items_would_be_lost() -> None:
    assert is_stateful(hugging_face(62))
    shuffled = hugging_face(62).shuffle(seed=1, buffer_size=10).filter(lambda row: row["number"] % 3 > 0)
    assert not is_stateful(shuffled)
    data = DataLoader(shuffled, batch_size=4)
    shard = open_training_data(data, LOCAL, ShardSettings())
    steps = read_steps(shard, 0)
    assert shard.gather_state(steps[2][3], 0, steps[2][2]) is None
    resumed = read_steps(open_training_data(data, LOCAL, ShardSettings()), 0, steps[2][2])
    assert [step[0] for step in resumed] == [step[0] for step in steps[3:]]


class StateDictWithParameters(IterableDataset[int]):
    """A dataset whose methods have other parameters, as in MosaicML streaming."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_methods_with_other_parameters_are_not_called() -> None:
    assert not is_stateful(StateDictWithParameters())
    assert len(read_steps(open_training_data(StateDictWithParameters(), LOCAL, ShardSettings(batch_size=3)), 0)) == 3


def read_unstorable_state(backend: Backend) -> str:
    data = (UnstorableState if backend.rank == 0 else Numbers)(0, 62)  # only rank 0 has such a state
    shard = open_training_data(data, backend, ShardSettings(batch_size=4))
    with pytest.raises(DataError) as error:
        read_steps(shard, 0)
    return str(error.value)


def test_a_state_that_cannot_be_stored_raises_the_same_error_on_every_rank(group: RankGroup) -> None:
    messages = group.run(read_unstorable_state)
    assert len(set(messages)) == 1
    assert (
        "UnstorableState.state_dict() returns state['next'] of type set, which a checkpoint cannot store" in messages[0]
    )


def test_a_loader_with_its_own_batches_rejects_a_batch_size() -> None:
    with pytest.raises(unitrain.ConfigError, match="Batches creates the batches itself"):
        open_training_data(Batches(0, 9), LOCAL, ShardSettings(batch_size=4, stream="own"))


def test_a_stateful_data_loader_has_the_order_of_a_data_loader() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(30))
    orders = [
        [batch[0].tolist() for batch, _ in open_training_data(loader_class(dataset, batch_size=4, shuffle=True), LOCAL,
                                                             ShardSettings(seed=2)).micro_batches(0)]
        for loader_class in (DataLoader, StatefulDataLoader)
    ]  # fmt: skip
    assert orders[0] == orders[1]


class Position:
    """A position that several objects share."""

    def __init__(self) -> None:
        self.next, self.history = 0, [0]

    def read(self) -> int:
        self.history.append(self.next)
        return self.next


class Wrapped(IterableDataset[int]):
    """Yields numbers. The position is stored in objects inside the dataset, which also has a large array, a file and a
    lock."""

    def __init__(self, length: int, file: Any) -> None:
        self.large, self.small = torch.zeros(2**19), torch.zeros(1, dtype=torch.int64)
        self.length, self.file, self.lock, self.random = length, file, threading.Lock(), random.Random(0)
        self.sparse, self.shared = torch.eye(2).to_sparse(), torch.zeros(1).share_memory_()
        position = Position()
        self.positions, self.by_name = [position], {"only": (position,)}
        self.read = position.read

    def __iter__(self) -> Iterator[int]:
        (position,) = self.positions
        assert self.by_name["only"] == (position,)
        while position.next < self.length:
            position.next += 1
            self.small += 1
            yield 10 * self.read() + self.random.randrange(10)
        position.next = 0

    def state_dict(self) -> dict[str, Any]:
        version, numbers, _ = self.random.getstate()
        return {"next": self.positions[0].next, "random": [version, list(numbers)], "small": self.small.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.positions[0].next = state["next"]
        self.random.setstate((state["random"][0], tuple(state["random"][1]), None))
        self.small.copy_(state["small"])


class Outer(IterableDataset[int]):
    def __init__(self, inner: Wrapped) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_a_snapshot_can_be_loaded_several_times_and_does_not_change_the_dataset(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        dataset, other = Outer(Wrapped(6, file)), Outer(Wrapped(6, file))
        expected = list(dataset)
        stream = iter(other)
        first = [next(stream) for _ in range(2)]
        snapshot = take_snapshot(other)
        fresh = Outer(Wrapped(6, file))
        for _ in range(2):
            resumed = load_snapshot(fresh, snapshot)
            assert isinstance(resumed, Outer)
            assert resumed.inner.large is fresh.inner.large
            assert resumed.inner.shared is fresh.inner.shared
            assert resumed.inner.file is file
            assert first + list(resumed) == expected
            assert resumed.inner.positions[0].history == [0, 3, 4, 5, 6]
            assert resumed.inner.small.item() == 6
        assert (fresh.inner.small.item(), fresh.inner.positions[0].history) == (0, [0])
        assert list(fresh) == expected  # the next epoch starts at the beginning

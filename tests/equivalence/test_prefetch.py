"""Prefetching of one batch: the order of loading, copying and use. Runs with prefetching are bit-equal to runs without.

benchmarks/gpu_check.py tests on a GPU that a copy does not overwrite memory that a kernel still reads.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import simulate_rank
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data import prefetch
from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.data.prefetch import Prefetcher, prefetch_one
from unitrain.data.sharding import TrainingShard
from unitrain.data.training_data import ShardSettings
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.optim.step import backward
from unitrain.testing import run_ranks

LOCAL = LocalBackend(torch.device("cpu"))


class Log(list[str]):
    """Records events in order."""

    def source(self, length: int, fails_at: int | None = None) -> Iterator[tuple[int, str]]:
        try:
            for number in range(length):
                if number == fails_at:
                    raise OSError(f"cannot read {number}")
                self.append(f"load {number}")
                yield number, f"part {number}"
        finally:
            self.append("closed")

    def begin_copy(self, item: tuple[Any, str]) -> tuple[Any, str]:
        self.append(f"copy {item[0]}")
        return item

    def wait_for_copies(self) -> None:
        self.append("arrive")

    def prefetched(self, length: int, fails_at: int | None = None) -> Iterator[tuple[int, str]]:
        return prefetch_one(self.source(length, fails_at), self.begin_copy, self.wait_for_copies)


def test_prefetch_copies_one_batch_before_the_current_one_is_used() -> None:
    log = Log()
    for number, part in log.prefetched(3):
        assert part == f"part {number}"
        log.append(f"use {number}")
    assert log == [
        "load 0", "copy 0",
        "arrive", "load 1", "copy 1", "use 0",
        "arrive", "load 2", "copy 2", "use 1",
        "arrive", "closed", "use 2",
    ]  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_prefetch_ends_with_its_source(length: int) -> None:
    log = Log()
    items = log.prefetched(length)
    assert [number for number, _ in items] == list(range(length))
    assert next(items, None) is None
    assert log.count("closed") == 1


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_loader_error_is_raised_after_the_preceding_batch(fails_at: int) -> None:
    used: list[int] = []
    with pytest.raises(OSError, match=f"cannot read {fails_at}"):
        used.extend(number for number, _ in Log().prefetched(3, fails_at))
    assert used == list(range(fails_at))


def test_copy_error_is_raised_after_the_preceding_batch() -> None:
    def begin_copy(item: tuple[int, str]) -> tuple[int, str]:
        if item[0] == 2:
            raise RuntimeError("out of memory")
        return item

    used: list[int] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        used.extend(number for number, _ in prefetch_one(Log().source(4), begin_copy, lambda: None))
    assert used == [0, 1]


def test_error_of_an_unused_batch_is_not_raised() -> None:
    for number, _ in Log().prefetched(3, fails_at=2):
        if number == 1:
            break


def test_leaving_the_loop_closes_the_loader() -> None:
    log = Log()
    for number, _ in log.prefetched(9):
        if number == 1:
            break
    assert log[-1] == "closed"
    assert "load 3" not in log


def test_prefetch_does_not_keep_references_to_yielded_batches() -> None:
    alive = set[int]()

    class Batch:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    for batch, number in prefetch_one(
        ((Batch(number), number) for number in range(4)), lambda item: item, lambda: None
    ):
        del batch
        assert alive == ({number + 1} if number < 3 else set())


def test_cpu_batches_are_not_prefetched_by_copying() -> None:
    items = Log().source(3)
    assert Prefetcher(torch.device("cpu"))(items, ahead=True) is items


def test_next_batch_is_fetched_while_gradients_are_reduced() -> None:
    log, entered = Log(), []

    @contextmanager
    def fetching() -> Iterator[None]:
        entered.append(len(log))
        yield

    ahead = Prefetcher(torch.device("cpu"), fetching)
    for number, _ in ahead(log.source(3), ahead=True, overlapped=True):
        weight = torch.ones((), requires_grad=True)
        # The fetch runs after the first gradient, like the hook that starts to reduce gradients.
        weight.register_hook(lambda _: Variable._execution_engine.queue_callback(lambda: log.append("wait")))
        log.append(f"use {number}")
        backward(weight * 1.0, *ahead.overlapped_work())
    assert log == ["load 0", "use 0", "load 1", "wait", "use 1", "load 2", "wait", "use 2", "closed", "wait"]
    assert entered == [2, 5, 8]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_error_of_an_overlapped_fetch_is_raised_after_the_current_batch(fails_at: int) -> None:
    ahead, used = Prefetcher(torch.device("cpu")), list[int]()

    def loop() -> None:
        for number, _ in ahead(Log().source(3, fails_at), ahead=True, overlapped=True):
            backward(torch.ones((), requires_grad=True) * 1.0, *ahead.overlapped_work())
            used.append(number)

    with pytest.raises(OSError, match=f"cannot read {fails_at}"):
        loop()
    assert used == list(range(fails_at))


def test_overlapped_iterator_is_closed_with_the_loop() -> None:
    log, ahead = Log(), Prefetcher(torch.device("cpu"))

    def loop() -> None:
        for number, _ in ahead(log.source(9), ahead=True, overlapped=True):
            backward(torch.ones((), requires_grad=True) * 1.0, *ahead.overlapped_work())
            if number == 1:
                raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert log[-1] == "closed"
    backward(torch.ones((), requires_grad=True) * 1.0, *ahead.overlapped_work())
    assert log[-1] == "closed"


def log_fetches_and_waits(backend: Backend) -> list[str]:
    """Return the order of fetches and waits in an epoch of two steps with two micro-batches each."""
    log: list[str] = []
    fetch, wait = prefetch.PrefetchedIterator.fetch, FailureMonitor.wait_for_ranks

    def recorded_fetch(coming: Any) -> None:
        log.append("fetch")
        fetch(coming)

    def recorded_wait(monitor: FailureMonitor, work: Any, **settings: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            log.append("wait")
        wait(monitor, work, **settings)

    prefetch.PrefetchedIterator.fetch = recorded_fetch  # type: ignore[method-assign]
    FailureMonitor.wait_for_ranks = recorded_wait  # type: ignore[method-assign]
    try:
        train(samples, None, backend=backend, batch_size=3, gradient_accumulation_steps=2, max_epochs=1)
    finally:
        prefetch.PrefetchedIterator.fetch, FailureMonitor.wait_for_ranks = fetch, wait  # type: ignore[method-assign]
    return log


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_fetch_before_they_wait_for_gradients(backend: str) -> None:
    for log in run_ranks(log_fetches_and_waits, size=2, backend=backend):
        assert [key for key, _ in itertools.groupby(log)] == ["fetch", "wait"] * 2


def test_device_without_streams_loads_batches_on_demand() -> None:
    made = []

    def source() -> Iterator[tuple[Tensor, int]]:
        for number in range(3):
            made.append(number)
            yield torch.ones(2), number

    for batch, number in Prefetcher(torch.device("meta"))(source(), ahead=True):
        assert batch.is_meta
        assert made == list(range(number + 1))


class _Stream:
    """A simulated GPU stream that records when it waits for another stream."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_streams_synchronize_before_reading_and_overwriting_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    compute, current = _Stream(log, "compute"), []

    @contextmanager
    def stream(entered: _Stream) -> Iterator[None]:
        current.append(entered.name)
        yield
        current.pop()

    def source() -> Iterator[tuple[int, None]]:
        for number in range(3):
            assert not current, "the loader must run on the user's stream"
            yield number, None

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(log, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(prefetch, "to_device", lambda batch, device: log.append(f"copy {batch} on {current[-1]}"))
    for number, _ in enumerate(Prefetcher(torch.device("cuda", 0))(source(), ahead=True)):
        log.append(f"compute {number}")
    # A copy waits for the kernels queued before it, which may still read its memory. Kernels that read a batch wait for
    # its copy. The copy of the next batch begins before the current batch is used.
    assert log == [
        "side waits for compute", "copy 0 on side",
        "compute waits for side", "side waits for compute", "copy 1 on side", "compute 0",
        "compute waits for side", "side waits for compute", "copy 2 on side", "compute 1",
        "compute waits for side", "compute 2",
    ]  # fmt: skip


class RandomlyAugmented(Dataset[tuple[Tensor, Tensor]]):
    """A dataset with random augmentation in the process that loads the samples. Records the loaded indices."""

    def __init__(self, length: int) -> None:
        self.inputs, self.targets = samples(length).tensors
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded.append(index)
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]


def samples(length: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(length, 6, generator=generator), torch.randint(3, (length,), generator=generator))


@pytest.mark.parametrize(
    ("data", "can_prefetch"),
    [
        (samples(), True),
        (Subset(samples(), range(9)), True),
        (DataLoader(samples(), batch_size=4), True),
        (DataLoader(samples(), batch_size=4, collate_fn=lambda rows: rows), False),
        (RandomlyAugmented(9), False),
        (DataLoader(RandomlyAugmented(9), batch_size=4, num_workers=1), True),
    ],
)
def test_batch_is_prefetched_only_if_no_user_code_runs_in_the_process(data: Any, can_prefetch: bool) -> None:
    size = None if isinstance(data, DataLoader) else 4
    assert TrainingShard(data, simulate_rank(0, 1), ShardSettings(batch_size=size)).can_prefetch is can_prefetch
    assert EvaluationShard(data, simulate_rank(0, 1), batch_size=size).can_prefetch is can_prefetch


class CopyingPrefetcher(Prefetcher):
    """Prefetches on the CPU with real copies, as on a GPU."""

    def __call__(self, items: Any, *, ahead: bool, overlapped: bool = False) -> Iterator[Any]:
        if not ahead:
            return iter(items)
        return prefetch_one(iter(items), lambda item: (copy.deepcopy(item[0]), item[1]), lambda: None)


class OverlappedLoader(Prefetcher):
    """Loads the next batch while gradients are reduced."""

    def __call__(self, items: Any, *, ahead: bool, overlapped: bool = False) -> Iterator[Any]:
        return super().__call__(items, ahead=ahead, overlapped=ahead)


def train(
    make_data: Callable[[], Any],
    prefetcher_class: type[Prefetcher] | None,
    *,
    backend: Backend = LOCAL,
    **settings: Any,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = TrainConfig(**{"max_epochs": 3, "gradient_accumulation_steps": 2, "progress": "off", **settings})
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config)
    if prefetcher_class is not None:
        trainer._prefetcher = trainer._evaluation._prefetcher = prefetcher_class(backend.device)
    results = trainer.fit(make_data(), samples(9))
    return model.state_dict(), results


DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "tensors": (samples, {"batch_size": 4}),
    "workers": (
        lambda: DataLoader(RandomlyAugmented(22), batch_size=4, shuffle=True, num_workers=1),
        {"eval_batch_size": 4},
    ),
    "here": (lambda: RandomlyAugmented(22), {"batch_size": 4}),
}


@pytest.mark.parametrize("prefetcher_class", [CopyingPrefetcher, OverlappedLoader])
@pytest.mark.parametrize("source", DATA)
def test_run_with_prefetch_is_bit_equal(source: str, prefetcher_class: type[Prefetcher]) -> None:
    data, settings = DATA[source]
    (one, results), (other, found) = (train(data, prefetch, **settings) for prefetch in (None, prefetcher_class))
    assert results == found
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("prefetcher_class", [CopyingPrefetcher, OverlappedLoader])
@pytest.mark.parametrize("source", DATA)
def test_resumed_run_with_prefetch_is_bit_equal(
    source: str, prefetcher_class: type[Prefetcher], tmp_path: Path
) -> None:
    data, settings = DATA[source]
    uninterrupted, _ = train(data, None, **{**settings, "max_epochs": None, "max_steps": 8})
    stops = 6 if source == "workers" else 4  # workers restart their random numbers, so stop at the end of an epoch
    first = {**settings, "max_epochs": None, "max_steps": stops, "output_dir": tmp_path, "resume": True}
    train(data, prefetcher_class, **first)
    parts, _ = train(data, prefetcher_class, **{**first, "max_steps": 8})
    assert all(torch.equal(value, parts[name]) for name, value in uninterrupted.items())


@pytest.mark.parametrize("prefetcher_class", [CopyingPrefetcher, OverlappedLoader])
def test_batches_loaded_in_the_process_are_loaded_on_demand(prefetcher_class: type[Prefetcher]) -> None:
    data = RandomlyAugmented(22)
    train(lambda: data, prefetcher_class, batch_size=4, max_epochs=None, max_steps=1)
    assert len(data.loaded) == 8

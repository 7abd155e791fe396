"""A loop with ShardedLoader and MeanMetric computes the same parameters and means as one process that uses the global
batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from groups import GROUPS_ON_DDP
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.data.order import epoch_order
from unitrain.errors import CheckpointError, ConfigError, DataError, TensorError
from unitrain.testing import RankGroup

LENGTHS = (1, 5, 7, 13)
EPOCHS = 3
Params = list[Tensor]


@pytest.fixture(scope="module", params=GROUPS_ON_DDP, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as group:
        yield group


def tensors(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(length, width, generator=generator, dtype=torch.float64) for width in (4, 2))  # type: ignore[return-value]


def build_model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parameters(model: nn.Module) -> Params:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def train_plain(order: Any, global_batch: int, length: int, epochs: range = range(EPOCHS)) -> Params:
    """Train in one process on batches of `global_batch` samples, in the order given by `order(epoch)`."""
    inputs, targets = tensors(length)
    model, optimizer = build_model_and_optimizer()
    for epoch in epochs:
        for indices in torch.as_tensor(order(epoch)).split(global_batch):
            nn.functional.mse_loss(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def train(backend: Backend, loader: unitrain.ShardedLoader, epochs: int = EPOCHS) -> tuple[Params, list[int]]:
    """Train like the loop in the README section "Your own loop", with gradient accumulation. Return the parameters and
    the number of batches in each epoch."""
    model, optimizer = build_model_and_optimizer()
    model = backend.distributed_model(model.to(backend.device))
    optimizer = backend.distributed_optimizer(optimizer, model)
    batches = []
    for epoch in range(epochs):
        assert loader.epoch == epoch
        count = 0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets) * loader.loss_weight
            with nullcontext() if loader.ends_step else backend.no_sync(model):
                loss.backward()
            count += 1
            if loader.ends_step:
                optimizer.step()
                optimizer.zero_grad()
        batches.append(count)
    return parameters(model), batches


def assert_equal(found: Params, expected: Params) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def shuffled_order(length: int, seed: int = 3) -> Any:
    return lambda epoch: epoch_order(length, seed=seed, epoch=epoch, shuffle=True)


def assert_training_equals_one_process(backend: Backend) -> None:
    for length in LENGTHS:
        for batch_size in (2, 3):
            data = TensorDataset(*tensors(length))
            loader = unitrain.ShardedLoader(data, backend, batch_size=batch_size, seed=3)
            found, batches = train(backend, loader)
            global_batch = backend.size * batch_size
            assert batches == [len(loader)] * EPOCHS == [math.ceil(length / global_batch)] * EPOCHS
            assert_equal(found, train_plain(shuffled_order(length), global_batch, length))


def test_training_equals_one_process_with_the_global_batch(ranks: RankGroup) -> None:
    ranks.run(assert_training_equals_one_process)


def assert_accumulation_equals_one_process(backend: Backend) -> None:
    for length in LENGTHS:
        data = TensorDataset(*tensors(length))
        loader = unitrain.ShardedLoader(data, backend, batch_size=2, seed=3, gradient_accumulation_steps=2)
        found, batches = train(backend, loader)
        assert batches == [len(loader)] * EPOCHS
        assert_equal(found, train_plain(shuffled_order(length), 4 * backend.size, length))


def test_accumulated_steps_equal_one_process_with_the_global_batch(ranks: RankGroup) -> None:
    ranks.run(assert_accumulation_equals_one_process)


class Items(Dataset[int]):
    """A dataset of indices, which `collate` replaces by samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def collate(indices: list[int]) -> tuple[Tensor, Tensor]:
    inputs, targets = tensors(13)
    return inputs[indices], targets[indices]


class Reversed(Sampler[int]):
    """Yields all indices in descending order, with a different start in each epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(reversed_order(self.length, self.epoch))

    def __len__(self) -> int:
        return self.length


def reversed_order(length: int, epoch: int) -> list[int]:
    return [(epoch - index) % length for index in range(length)]


def assert_data_loader_settings_are_kept(backend: Backend) -> None:
    data = Items(13)
    sampled = DataLoader(data, batch_size=2, sampler=Reversed(13), collate_fn=collate, num_workers=1)
    ordered = DataLoader(data, batch_size=3, collate_fn=collate)
    dropped = DataLoader(TensorDataset(*tensors(13)), batch_size=2, shuffle=True, drop_last=True)
    global_batch = 2 * backend.size
    for loader, order, samples in (
        (sampled, lambda epoch: reversed_order(13, epoch), global_batch),
        (ordered, lambda _: range(13), 3 * backend.size),
        (dropped, lambda epoch: shuffled_order(13, 0)(epoch)[: 13 - 13 % global_batch], global_batch),
    ):
        sharded = unitrain.ShardedLoader(loader, backend)
        assert sharded.batch_size == loader.batch_size
        found, batches = train(backend, sharded)
        assert batches == [len(sharded)] * EPOCHS
        assert_equal(found, train_plain(order, samples, 13))
    dropping = unitrain.ShardedLoader(TensorDataset(*tensors(13)), backend, batch_size=2, drop_last=True)
    found, _ = train(backend, dropping)
    assert_equal(
        found, train_plain(lambda epoch: shuffled_order(13, 0)(epoch)[: 13 - 13 % global_batch], global_batch, 13)
    )


def test_data_loaders_keep_their_settings(ranks: RankGroup) -> None:
    ranks.run(assert_data_loader_settings_are_kept)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*tensors(self.length), strict=True))


def assert_streams_are_sharded(backend: Backend) -> None:
    for length in LENGTHS:
        loader = unitrain.ShardedLoader(Stream(length), backend, batch_size=2)
        found, _ = train(backend, loader)
        assert_equal(found, train_plain(lambda _, length=length: range(length), 2 * backend.size, length))
        try:
            len(loader)
        except TypeError as error:
            assert "has no len()" in str(error)
        else:
            raise AssertionError("a stream has a length")


def test_iterable_datasets_are_sharded(ranks: RankGroup) -> None:
    ranks.run(assert_streams_are_sharded)


def assert_evaluation_is_exact(backend: Backend) -> None:
    for length in LENGTHS:
        for data in (TensorDataset(*tensors(length)), Stream(length), DataLoader(Stream(length), batch_size=2)):
            batch_size = None if isinstance(data, DataLoader) else 2
            loader = unitrain.ShardedLoader(data, backend, batch_size=batch_size, shuffle=False)
            first, per_sample, tokens = (unitrain.MeanMetric(backend) for _ in range(3))
            count = 0
            for _ in range(2):  # the second evaluation is checked
                for metric in (first, per_sample, tokens):
                    metric.reset()
                count = 0
                with torch.no_grad():
                    for inputs, _targets in loader:
                        assert loader.num_samples == len(inputs)
                        count += len(inputs)
                        first.update(inputs[:, 0].mean(), len(inputs))
                        per_sample.update(inputs[:, 0], len(inputs))
                        tokens.update(inputs.mean(), torch.tensor(inputs.numel()))
            assert int(backend.allreduce(torch.tensor(count), "sum")) == length
            inputs, _ = tensors(length)
            for metric, expected in ((first, inputs[:, 0].mean()), (per_sample, inputs[:, 0].mean())):
                assert math.isclose(metric.compute(), float(expected), rel_tol=1e-12)
                assert metric.compute() == metric.compute()
            assert math.isclose(tokens.compute(), float(inputs.mean()), rel_tol=1e-12)
            if not isinstance(data, DataLoader) and not isinstance(data, Stream):
                assert int(backend.allreduce(torch.tensor(len(loader)), "sum")) >= math.ceil(length / 2)
    empty = unitrain.MeanMetric(backend)
    empty.update(torch.tensor(math.nan), 0)
    assert math.isnan(empty.compute())
    if backend.rank == 0:
        empty.update(2.0)
    assert empty.compute() == 2.0


def test_evaluation_has_every_sample_once(ranks: RankGroup) -> None:
    ranks.run(assert_evaluation_is_exact)


def train_steps(backend: Backend, state: dict[str, Any] | None, steps: int | None) -> dict[str, Any]:
    """Train from `state` for at most `steps` steps. Return the state of model, optimizer and loader."""
    inputs, targets = tensors(23)
    loader = unitrain.ShardedLoader(TensorDataset(inputs, targets), backend, batch_size=6 // backend.size, seed=3)
    model, optimizer = build_model_and_optimizer()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    wrapped = backend.distributed_model(model.to(backend.device))
    backend.distributed_optimizer(optimizer, wrapped)
    done = 0
    while loader.epoch < EPOCHS and done != steps:
        for batch_inputs, batch_targets in loader:
            (nn.functional.mse_loss(wrapped(batch_inputs), batch_targets) * loader.loss_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize("steps", [4, 6, 8])
def test_a_run_resumes_within_an_epoch_on_another_number_of_ranks(backend: str, steps: int) -> None:
    with RankGroup(backend, 2) as two, RankGroup(backend, 3) as three:
        states = two.run(train_steps, None, steps)
        assert states[0]["loader"] == states[1]["loader"]
        found = three.run(train_steps, states[0], None)[0]["model"]
    assert_equal(list(found.values()), train_plain(shuffled_order(23), 6, 23))


def assert_iterations_start_the_next_epoch(backend: Backend) -> None:
    loader = unitrain.ShardedLoader(
        TensorDataset(torch.arange(13)), backend, batch_size=2, gradient_accumulation_steps=2
    )
    for _ in loader:
        break
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 0)  # the step was not completed
    rest = [int(i) for (batch,) in loader for i in batch[: loader.num_samples]]
    everywhere = sorted(i for other in backend.allgather_object(rest) for i in other)
    assert everywhere == list(range(13))  # a new iteration starts the next epoch, 1
    assert loader.epoch == 2
    loader.epoch = 7
    first = [batch.tolist() for (batch,) in loader]
    assert loader.epoch == 8
    loader.epoch = 7
    assert [batch.tolist() for (batch,) in loader] == first


def test_each_iteration_starts_the_next_epoch(ranks: RankGroup) -> None:
    ranks.run(assert_iterations_start_the_next_epoch)


def assert_errors_on_every_rank(backend: Backend) -> None:
    data = TensorDataset(*tensors(7))

    def assert_raises_error(error_class: type[Exception], text: str, *arguments: Any, **settings: Any) -> None:
        try:
            unitrain.ShardedLoader(*arguments, **settings)
        except error_class as error:
            assert text in str(error), str(error)
            messages = backend.allgather_object(str(error))
            assert len(set(messages)) == 1, messages
        else:
            raise AssertionError(f"{text!r} was not raised")

    assert_raises_error(ConfigError, "ShardedLoader(data, backend, batch_size=32)", data, backend)
    assert_raises_error(ConfigError, "at least 1, got 0", data, backend, batch_size=0)
    assert_raises_error(
        ConfigError, "Unknown ShardedLoader argument uneven 'dorp'. Did you mean", data, backend, uneven="dorp"
    )
    assert_raises_error(ConfigError, "but a DataLoader keeps its own", DataLoader(data), backend, num_workers=1)
    assert_raises_error(
        ConfigError, "with a DataLoader, ShardedLoader does not need", DataLoader(data), backend, batch_size=2
    )
    assert_raises_error(
        ConfigError, "evaluates every sample once", data, backend, batch_size=2, shuffle=False, drop_last=True
    )
    assert_raises_error(DataError, "ShardedLoader(data) must be a dataset", None, backend, batch_size=2)
    assert_raises_error(DataError, "is empty", TensorDataset(torch.empty(0)), backend, batch_size=2)
    if backend.size > 1:
        assert_raises_error(
            ConfigError,
            "ShardedLoader(seed=...) differs between ranks: [0, 1",
            data,
            backend,
            batch_size=2,
            seed=backend.rank,
        )
        assert_raises_error(
            ConfigError, "ShardedLoader(shuffle=...) differs", data, backend, batch_size=2, shuffle=backend.rank == 0
        )
        other = TensorDataset(*tensors(7 + backend.rank))
        assert_raises_error(DataError, "the same number of samples", other, backend, batch_size=2)

    evaluation = unitrain.ShardedLoader(data, backend, batch_size=2, shuffle=False)
    training = unitrain.ShardedLoader(data, backend, batch_size=2)
    with pytest.raises(ConfigError, match="loss_weight is for training"):
        _ = evaluation.loss_weight
    with torch.no_grad(), pytest.raises(ConfigError, match=r"iterated under torch.no_grad\(\)"):
        next(iter(training))
    next(iter(training))
    state = {**training.state_dict(), "position": 2}
    unitrain.ShardedLoader(data, backend, batch_size=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match="with seed=0, but this loader has seed=4"):
        unitrain.ShardedLoader(data, backend, batch_size=2, seed=4).load_state_dict(state)
    metric = unitrain.MeanMetric(backend)
    for count in (-1, True, math.inf, torch.tensor(-1.0), torch.ones(2)):
        with pytest.raises(TensorError, match="must be a number of at least 0"):
            metric.update(1.0, count)
    if backend.rank == backend.size - 1:
        metric.update(torch.ones(3, 2), 3)
    with pytest.raises(TensorError, match=r"got shape \[3, 2\]"):
        metric.compute()


def test_errors_are_the_same_on_every_rank(ranks: RankGroup) -> None:
    ranks.run(assert_errors_on_every_rank)


def errors_of_different_positions(backend: Backend) -> list[str]:
    """Return the errors if only the last rank sets the epoch, loads a state, or goes back to epoch 0 after all ranks
    have started an iteration."""
    dataset, is_last = TensorDataset(*tensors(13)), backend.rank == backend.size - 1
    texts = []
    for case in ("epoch", "state", "iteration"):
        loader = unitrain.ShardedLoader(dataset, backend, batch_size=2)
        if case == "epoch" and is_last:
            loader.epoch = 2
        if case == "state" and is_last:
            loader.load_state_dict({**loader.state_dict(), "position": 6})
        if case == "iteration":
            next(iter(loader))
            if is_last:
                loader.epoch = 0
        try:
            next(iter(loader))
        except ConfigError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_different_positions_raise_the_same_error_on_every_rank(backend: str) -> None:
    with RankGroup(backend, 2) as group:
        first, last = group.run(errors_of_different_positions)
    assert first == last
    positions = ["(0, 0) on rank 0, (2, 0) on rank 1", "(0, 0) on rank 0, (0, 6) on rank 1", "(1, 0) on rank 0, (0, 0)"]
    assert len(first) == 3
    for text, position in zip(first, positions, strict=True):
        assert text.startswith("The ranks iterate over a ShardedLoader at different positions, as (epoch, sample): ")
        assert position in text
        assert "set loader.epoch on every rank" in text

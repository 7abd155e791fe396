"""find_batch_size returns the largest batch size that fits on all ranks and leaves the Trainer unchanged."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import ci
from launches import running_ranks
from test_learning_rate_finder import assert_equal, copy_state
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from unitrain import TrainConfig, Trainer, find_batch_size
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.errors import ConfigError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
ENOUGH = 1 << 40  # bytes


class Samples(Dataset[Any]):
    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.ones(2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Samples(100))


class Limited(nn.Module):
    """A model that raises torch's out-of-memory error, or `error`, for batches of more than `limit` samples."""

    def __init__(self, limit: int, error: Exception | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.limit:
            raise self.error
        result: Tensor = self.layers(inputs)
        return result


def make_trainer(backend: Backend = LOCAL, model: nn.Module | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or Limited(100)
    config = TrainConfig(max_epochs=1, progress="off", **{"batch_size": 4, **settings})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config)


def exceed_memory(closure: Any = None) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def search_on_ranks(backend: Backend) -> list[Any]:
    """Search on ranks with different memory limits, and return the results."""
    results: list[Any] = []
    for mode in ("power", "binary"):
        trainer = make_trainer(backend, Limited(50 if backend.rank == backend.size - 1 else 100))
        before = copy_state(trainer)
        found = find_batch_size(trainer, Samples(), initial=2, memory_limit_bytes=ENOUGH, mode=mode)  # type: ignore[arg-type]
        assert_equal(copy_state(trainer), before)
        results.append((found.batch_size, found.global_batch_size, found.reason, [t.batch_size for t in found.trials]))
    trainer = make_trainer(backend)
    results.append(find_batch_size(trainer, Samples(7 * backend.size), memory_limit_bytes=ENOUGH).reason)
    trainer.fit(Samples(8 * backend.size))  # training is still possible after the search
    other = make_trainer(backend, Limited(8, ValueError("broken") if backend.rank == 0 else None))
    with pytest.raises((ConfigError, ValueError)) as caught:
        find_batch_size(other, Samples(), memory_limit_bytes=ENOUGH)
    results.append(str(caught.value))
    without_memory = make_trainer(backend)
    if backend.rank == backend.size - 1:
        without_memory.optimizer.step = exceed_memory  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as optimizer_caught:
        find_batch_size(without_memory, Samples(), memory_limit_bytes=ENOUGH)
    return [*results, str(optimizer_caught.value)]


@pytest.mark.parametrize("group", [("ddp", 3), *ci(("horovod", 2))], ids=lambda group: f"{group[0]}-{group[1]}")
def test_rank_with_the_least_memory_determines_the_batch_size(group: tuple[str, int]) -> None:
    size, last = group[1], group[1] - 1
    with RankGroup(*group) as started:
        ranks = started.run(search_on_ranks)
    for rank, (power, binary, reason, error, optimizer_error) in enumerate(ranks):
        assert "the optimizer state does not fit in memory with 2 samples per rank" in optimizer_error
        assert power == (32, 32 * size, f"64 samples exceed the memory of rank {last}", [2, 4, 8, 16, 32, 64])
        assert binary[:3] == (50, 50 * size, f"51 samples exceed the memory of rank {last}")
        assert reason == "the data has fewer than 8 samples per rank"
        assert error == (
            "broken" if rank == 0 else "find_batch_size failed on another rank, whose error states the reason."
        )


def test_memory_limit_of_the_process_bounds_the_measured_peak() -> None:
    class Large(nn.Module):
        """A model with an activation of 2 MiB per sample."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs[:, :1].expand(-1, 1 << 19) * self.weight).sigmoid()[:, :2]

    trainer = make_trainer(model=Large())
    small = find_batch_size(trainer, Samples(), initial=1, max_batch_size=1, memory_limit_bytes=ENOUGH)
    limit = small.trials[0].peak_bytes + 100 * 2**20
    found = find_batch_size(trainer, Samples(), memory_limit_bytes=limit)
    by_size = {trial.batch_size: trial for trial in found.trials}
    assert by_size[found.batch_size].peak_bytes <= limit < by_size[2 * found.batch_size].peak_bytes
    assert 4 <= found.batch_size <= 64
    assert "above the limit of" in found.reason or "would need about" in found.reason


@pytest.mark.parametrize(
    ("data", "settings"),
    [(Stream(), {}), (DataLoader(Samples(100), 4, shuffle=True), {"batch_size": None}), (Samples(100), {})],
)
def test_datasets_streams_and_loaders_are_supported(data: Any, settings: dict[str, Any]) -> None:
    found = find_batch_size(make_trainer(model=Limited(20), **settings), data, memory_limit_bytes=ENOUGH, mode="binary")
    assert found.batch_size == 20
    assert str(found).startswith("Largest batch size: 20 per rank, 20 over all ranks (21 samples exceed the memory of")
    assert "too large" in str(found)


def test_max_batch_size_limits_the_search_and_settings_are_unchanged() -> None:
    trainer = make_trainer(gradient_accumulation_steps={0: 2, 1: 4})
    found = find_batch_size(trainer, Samples(), max_batch_size=24, memory_limit_bytes=ENOUGH)
    assert (found.batch_size, found.reason) == (24, "max_batch_size is 24")
    assert trainer.config.gradient_accumulation_steps == {0: 2, 1: 4}


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({"memory_limit_bytes": None}, {}, r"needs memory_limit_bytes on a CPU"),
        ({"initial": 0}, {}, r"find_batch_size\(initial=...\) must be at least 1, got 0"),
        ({"initial": 8, "max_batch_size": 4}, {}, r"max_batch_size=4\) is below initial=8"),
        ({"mode": "binsearch"}, {}, r"Unknown find_batch_size\(mode=...\) 'binsearch'"),
        (
            {"initial": 128},
            {},
            r"a batch of 128 samples per rank does not fit: 128 samples exceed the memory of rank 0",
        ),
        ({"initial": 2000}, {}, r"find_batch_size: the data has fewer than 2000 samples per rank\. Use initial=1, or"),
        ({}, {"sync_batch_norm": True}, r"does not support TrainConfig.sync_batch_norm=True"),
        ({}, {"shard": "gradients"}, r"does not support TrainConfig.shard='gradients'"),
    ],
)
def test_invalid_arguments_are_rejected(given: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_batch_size(make_trainer(**settings), Samples(), **{"memory_limit_bytes": ENOUGH, **given})


SHARDED = """\
import sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

def exceed_memory(*arguments):
    print("fault", time.time(), flush=True)
    raise torch.OutOfMemoryError("CUDA out of memory.")

with unitrain.init(device="cpu", timeout_seconds=60) as backend:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    config = unitrain.TrainConfig(max_epochs=1, batch_size=4, shard="state", progress="off")
    trainer = unitrain.Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config)
    if backend.rank == 1:
        if sys.argv[1] == "update":
            torch.optim.Adam.step = exceed_memory
            trainer.optimizer.step = exceed_memory
        else:
            model[0].weight.register_hook(exceed_memory)
    data = TensorDataset(torch.ones(64, 4), torch.ones(64, 2))
    if sys.argv[1] == "backward":  # skip the trials, in which the hook would raise the error too
        import unitrain.batch_size_finder as finder
        finder._Search.try_size = lambda self, size: True
    unitrain.find_batch_size(trainer, data, memory_limit_bytes=1 << 40, max_batch_size=4)
    print("found")
"""


@pytest.mark.parametrize(
    ("backend", "phase"),
    [
        ("ddp", "update"),
        *[pytest.param(*case, marks=pytest.mark.ci) for case in (("ddp", "backward"), ("horovod", "update"))],
    ],
)
def test_a_rank_that_runs_out_of_memory_in_a_sharded_step_ends_all_ranks(
    backend: str, phase: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    with running_ranks(script, backend, 2, phase) as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
        ended = time.time()
    assert all(process.returncode for process in processes), outputs
    message = (
        "find_batch_size: the optimizer state does not fit in memory with 2 samples per rank. Use a smaller model."
    )
    assert f"ConfigError: {message}" in outputs[1]
    assert f"rank 1 failed first: ConfigError: {message}" in outputs[0]
    (began,) = re.findall(r"fault (\S+)", outputs[1])
    assert ended - float(began) < 50  # less than the timeout of 60 s

"""PredictionWriter writes the outputs that `predict` would return. The files do not depend on the number of ranks."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import ci
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unitrain import PredictionWriter, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import folder_lock
from unitrain.data.order import strided_order
from unitrain.errors import CheckpointError, ConfigError, DataError, ModelError
from unitrain.prediction_writer import _target_rows
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
GROUPS = [("local", 1), ("ddp", 3), *ci(("horovod", 2))]
SAMPLES = 23


class Stream(IterableDataset[Any]):
    """Yields samples or, with `sizes`, batches of these sizes."""

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        inputs, index = data().tensors
        if not self.sizes:
            yield from zip(inputs, index, strict=True)
            return
        start = 0
        for size in self.sizes:
            yield inputs[start : start + size], index[start : start + size]
            start += size


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 5, generator=generator), torch.arange(samples))


def forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    inputs, index = batch
    logits = model(inputs)
    rest = [index, None, (logits.bfloat16(), inputs[:, :0])]
    return {"log/its": logits.double().round(decimals=3), "rest": rest, "index": index.int() * 2}, index


def make_trainer(backend: Backend, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    config = TrainConfig(max_epochs=1, progress="off", **{"eval_batch_size": 4, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config, forward=forward)


DATA: dict[str, Any] = {
    "map": data,
    "few": lambda: data(2),
    "loader": lambda: DataLoader(data(), 5, shuffle=False, drop_last=True),
    "shuffled": lambda: DataLoader(data(), 5, shuffle=True),
    "stream": Stream,
    "batches": lambda: DataLoader(Stream((3, 7, 1, 4, 2, 6)), batch_size=None),
}


def write_all(backend: Backend, folder: str) -> dict[str, tuple[Any, dict[str, str]]]:
    """For each kind of data, return the result of `predict` and the digests of the written files."""
    results = {}
    for kind, make_data in DATA.items():
        trainer = make_trainer(backend)
        path = Path(folder) / f"{backend.name}-{backend.size}" / kind
        assert trainer.predict(make_data(), writer=PredictionWriter(path)) == path
        results[kind] = trainer.predict(make_data()), digests(path)
    return results


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


@pytest.fixture(scope="module")
def single_process_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder / "local-1", write_all(LOCAL, str(folder))


def test_files_contain_the_outputs_that_predict_returns(single_process_results: tuple[Path, dict[str, Any]]) -> None:
    folder, results = single_process_results
    names = [
        "output.index.npy",
        "output.log_its.npy",
        "output.rest.0.npy",
        "output.rest.2.0.npy",
        "output.rest.2.1.npy",
    ]
    for kind, (returned, files) in results.items():
        assert list(files) == [*names, "predictions.json"]
        expected = [returned["index"], returned["log/its"], returned["rest"][0], *returned["rest"][2]]
        for name, tensor in zip(names, expected, strict=True):
            found = np.load(folder / kind / name, mmap_mode="r" if tensor.numel() else None)
            tensor = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
            assert found.dtype == tensor.numpy().dtype
            np.testing.assert_array_equal(found, tensor.numpy())
    manifest = json.loads((folder / "map" / "predictions.json").read_text())
    assert manifest["samples"] == SAMPLES
    assert manifest["outputs"][0] == {
        "path": "output['log/its']", "file": "output.log_its.npy", "dtype": "float64", "shape": [SAMPLES, 3],
    }  # fmt: skip


@pytest.mark.parametrize("group", GROUPS[1:], ids=lambda group: f"{group[0]}-{group[1]}")
def test_files_have_the_same_bytes_on_several_ranks(
    group: tuple[str, int], single_process_results: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    with RankGroup(*group) as ranks:
        of_ranks = ranks.run(write_all, str(tmp_path))
        messages = ranks.run(messages_of_invalid_calls, str(tmp_path))
    for results in of_ranks:
        for kind, (_, files) in single_process_results[1].items():
            if kind != "shuffled":  # rank 0 draws the order from its own seed
                assert results[kind][1] == files
    assert all(one == messages[0] for one in messages)
    assert "already exists. Choose another folder" in messages[0][0]
    assert "was called with writer=None on rank 0" in messages[0][1]
    assert "they differ between ranks" in messages[0][2]
    assert "FileExistsError" in messages[0][3] or "NotADirectoryError" in messages[0][3]
    assert not list(tmp_path.rglob("*.unfinished"))


def messages_of_invalid_calls(backend: Backend, folder: str) -> list[str]:
    messages = []
    existing = Path(folder) / "existing"
    if backend.rank == 0:
        existing.mkdir(exist_ok=True)
        (Path(folder) / "file").touch()
    backend.barrier()

    def differing(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch[0])[:, : 1 + backend.rank], batch[1]

    for given in ("existing", None, "differing", "file/below"):
        trainer = make_trainer(backend)
        if given == "differing":
            trainer._evaluation._forward._function = differing
        writer = PredictionWriter(Path(folder) / (given or "other")) if given or backend.rank else None
        with pytest.raises((ConfigError, DataError, ModelError)) as caught:
            trainer.predict(data(), writer=writer)
        messages.append(str(caught.value))
    return messages


def test_existing_folder_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    folder = tmp_path / "predictions"
    trainer = make_trainer(LOCAL)
    trainer.predict(data(2), writer=PredictionWriter(folder))
    before = digests(folder)
    with pytest.raises(ConfigError, match=r"already exists. Choose another folder, or replace it"):
        trainer.predict(data(), writer=PredictionWriter(folder))
    assert digests(folder) == before
    (tmp_path / "predictions.unfinished").mkdir()  # left by a killed job
    trainer.predict(data(), writer=PredictionWriter(folder, overwrite=True))
    assert len(np.load(folder / "output.index.npy")) == SAMPLES
    assert [path.name for path in tmp_path.iterdir()] == ["predictions"]


@pytest.mark.parametrize("existing", ["file", "run", "link to a run", "dangling link"])
def test_overwrite_replaces_only_predictions(existing: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "step-000000010").mkdir(parents=True)
    (run / "step-000000010" / "model.safetensors").write_bytes(b"weights")
    path = tmp_path / "path" if existing != "run" else run
    if existing == "file":
        path.write_text("notes")
    elif existing != "run":
        path.symlink_to(run if existing == "link to a run" else tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"replaces only a folder of predictions, but .* no predictions.json"):
        make_trainer(LOCAL).predict(data(), writer=PredictionWriter(path, overwrite=True))
    assert (run / "step-000000010" / "model.safetensors").read_bytes() == b"weights"
    assert existing != "file" or path.read_text() == "notes"
    assert not list(tmp_path.glob("*.unfinished"))


def test_files_of_another_program_in_the_unfinished_folder_are_kept(tmp_path: Path) -> None:
    (tmp_path / "predictions.unfinished").mkdir()
    (tmp_path / "predictions.unfinished" / "notes.txt").write_text("notes")
    with pytest.raises(ConfigError, match=r"contains another file, 'notes.txt'. Move this file"):
        make_trainer(LOCAL).predict(data(), writer=PredictionWriter(tmp_path / "predictions"))
    assert [path.name for path in (tmp_path / "predictions.unfinished").iterdir()] == ["notes.txt"]


@contextmanager
def locked(unfinished: Path) -> Iterator[None]:
    """Run a process that represents the first job and holds the lock of the folder `unfinished`."""
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    unfinished.mkdir()
    (unfinished / "output.npy").write_bytes(b"rows of the first job")
    command = [sys.executable, "-ISc", program, str(unfinished / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            first.stdout.readline()
            yield
        finally:
            first.kill()


def test_second_job_cannot_write_to_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_OTHER_JOB_TIMEOUT_SECONDS", 0.1)
    unfinished = tmp_path / "predictions.unfinished"
    with locked(unfinished):
        with pytest.raises(CheckpointError, match=r"predictions.unfinished' is in use by another job"):
            make_trainer(LOCAL).predict(data(), writer=PredictionWriter(tmp_path / "predictions"))
        assert (unfinished / "output.npy").read_bytes() == b"rows of the first job"
    make_trainer(LOCAL).predict(
        data(), writer=PredictionWriter(tmp_path / "predictions")
    )  # the first job has been killed
    assert [path.name for path in tmp_path.iterdir()] == ["predictions"]
    assert ".lock" not in digests(tmp_path / "predictions")


def predict_into_locked_folder(backend: Backend, folder: str) -> str:
    folder_lock._OTHER_JOB_TIMEOUT_SECONDS = 10.0
    with pytest.raises(CheckpointError) as raised:
        make_trainer(backend).predict(data(), writer=PredictionWriter(folder))
    return str(raised.value)


@pytest.mark.ci
def test_ranks_can_wait_for_another_job_longer_than_the_timeout_of_a_collective(tmp_path: Path) -> None:
    with locked(tmp_path / "predictions.unfinished"), RankGroup("ddp", 2, backend_timeout_seconds=7.0) as ranks:
        messages = ranks.run(predict_into_locked_folder, str(tmp_path / "predictions"))
    assert all("predictions.unfinished' is in use by another job" in message for message in messages), messages


@pytest.mark.parametrize("folder", [".", "/", "..", "runs/.."])
def test_folder_without_a_name_is_rejected(folder: str) -> None:
    with pytest.raises(ConfigError, match="must be a path that ends in a name, got"):
        PredictionWriter(folder)


def test_files_are_removed_after_an_exception_in_a_prediction(tmp_path: Path) -> None:
    def failing(model: nn.Module, batch: Any) -> Any:
        if 20 in batch[1]:
            raise RuntimeError("sample 20 is broken")
        return forward(model, batch)

    trainer = make_trainer(LOCAL)
    trainer._evaluation._forward._function = failing
    with pytest.raises(RuntimeError, match="sample 20 is broken"):
        trainer.predict(data(), writer=PredictionWriter(tmp_path / "predictions"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writer", ["predictions", PredictionWriter])
def test_writer_of_another_class_is_rejected(writer: Any) -> None:
    with pytest.raises(ConfigError, match=r"Trainer.predict\(writer=...\) must be a PredictionWriter, got"):
        make_trainer(LOCAL).predict(data(), writer=writer)


@pytest.mark.parametrize("folder", ["", None, 3])
def test_invalid_folder_is_rejected(folder: Any) -> None:
    with pytest.raises(ConfigError, match=r"PredictionWriter\(folder\) must be a non-empty path"):
        PredictionWriter(folder)


def test_target_rows_of_batches_restore_the_order_of_the_data() -> None:
    turns = [[3, 1, 2], [7, 4], [0, 2]]
    rows = [_target_rows(turns, "batches", rank) for rank in range(3)]
    order = strided_order([torch.tensor(own) for own in turns])
    assert np.concatenate(rows).argsort().tolist() == order.tolist()
    assert [_target_rows([[2], [1]], None, rank).tolist() for rank in (0, 1)] == [[0, 1], [2]]
    assert [_target_rows([[2], [1]], "samples", rank).tolist() for rank in (0, 1)] == [[0, 2], [1]]

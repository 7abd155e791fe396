"""Checkpoints are written completely or not at all and restore bit-identical state; loading a checkpoint that does not
match the run raises an error."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import checkpointer, files, output_folder
from unitrain.checkpoint.writer import CheckpointWriter, Retention
from unitrain.config import TrainConfig
from unitrain.errors import CheckpointError
from unitrain.testing import RankGroup, run_ranks
from unitrain.trainer import Trainer

LOCAL = LocalBackend(torch.device("cpu"))


def network() -> nn.Module:
    """Return a model with dropout and running statistics, so that a run has every kind of state."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def samples(length: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(length, 6, generator=generator), torch.randint(3, (length,), generator=generator))


def make_trainer(output: Path | None, optimizer: str = "AdamW", **settings: Any) -> Trainer:
    model = network()
    made = getattr(torch.optim, optimizer)(
        model.parameters(), lr=0.05, **({"momentum": 0.9} if optimizer == "SGD" else {})
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=30)
    kept = {"keep_last": None} if output is not None else {}
    config = TrainConfig(**{"batch_size": 4, "output_dir": output, "progress": "off", **kept, **settings})
    return Trainer(model, made, nn.CrossEntropyLoss(), backend=LOCAL, config=config, scheduler=scheduler)


def save(folder: Path, step: int, model: nn.Module, training: dict[str, Any]) -> None:
    CheckpointWriter(folder, LOCAL, Retention(None), asynchronous=False).save(step, model, training, {"step": step})


def state(trainer: Trainer) -> dict[str, Tensor]:
    moments = {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, values in trainer.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    rate = torch.tensor(trainer.optimizer.param_groups[0]["lr"], dtype=torch.float64)
    return {**{name: value.clone() for name, value in trainer.model.state_dict().items()}, **moments, "rate": rate}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_resumed_run_is_bit_equal_to_uninterrupted(tmp_path: Path, optimizer: str) -> None:
    uninterrupted = make_trainer(None, optimizer, max_epochs=4)
    results = uninterrupted.fit(samples(), samples(9))
    make_trainer(tmp_path, optimizer, max_epochs=2).fit(samples(), samples(9))
    torch.manual_seed(12345)  # the results must not depend on random numbers that the process drew earlier
    resumed = make_trainer(tmp_path, optimizer, max_epochs=4, resume=True)
    assert resumed.progress.epoch == 2
    assert resumed.fit(samples(), samples(9)) == results
    assert_same(state(uninterrupted), state(resumed))
    assert [row["epoch"] for row in history(tmp_path)] == [1, 2, 3, 4]


def test_run_limited_by_steps_resumes_within_an_epoch(tmp_path: Path) -> None:
    uninterrupted = make_trainer(None, max_steps=16)
    uninterrupted.fit(samples())
    make_trainer(tmp_path, max_steps=8).fit(samples())  # an epoch has 6 steps
    resumed = make_trainer(tmp_path, max_steps=16, resume=True)
    assert (resumed.progress.epoch, resumed.progress.step, resumed.progress.sample) == (1, 8, 8)
    resumed.fit(samples())
    assert_same(state(uninterrupted), state(resumed))


@pytest.mark.parametrize(
    ("data", "expected_difference"),
    [
        (samples(30), "length=22, but this data has length=30"),
        (samples(6), "length=22, but this data has length=6"),
        (DataLoader(samples(), batch_size=4), "shuffle=True, but this data has shuffle=False"),
    ],
    ids=["longer", "shorter", "in order"],
)
def test_resuming_within_an_epoch_requires_the_same_order(tmp_path: Path, data: Any, expected_difference: str) -> None:
    make_trainer(tmp_path / "within", max_steps=8).fit(samples())
    with pytest.raises(
        CheckpointError,
        match=rf"^The run is 8 samples into epoch 2 of training data with {expected_difference}: .*Continue with the s",
    ):
        make_trainer(tmp_path / "within", max_steps=16, resume=True).fit(data)
    make_trainer(tmp_path / "between", max_steps=6).fit(samples())
    make_trainer(tmp_path / "between", max_steps=8, resume=True).fit(data)


@pytest.mark.parametrize("scheduler", [StepLR, ReduceLROnPlateau])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_position_beyond_the_epoch_resumes_at_its_end(tmp_path: Path, scheduler: Any) -> None:
    def run(batch_size: int, steps: int) -> tuple[Trainer, dict[str, float]]:
        def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
            return StepLR(optimizer, 1) if scheduler is StepLR else ReduceLROnPlateau(optimizer, patience=5)

        made = make_trainer_with_scheduler(
            tmp_path, make_scheduler, batch_size=None, max_steps=steps, scheduler_interval="epoch", resume=True
        )
        return made, made.fit(DataLoader(samples(), batch_size=batch_size, shuffle=True, drop_last=True))

    first, _ = run(4, 4)
    assert (first.progress.epoch, first.progress.sample, first.scheduler.last_epoch) == (0, 16, 0)
    resumed, results = run(12, 5)  # an epoch has one batch of 12 samples
    assert (resumed.progress.epoch, resumed.progress.step, resumed.progress.sample) == (2, 5, 0)
    assert results.keys() == {"train_loss"}
    assert resumed.scheduler.last_epoch == 2
    assert [(row["epoch"], row["step"], "train_loss" in row) for row in history(tmp_path)] == [
        (1, 4, True), (1, 4, True), (2, 5, True),
    ]  # fmt: skip


def test_resume_starts_a_new_run_if_there_are_no_checkpoints(tmp_path: Path) -> None:
    fresh, first = make_trainer(None, max_epochs=1), make_trainer(tmp_path / "new", max_epochs=1, resume=True)
    fresh.fit(samples())
    first.fit(samples())
    assert_same(state(fresh), state(first))


def test_resuming_a_finished_run_only_evaluates(tmp_path: Path) -> None:
    done = make_trainer(tmp_path, max_epochs=1)
    results = done.fit(samples(), samples(9))
    again = make_trainer(tmp_path, max_epochs=1, resume=True)
    assert again.fit(samples(), samples(9)) == {"val_loss": results["val_loss"]}
    assert_same(state(done), state(again))


def test_run_resumes_from_a_named_checkpoint_in_another_folder(tmp_path: Path) -> None:
    make_trainer(tmp_path / "a", max_epochs=2).fit(samples())
    uninterrupted = make_trainer(tmp_path / "b", max_epochs=3)
    uninterrupted.fit(samples())
    resumed = make_trainer(tmp_path / "c", max_epochs=3, resume=tmp_path / "a" / "step-000000012")
    resumed.fit(samples())
    assert_same(state(uninterrupted), state(resumed))
    assert [path.name for path in sorted((tmp_path / "c").glob("step-*"))] == ["step-000000018"]
    with pytest.raises(
        CheckpointError, match=r"^There is no checkpoint in '.*nowhere'\. Give the output_dir of an earl"
    ):
        make_trainer(None, max_epochs=1, resume=tmp_path / "nowhere")


def test_checkpoint_is_readable_without_unitrain(tmp_path: Path) -> None:
    done = make_trainer(tmp_path, max_epochs=1)
    done.fit(samples())
    (folder,) = tmp_path.glob("step-*")
    model = network()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    assert_same(dict(done.model.state_dict()), dict(model.state_dict()))
    training = torch.load(folder / "training.pt", weights_only=True)
    torch.optim.AdamW(model.parameters()).load_state_dict(training["optimizer"])
    assert training["progress"] == {"epoch": 1, "step": 6, "sample": 0, "position": 0, "step_in_epoch": 0}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["training.pt"]["bytes"] == (folder / "training.pt").stat().st_size


def test_tied_and_strided_parameters_are_restored(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    saved, loaded, plain = Tied(), Tied(), Tied()
    training = {"scheduler": None, "optimizer": torch.optim.SGD(saved.parameters(), lr=0.1).state_dict()}
    save(tmp_path, 1, saved, training)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.5)
    checkpointer.load_checkpoint(tmp_path, loaded, optimizer, None, LOCAL, required=True)
    load_model(plain, str(tmp_path / "step-000000001" / "model.safetensors"))
    for model in (loaded, plain):
        assert_same(dict(saved.state_dict()), dict(model.state_dict()))
        assert model.head.weight is model.embedding.weight
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_parameters_that_share_memory_are_restored(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 2)
            self.second.weight.data = self.first.weight.data
            self.third.weight.data = self.first.weight.data[:2]
            self.transposed = nn.Parameter(self.first.weight.data.t())
            self.register_buffer("row", self.first.weight.data[1])

    saved, loaded = Shared(), Shared()
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.5)
    save(tmp_path, 1, saved, {"scheduler": None, "optimizer": optimizer.state_dict()})
    checkpointer.load_checkpoint(tmp_path, loaded, optimizer, None, LOCAL, required=True)
    assert_same(dict(saved.state_dict()), dict(loaded.state_dict()))
    assert loaded.transposed.data_ptr() == loaded.first.weight.data_ptr()


class Complex(nn.Module):
    """A module with complex parameters and buffers: tied, strided, scalar and empty."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.tied = self.first
        self.strided = nn.Parameter(torch.randn(4, 3, dtype=dtype).T)
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))
        self.register_buffer("conjugate", torch.randn(2, dtype=dtype).conj())
        self.register_buffer("empty", torch.zeros(0, dtype=dtype))
        self.real = nn.Linear(2, 2)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_saved_as_pairs_of_real_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    saved, loaded, again = Complex(dtype), Complex(dtype), Complex(dtype)
    save(tmp_path, 1, saved, {"scheduler": None, "optimizer": torch.optim.Adam(saved.parameters()).state_dict()})
    optimizer = torch.optim.Adam(loaded.parameters())
    checkpointer.load_checkpoint(tmp_path, loaded, optimizer, None, LOCAL, required=True)
    checkpointer.load_weights(tmp_path, again, None, LOCAL)
    for model in (loaded, again):
        assert_same(dict(saved.state_dict()), dict(model.state_dict()))
        assert model.tied is model.first
    (folder,) = tmp_path.glob("step-*")
    plain = load_file(folder / "model.safetensors")
    assert plain.keys() ^ saved.state_dict().keys() == {"tied"}
    for name, value in plain.items():
        expected = saved.state_dict()[name].resolve_conj()
        assert torch.equal(value, torch.view_as_real(expected) if expected.is_complex() else expected)
    with pytest.raises(CheckpointError, match="do not fit Linear: "):
        checkpointer.load_weights(tmp_path, nn.Linear(2, 2), None, LOCAL)


def test_a_checkpoint_with_complex_tensors_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    """Earlier versions stored complex64 tensors in the complex64 format of safetensors."""
    saved, loaded = Complex(torch.complex64), Complex(torch.complex64)
    save(tmp_path, 1, saved, {"scheduler": None, "optimizer": torch.optim.Adam(saved.parameters()).state_dict()})
    (folder,) = tmp_path.glob("step-*")
    saved.conjugate = saved.conjugate.resolve_conj()  # safetensors ignores the lazy conjugation
    file, manifest = folder / "model.safetensors", json.loads((folder / "manifest.json").read_text())
    save_model(saved, str(file))
    written = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    manifest["files"]["model.safetensors"] = written
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checkpointer.load_weights(tmp_path, loaded, None, LOCAL)
    assert_same(dict(saved.state_dict()), dict(loaded.state_dict()))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_aligned_after_loading(tmp_path: Path, dtype: torch.dtype) -> None:
    """torch crashes if it reads complex128 numbers whose address is not a multiple of 16 bytes."""
    real = dtype.to_real()
    state = {f"{number}": torch.randn(5, dtype=dtype if number % 2 else real) for number in range(6)}
    files.save_model_file(state, tmp_path / "model.safetensors")
    loaded = files.read_tensors(tmp_path / "model.safetensors")
    for name, value in loaded.items():
        assert value.dtype is state[name].dtype
        assert value.data_ptr() % value.element_size() == 0
    assert_same(state, loaded)
    model, saved = nn.ParameterDict(state), {name: value.clone() for name, value in state.items()}
    for parameter in model.values():
        parameter.data.zero_()
    files.load_model_file(model, tmp_path / "model.safetensors")
    assert_same(saved, dict(model.state_dict()))


class Spectral(nn.Module):
    """A model with a complex128 parameter and a real output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


def test_a_run_with_complex_parameters_and_their_average_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(epochs: int, folder: Path | None, **settings: Any) -> Trainer:
        model = Spectral()
        config = TrainConfig(
            batch_size=4, max_epochs=epochs, output_dir=folder, ema_decay=0.9, progress="off", **settings
        )
        made = Trainer(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), backend=LOCAL, config=config)
        made.fit(samples())
        return made

    uninterrupted = run(2, None)
    run(1, tmp_path)
    resumed = run(2, tmp_path, resume=True)
    assert uninterrupted.averaged_model is not None
    assert resumed.averaged_model is not None
    assert torch.equal(resumed.model.weight, uninterrupted.model.weight)
    assert torch.equal(resumed.averaged_model.weight, uninterrupted.averaged_model.weight)
    assert not torch.equal(uninterrupted.averaged_model.weight, uninterrupted.model.weight)
    loaded = run(2, None)
    with torch.no_grad():
        loaded.model.weight.zero_()
    loaded.load_weights(tmp_path)
    assert torch.equal(loaded.model.weight, uninterrupted.model.weight)


class SchedulerWithExtraState(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler whose state contains the object `extra`."""

    def __init__(self, optimizer: torch.optim.Optimizer, extra: Any) -> None:
        self.extra = extra
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def make_trainer_with_scheduler(output: Path, scheduler: Any, **settings: Any) -> Trainer:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = TrainConfig(**{"batch_size": 4, "output_dir": output, "progress": "off", **settings})
    made = scheduler(optimizer)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, config=config, scheduler=made)


def test_numpy_numbers_are_restored_as_python_numbers(tmp_path: Path) -> None:
    def cosine(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 30)))

    uninterrupted = make_trainer_with_scheduler(tmp_path / "whole", cosine, max_epochs=2)
    uninterrupted.fit(samples())
    assert type(uninterrupted.optimizer.param_groups[0]["lr"]) is np.float64
    make_trainer_with_scheduler(tmp_path / "parts", cosine, max_epochs=1).fit(samples())
    resumed = make_trainer_with_scheduler(tmp_path / "parts", cosine, max_epochs=2, resume=True)
    assert type(resumed.optimizer.param_groups[0]["lr"]) is float
    resumed.fit(samples())
    assert_same(state(uninterrupted), state(resumed))

    given = [np.int64(3), np.bool_(True), np.array(2.5), {np.int64(1): np.float32(0.5)}, (np.str_("a"),)]
    save(tmp_path, 1, network(), {"given": given})
    loaded = torch.load(tmp_path / "step-000000001" / "training.pt", weights_only=True)["given"]
    assert loaded == [3, True, 2.5, {1: 0.5}, ("a",)]
    assert [type(value) for value in loaded[:3]] == [int, bool, float]


@pytest.mark.parametrize(
    ("extra", "expected_message"),
    [
        ([np.ones(2)], r"scheduler\['extra'\]\[0\] is of class numpy\.ndarray"),
        ({"a": {"b": Path("x")}}, r"scheduler\['extra'\]\['a'\]\['b'\] is of class pathlib\.PosixPath"),
        ({Path("x"): 1}, r"scheduler\['extra'\]\.keys\(\) is of class pathlib\.PosixPath"),
        (lambda: 1, r"scheduler\['extra'\] is of class function"),
        (frozenset([1]), r"scheduler\['extra'\] is of class frozenset"),
        (np.longdouble(1), r"scheduler\['extra'\] is of class numpy\.longdouble"),
    ],
    ids=["array", "path", "key", "lambda", "frozenset", "longdouble"],
)
def test_saving_unsupported_state_raises_an_error_that_names_it(
    tmp_path: Path, extra: Any, expected_message: str
) -> None:
    run = make_trainer_with_scheduler(
        tmp_path, lambda optimizer: SchedulerWithExtraState(optimizer, extra), max_epochs=1
    )
    with pytest.raises(
        CheckpointError, match=rf"^{expected_message}, which torch.load.* cannot load.*Store only tensors, numb"
    ):
        run.fit(samples())
    assert list(tmp_path.glob("*step-*")) == []


def test_safely_loadable_state_is_saved_unchanged(tmp_path: Path) -> None:
    given = {
        "parameter": nn.Parameter(torch.ones(2)), "size": torch.Size([2, 3]), "dtype": torch.float16, "set": {1, 2},
        "device": torch.device("cpu"), "ordered": OrderedDict(a=1), "bytes": b"\xff", "many": Counter("aab"),
    }  # fmt: skip
    save(tmp_path, 1, network(), given)
    loaded = torch.load(tmp_path / "step-000000001" / "training.pt", weights_only=True)
    assert torch.equal(loaded.pop("parameter"), given.pop("parameter"))
    assert loaded == given
    assert {name: type(value) for name, value in loaded.items()} == {n: type(value) for n, value in given.items()}


def damage_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def damage_length(folder: Path) -> None:
    content = (folder / "training.pt").read_bytes()
    (folder / "training.pt").write_bytes(content[:-10])


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def damage_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


DAMAGES = [
    (damage_bit, "the content of model.safetensors has changed"),
    (damage_length, r"training.pt has \d+ bytes instead of \d+"),
    (damage_manifest, "JSONDecodeError"),
    (damage_missing, "FileNotFoundError"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_newest_checkpoint_is_skipped_and_replaced(
    tmp_path: Path, damage: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted = make_trainer(tmp_path, max_epochs=2)
    uninterrupted.fit(samples())
    newest = tmp_path / "step-000000012"
    damage(newest)
    with caplog.at_level(logging.WARNING):
        resumed = make_trainer(tmp_path, max_epochs=2, resume=True)
    assert resumed.progress.epoch == 1
    assert caplog.messages[0].startswith(f"Checkpoint '{newest}' is skipped: ")
    resumed.fit(samples())
    assert_same(state(uninterrupted), state(resumed))
    assert files.find_corruption(newest) is None
    assert [row["epoch"] for row in history(tmp_path)] == [1, 2]


def test_checkpoint_with_the_name_of_another_step_is_skipped(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=2, checkpoint_every_steps=2).fit(samples())
    (tmp_path / "step-000000012").rename(tmp_path / "aside")
    (tmp_path / "step-000000004").rename(tmp_path / "step-000000012")
    assert make_trainer(tmp_path, max_epochs=2, resume=True).progress.step == 10
    wrong = files.find_corruption(tmp_path / "step-000000012")
    assert wrong == "it is the checkpoint of step 4 under the name of another step"
    assert files.find_corruption(tmp_path / "aside") is None  # a user may copy a checkpoint to another name


def test_newer_format_raises_and_is_not_skipped(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=2).fit(samples())
    newest = tmp_path / "step-000000012"
    (newest / "manifest.json").write_text(json.dumps({"format": 3, "shards": []}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        CheckpointError,
        match=rf"^Checkpoint '{newest}' was written by a newer unitrain, in format 3; .*Update unitrain",
    ):
        make_trainer(tmp_path, max_epochs=3, resume=True)
    assert sorted(tmp_path.rglob("*")) == before


def fail_on_rank_zero(backend: Backend) -> tuple[str, str]:
    def fail() -> None:
        raise OSError("no room")

    try:
        output_folder.run_on_rank_zero(backend, "write it", "Make room.", fail)
    except CheckpointError as error:
        return str(error), repr(error.__cause__)
    return "", ""


def test_failure_of_rank_0_raises_on_all_ranks_with_its_cause_on_rank_0() -> None:
    first, second = run_ranks(fail_on_rank_zero, size=2, backend="ddp")
    assert first == ("Cannot write it: OSError: no room. Make room.", "OSError('no room')")
    assert second == ("Cannot write it: OSError: no room. Make room.", "None")


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_run_raises_if_all_checkpoints_are_damaged(tmp_path: Path, damage: Any, message: str) -> None:
    make_trainer(tmp_path, max_epochs=1).fit(samples())
    damage(tmp_path / "step-000000006")
    with pytest.raises(
        CheckpointError, match=rf"^No checkpoint in .* is valid \(checked: 1\); in the newest one, {message}"
    ):
        make_trainer(tmp_path, max_epochs=1, resume=True)


def test_resuming_with_another_model_optimizer_scheduler_or_seed_raises(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=1).fit(samples())
    config = TrainConfig(max_epochs=2, batch_size=4, resume=tmp_path, progress="off")

    def resume(model: nn.Module, scheduled: bool = True, groups: int = 1) -> None:
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}][:groups])
        if groups == 1:
            optimizer = torch.optim.AdamW(parameters)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30) if scheduled else None
        Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, config=config, scheduler=scheduler)

    with pytest.raises(CheckpointError, match=r"does not fit Sequential with AdamW: .*Missing key.*\"5\.weight\""):
        resume(nn.Sequential(*network(), nn.Linear(3, 3)))
    with pytest.raises(CheckpointError, match=r"size mismatch for 4\.weight"):
        resume(nn.Sequential(*list(network())[:-1], nn.Linear(16, 4)))
    with pytest.raises(
        CheckpointError, match=r"with AdamW: loaded state dict has a different number of parameter groups"
    ):
        resume(network(), groups=2)
    with pytest.raises(
        CheckpointError,
        match=r"has a scheduler and this run has none\. Create the Trainer as in the run that wrote it\.$",
    ):
        resume(network(), scheduled=False)
    with pytest.raises(
        CheckpointError, match=r"has seed 0, but TrainConfig\.seed is 7: .*Use TrainConfig\(seed=0\)\.$"
    ):
        make_trainer(None, max_epochs=2, resume=tmp_path, seed=7)


def test_folder_of_another_run_is_rejected_and_not_changed(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=1).fit(samples())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        CheckpointError, match=r"already holds a run, up to step-000000006\. Use TrainConfig\(resume=True\)"
    ):
        make_trainer(tmp_path, max_epochs=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_unwritable_folder_raises_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"^Cannot write to output folder '.*/file/run': .*Not a directory"):
        make_trainer(tmp_path / "file" / "run", max_epochs=1)


def test_failed_write_raises_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(200, 200)
    save(tmp_path, 1, model, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # simulates a full disk: larger files cannot be written
    try:
        with pytest.raises(
            CheckpointError, match=r"^Cannot write checkpoint '.*step-000000002': .*File too large.*room"
        ):
            save(tmp_path, 2, model, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000001"]
    assert files.find_corruption(tmp_path / "step-000000001") is None
    save(tmp_path, 2, model, {"step": 2})
    assert files.find_corruption(tmp_path / "step-000000002") is None


KILLED_WHILE_WRITING = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from unitrain.checkpoint import files as checkpoint_files

torch.set_num_threads(1)
folder = Path(sys.argv[1])
model, random = torch.nn.Linear(300, 300), random.Random(0)
attempt, written, unfinished = 0, [], 0
deadline = time.monotonic() + 100
# On a slow machine, more attempts are needed to write and interrupt enough checkpoints.
while attempt < 20 or ((len(written) < 5 or unfinished < 3) and time.monotonic() < deadline):
    attempt += 1
    child = os.fork()
    if child == 0:
        step = attempt * 1000
        while True:
            step += 1
            with torch.no_grad():
                model.weight.fill_(step)
            checkpoint_files.write(
                checkpoint_files.checkpoint_path(folder, step), model.state_dict(), {"step": step}, {"step": step}
            )
    time.sleep(random.uniform(0.01, 0.2 + 0.01 * max(0, attempt - 20)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    unfinished += len(list(folder.glob(".*.unfinished")))
    written = sorted(folder.glob("step-*"))
    for path in written:
        assert checkpoint_files.find_corruption(path) is None, (path, checkpoint_files.find_corruption(path))
    if written:
        other = torch.nn.Linear(300, 300)
        checkpoint_files.load_model(other, str(written[-1] / "model.safetensors"))
        assert (other.weight == torch.load(written[-1] / "training.pt", weights_only=True)["step"]).all()
    checkpoint_files.remove_unfinished(folder)
    assert not list(folder.glob(".*"))
print(len(written) >= 5, unfinished >= 3)
"""


def test_kill_at_any_moment_leaves_complete_checkpoints_only(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED_WHILE_WRITING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_checkpoints_are_written_at_the_requested_interval_and_at_the_end(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=5, checkpoint_every_epochs=2).fit(samples())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{step:09d}" for step in (12, 24, 30)]
    shutil.rmtree(tmp_path / "step-000000030")
    resumed = make_trainer(tmp_path, max_epochs=5, resume=True)
    resumed.fit(samples())
    assert [row["epoch"] for row in history(tmp_path)] == [1, 2, 3, 4, 5]


class Cyclic(CyclicLR):
    """A scheduler that raises an error when it loads its state, if `fails` is true."""

    fails = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.fails:
            raise LookupError("no state")
        super().load_state_dict(state_dict)


def train_cyclic(backend: Backend, folder: str | None, epochs: int) -> list[float]:
    """Train, and return the parameters and the learning rate."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    config = TrainConfig(
        batch_size=4 // backend.size, max_epochs=epochs, output_dir=folder, resume=folder is not None, progress="off"
    )
    scheduler = Cyclic(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3)
    Trainer(
        model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, scheduler=scheduler
    ).fit(samples())  # fmt: skip
    parameters: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return [*parameters, optimizer.param_groups[0]["lr"]]


def resume_with_a_cyclic_scheduler(backend: Backend, folder: str) -> tuple[list[float], list[float], str]:
    uninterrupted = train_cyclic(backend, None, 2)
    train_cyclic(backend, folder, 1)
    resumed = train_cyclic(backend, folder, 2)
    Cyclic.fails = backend.rank == 1
    with pytest.raises(CheckpointError) as caught:
        train_cyclic(backend, folder, 3)
    return uninterrupted, resumed, str(caught.value)


def find_checkpoint_with_slow_verification(backend: Backend, folder: str) -> tuple[str, int]:
    """Return the name of the checkpoint, and how often rank 0 reports that the verification is in progress."""
    broadcast, received = backend.broadcast_object, []

    def record(obj: Any, root: int = 0) -> Any:
        received.append(broadcast(obj, root))
        return received[-1]

    def verify_slowly(_: Path) -> None:
        deadline = time.monotonic() + 30
        while received.count("in progress") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_folder, "_PROGRESS_INTERVAL_SECONDS", 0.05)
        patch.setattr(files, "find_corruption", verify_slowly)
        patch.setattr(backend, "broadcast_object", record)
        checkpoint = checkpointer.find_checkpoint(Path(folder), backend, required=True)
    assert checkpoint is not None
    return checkpoint.name, received.count("in progress")


def test_every_rank_restores_a_scheduler_that_modifies_its_loaded_state(tmp_path: Path) -> None:
    with RankGroup("ddp", 2) as ranks:
        for uninterrupted, resumed, message in ranks.run(resume_with_a_cyclic_scheduler, str(tmp_path)):
            assert resumed == uninterrupted
            assert "Cyclic.load_state_dict raised LookupError: no state on rank 1" in message
        # The other ranks wait in several short collectives instead of one that would time out.
        first, second = ranks.run(find_checkpoint_with_slow_verification, str(tmp_path))
        assert first == second
        assert first[0] == "step-000000012"
        assert first[1] >= 2


@pytest.mark.parametrize("resume", [True, False])
def test_rows_without_a_checkpoint_are_removed_from_the_history(tmp_path: Path, resume: bool) -> None:
    make_trainer(tmp_path, max_epochs=3, checkpoint_every_epochs=3).fit(samples())
    shutil.rmtree(tmp_path / "step-000000018")  # simulates a crash before the first checkpoint is complete
    assert [row["epoch"] for row in history(tmp_path)] == [1, 2, 3]
    make_trainer(tmp_path, max_epochs=2, resume=resume).fit(samples())
    assert [row["epoch"] for row in history(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", [files.MODEL, files.TRAINING, files.MANIFEST])
def test_a_fifo_instead_of_a_checkpoint_file_is_detected_without_blocking(tmp_path: Path, name: str) -> None:
    files.write(tmp_path / "step-000000001", {"weight": torch.zeros(2)}, {"step": 1}, {"step": 1})
    path = tmp_path / "step-000000001" / name
    path.unlink()
    os.mkfifo(path)
    assert files.find_corruption(tmp_path / "step-000000001") is not None


def test_unfinished_checkpoints_that_are_files_or_links_are_removed(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "file").write_text("kept")
    (tmp_path / ".step-000000001.unfinished").write_text("")
    (tmp_path / ".step-000000002.unfinished").symlink_to(tmp_path / "user")
    files.remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["user"]
    assert (tmp_path / "user" / "file").read_text() == "kept"


def test_second_trainer_of_an_attempt_does_not_resume_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNITRAIN_JOB", "mine")
    fit_linear(tmp_path, max_epochs=1)
    with pytest.raises(CheckpointError, match="already holds a run, up to step-000000003"):
        fit_linear(tmp_path, max_epochs=2)
    assert fit_linear(tmp_path, max_epochs=2, resume=True) == 6
    content = json.loads((tmp_path / ".job").read_text())
    (tmp_path / ".job").write_text(json.dumps({**content, "process": "an earlier attempt"}))
    assert fit_linear(tmp_path, max_epochs=3) == 9  # a restart
    with pytest.raises(CheckpointError, match="already holds a run, up to step-000000009"):
        fit_linear(tmp_path, max_epochs=4)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "manifest.json", "training.pt", "pytorch_model.bin", "config.yaml"]
)
@pytest.mark.parametrize("content", [b"", b'{"name": "app", "icons": []}'])
def test_file_of_another_program_does_not_block_a_resume(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert fit_linear(tmp_path, max_epochs=1, resume=True) == 3  # there is no checkpoint yet
    assert fit_linear(tmp_path, max_epochs=2, resume=True) == 6
    assert (tmp_path / name).read_bytes() == content
    other = tmp_path / "renamed"
    files.checkpoint_path(tmp_path, 6).rename(other)
    assert files.find_newest_valid(other, required=True) == other
    assert files.find_newest_valid(tmp_path, required=True) == files.checkpoint_path(tmp_path, 3)


def fit_linear(folder: Path, **settings: Any) -> int:
    """Train with three steps per epoch, and return the number of steps."""
    model = nn.Linear(2, 1)
    config = TrainConfig(batch_size=2, output_dir=folder, progress="off", **settings)
    backend = LocalBackend(torch.device("cpu"))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), backend=backend, config=config)
    trainer.fit(TensorDataset(torch.ones(6, 2), torch.ones(6, 1)))
    return trainer.progress.step

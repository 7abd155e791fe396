"""Sharded checkpoints: each rank writes and reads its part, and a run on any number of ranks resumes from them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.backends.sharding.partition import MIN_DIVIDED_ELEMENTS
from unitrain.backends.sharding.state_chunks import load_own_state
from unitrain.checkpoint import files
from unitrain.checkpoint.checkpointer import CheckpointContents, Checkpointer
from unitrain.checkpoint.consolidation import consolidate_model
from unitrain.checkpoint.sharded_files import StoredOptimizerState, collect_shard, load_module
from unitrain.checkpoint.writer import CheckpointWriter, Retention
from unitrain.errors import CheckpointError
from unitrain.testing import RankGroup

WIDTH = MIN_DIVIDED_ELEMENTS // 16 + 3  # so that weights are divided among ranks within a row


class Network(nn.Module):
    """A model with tied, strided and half-precision parameters, and with complex and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WIDTH, 64)
        self.convolution = nn.Conv2d(16, 40, 5).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(40)
        self.half = nn.Linear(40, 8).bfloat16()
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.head = nn.Linear(64, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def step(self, optimizer: torch.optim.Optimizer, seed: int) -> None:
        """Step with random gradients that are equal on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        self.norm.num_batches_tracked.add_(1)
        optimizer.step()


class Counting(torch.optim.SGD):
    """An optimizer whose state has non-tensor values, and a tensor whose shape differs from the parameter."""

    updates_parameters_independently = True

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry["count"] = entry.get("count", 0) + 1
                entry["history"] = [*entry.get("history", []), {"norm": parameter.detach().norm().item()}]
                entry["rows"] = parameter.detach().abs().reshape(len(parameter), -1).sum(1)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
    "Counting": lambda model: Counting(model.parameters(), lr=0.1, momentum=0.9),
    "groups": lambda model: torch.optim.SGD(
        [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:], "lr": 0.2}], 0.1, 0.5
    ),
}


def save(backend: Backend, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Write a sharded checkpoint of step 1. If `change` is given, call it while the checkpoint is written
    asynchronously."""
    change = options.pop("change", None)
    writer = CheckpointWriter(folder, backend, Retention(None), asynchronous=change is not None)
    shard = collect_shard(model, optimizer, None, backend.rank, backend.size)
    writer.save_sharded(1, shard, {"optimizer": {}}, {"step": 1})
    if change is not None:
        change()
    writer.wait()


def shard_optimizer(backend: Backend, optimizer: torch.optim.Optimizer, model: nn.Module, shard: Any) -> None:
    """Shard the state of the optimizer. A distributed model is not needed, because all ranks have equal gradients."""
    backend.distributed_optimizer(optimizer, model, shard=shard)


def states_are_equal(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        entry.keys() == other[index].keys()
        and all(
            torch.equal(value, other[index][key]) if isinstance(value, Tensor) else value == other[index][key]
            for key, value in entry.items()
        )
        for index, entry in one.items()
    )


def write_all(backend: Backend, root: str) -> dict[str, Any]:
    """Write checkpoints of several optimizers with and without sharded state. Return whether the written states and
    weights are correct, and the sizes of the ranks' files."""
    states = {}
    for name, build in OPTIMIZERS.items():
        for shard in ("state", "none"):
            model = Network()
            optimizer = build(model)
            with torch.no_grad():
                shard_optimizer(backend, optimizer, model, shard)
                model.step(optimizer, 1)
            folder = Path(root) / name / shard
            if backend.rank == 0:
                folder.mkdir(parents=True)
            backend.barrier()
            expected = deepcopy(optimizer.state_dict())
            weights = {key: value.clone() for key, value in model.state_dict().items()}
            save(backend, folder, model, optimizer, change=lambda model=model, o=optimizer: model.step(o, 2))
            stored = StoredOptimizerState.open(folder / "step-000000001")
            states[name, shard] = (
                states_are_equal(stored.full_state(), expected["state"]),
                loaded_equals(folder, weights),
                [entry.stat().st_size for entry in sorted((folder / "step-000000001").glob("*/rank-*"))],
            )
    return states


def loaded_equals(folder: Path, weights: dict[str, Tensor]) -> bool:
    model = Network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_module(folder / "step-000000001", "model", model)
    assert model.head.weight is model.embedding.weight
    return all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def read_all(backend: Backend, root: str) -> dict[str, Any]:
    """Load the states saved by `write_all` into sharded and replicated optimizers. Return, for each
    combination, whether the loaded state equals the saved one."""
    results = {}
    for name, build in OPTIMIZERS.items():
        for saved in ("state", "none"):
            for shard in ("state", "none"):
                model = Network()
                optimizer = build(model)
                shard_optimizer(backend, optimizer, model, shard)
                stored = StoredOptimizerState.open(Path(root) / name / saved / "step-000000001")
                load_own_state(optimizer, stored)
                results[name, saved, shard] = states_are_equal(stored.full_state(), optimizer.state_dict()["state"])
                model.step(optimizer, 2)
    return results


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_each_rank_writes_its_part_and_other_ranks_read_it(tmp_path: Path) -> None:
    with RankGroup("ddp", 2) as group:
        by_rank = group.run(write_all, str(tmp_path), timeout_seconds=200)
    for states in by_rank:
        for name, (is_state_equal, is_model_equal, sizes) in states.items():
            assert is_state_equal, name
            assert is_model_equal, name
            assert max(sizes) < 0.7 * sum(sizes), (name, sizes)
    for folder in tmp_path.glob("*/*/step-*"):
        assert files.find_corruption(folder) is None
    with RankGroup("horovod", 3) as group:
        for results in group.run(read_all, str(tmp_path), timeout_seconds=200):
            assert all(results.values()), results
    assert_other_programs_can_read(tmp_path / "AdamW" / "state" / "step-000000001", tmp_path)


def assert_other_programs_can_read(checkpoint: Path, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_model
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    expected, loaded = Network(), Network()
    load_module(checkpoint, "model", expected)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    # A tied parameter is stored under its first name. Complex numbers are stored as pairs of real numbers.
    tensors: dict[str, Any] = {
        name: torch.view_as_real(value) if value.is_complex() else value for name, value in loaded.state_dict().items()
    }
    planner = DefaultLoadPlanner(allow_partial_load=True)
    reader = dcp.HuggingFaceStorageReader(str(checkpoint / "model"))
    dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    state = StoredOptimizerState.open(checkpoint).full_state()
    moments = {"state.convolution.weight.exp_avg": torch.zeros(40, 16, 5, 5), "state.norm.bias.step": torch.zeros(())}
    dcp.load(moments, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint / "optimizer")), no_dist=True)
    names = [name for name, _ in expected.named_parameters()]
    assert torch.equal(moments["state.convolution.weight.exp_avg"], state[names.index("convolution.weight")]["exp_avg"])
    assert moments["state.norm.bias.step"] == 1
    consolidate_model(checkpoint, folder / "model.safetensors", average=False)
    plain = Network()
    plain.phase = torch.view_as_real(plain.phase)
    load_model(plain, folder / "model.safetensors")
    plain.phase = torch.view_as_complex(plain.phase)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


def test_checkpoint_can_have_fewer_parameters_than_ranks(tmp_path: Path) -> None:
    with RankGroup("ddp", 3) as group:
        group.run(write_one_parameter, str(tmp_path))
    model = nn.Linear(1, 1, bias=False)
    load_module(tmp_path / "step-000000001", "model", model)
    assert model.weight.item() == 2
    state = StoredOptimizerState.open(tmp_path / "step-000000001").full_state()
    assert state[0]["exp_avg"].shape == (1, 1)


def write_one_parameter(backend: Backend, folder: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    shard_optimizer(backend, optimizer, model, "state")
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    save(backend, Path(folder), model, optimizer)


def write_distributed_tensors(backend: Backend, folder: str) -> None:
    model, optimizer = build_fully_sharded(backend)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    moments = [optimizer.state[parameter]["exp_avg_sq"].full_tensor() for parameter in model.parameters()]
    save(backend, Path(folder), model, optimizer)
    path = Path(folder) / "step-000000001"
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    load_module(path, "model", plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, full[name]), name
    state = StoredOptimizerState.open(path).full_state()
    assert [torch.equal(state[index]["exp_avg_sq"], value) for index, value in enumerate(moments)] == [True] * 4
    other, other_optimizer = build_fully_sharded(backend)
    load_module(path, "model", other)
    load_own_state(other_optimizer, StoredOptimizerState.open(path))
    for name, value in other.state_dict().items():
        assert torch.equal(value.full_tensor(), full[name]), name
    for parameter, moment in zip(other.parameters(), moments, strict=True):
        assert torch.equal(other_optimizer.state[parameter]["exp_avg_sq"].full_tensor(), moment)
        assert other_optimizer.state[parameter]["step"] == 1


def build_fully_sharded(backend: Backend) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose parameters are DTensors, some without elements on the last rank, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(backend.size)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (backend.size,)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def load_after_a_step(backend: Backend, folder: str) -> str | None:
    """Load a sharded optimizer state in the process that saved it, first without and then with an error on one rank.
    Return the message of the error."""
    model: nn.Module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model = backend.distributed_model(model.to(backend.device), shard="parameters")
    backend.distributed_optimizer(optimizer, model, shard="parameters")

    def step() -> None:
        model(torch.ones(2, 7, device=backend.device)).sum().backward()
        optimizer.step()

    def moments() -> list[Tensor]:
        return [entry["exp_avg"].clone() for entry in optimizer.state.values()]

    step()
    config = TrainConfig(max_steps=1, shard="parameters", output_dir=folder, async_checkpoints=False)
    checkpointer, path = Checkpointer(config, backend), Path(folder) / "step-000000001"
    training, manifest = {"scheduler": None}, {"step": 1}
    checkpointer.save(
        CheckpointContents(step=1, model=model, optimizer=optimizer, average=None, training=training, manifest=manifest)
    )
    expected = moments()
    step()
    checkpointer.load_optimizer_state(path, optimizer)
    found = moments()
    assert len(found) == 4
    assert all(map(torch.equal, found, expected))
    step()
    with pytest.MonkeyPatch.context() as patch:
        if backend.rank == 1:  # simulates a failing file system on one host
            patch.setattr(StoredOptimizerState, "read", lambda *_: Path("/missing/file").read_bytes())
        try:
            checkpointer.load_optimizer_state(path, optimizer)
        except CheckpointError as error:
            return str(error)
    return None


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    with RankGroup("ddp", 2) as group:
        yield group


@pytest.fixture(scope="module")
def checkpoint(pair: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    pair.run(write_distributed_tensors, str(folder))
    return folder / "step-000000001"


def test_distributed_tensors_are_written_and_read_by_the_ranks_that_hold_them(checkpoint: Path) -> None:
    assert files.find_corruption(checkpoint) is None


def test_optimizer_state_is_loaded_after_a_step(pair: RankGroup, tmp_path: Path) -> None:
    for error in pair.run(load_after_a_step, str(tmp_path), timeout_seconds=30):
        assert error is not None
        assert "No such file" in error


def record_verified_files(backend: Backend, folder: str) -> list[list[str]]:
    """Return the files that this rank verifies when it searches for the best checkpoint, and the steps that were
    reported as written. Step 5 is saved first without, then with a result.
    """
    model = nn.Linear(3, 3)
    config = TrainConfig(
        max_steps=9, output_dir=folder, checkpoint_format="sharded", keep_best="val_loss", keep_last=9,
        async_checkpoints=False,
    )  # fmt: skip
    reported: list[str] = []
    checkpointer = Checkpointer(config, backend, lambda step, path, seconds: reported.append(str(step)))

    def save(step: int, loss: float) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manifest = {"step": step, "epoch": step, "sample": 0, "results": {"val_loss": loss}}
        checkpointer.save(
            CheckpointContents(
                step=step, model=model, optimizer=optimizer, average=None, training={}, manifest=manifest
            )
        )

    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.1), (4, 0.2), (5, float("nan")), (5, 0.1)):
        save(step, loss)
    verified: list[str] = []

    def digest(path: Path, digest: Any = files.sha256) -> Any:
        verified.append(str(path.relative_to(folder)))
        return digest(path)

    with mock.patch.object(files, "sha256", digest):
        assert checkpointer.find_best().name == "step-000000005"
        if backend.rank == 0:
            for step in (3, 5):
                (Path(folder) / f"step-00000000{step}" / "training.pt").write_bytes(b"")
        verified.clear()
        assert checkpointer.find_best().name == "step-000000002"
    return [verified, reported]


def test_all_ranks_verify_the_files_of_the_best_checkpoint(pair: RankGroup, tmp_path: Path) -> None:
    (best, reported), (other_best, other_reported) = pair.run(record_verified_files, str(tmp_path))
    names = ["model/rank-00000.safetensors", "model/rank-00001.safetensors", "training.pt"]
    assert (reported, other_reported) == (["1", "2", "3", "4", "5", "5"], [])
    # Checkpoints 3 and 5 have the same result as 2, but are damaged. The others are worse, so they are not read.
    newest_best = [name for name in best + other_best if name.startswith("step-000000002")]
    assert sorted(newest_best) == [f"step-000000002/{name}" for name in names]
    assert {name.partition("/")[0] for name in best + other_best} <= {f"step-00000000{step}" for step in (2, 3, 5)}
    assert other_best


def test_a_model_that_does_not_match_is_rejected(checkpoint: Path) -> None:
    larger = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"for Sequential: missing '2.weight'; missing '2.bias'$"):
        load_module(checkpoint, "model", larger)
    with pytest.raises(RuntimeError, match=r"size mismatch for '0.weight': \[5, 7\] in the checkpoint, \[4, 7\]"):
        load_module(checkpoint, "model", nn.Sequential(nn.Linear(7, 4), nn.Linear(4, 1)))
    with pytest.raises(RuntimeError, match=r"unexpected '1.weight'; unexpected '1.bias'$"):
        load_module(checkpoint, "model", nn.Sequential(nn.Linear(7, 5)))


class ConvertingLinear(nn.Linear):
    """A module that converts the state of an earlier version when it loads it."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, *arguments)


def test_modules_that_convert_their_state_are_loaded_by_load_state_dict(checkpoint: Path) -> None:
    plain, converted = (
        nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1)),
        nn.Sequential(ConvertingLinear(7, 5), nn.Linear(5, 1)),
    )
    load_module(checkpoint, "model", plain)
    load_module(checkpoint, "model", converted)
    assert torch.equal(converted[0].weight, 2 * plain[0].weight)


class StepRecorder(Callback):
    """A callback with state."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.steps.append(trainer.progress.step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_saving_does_not_modify_the_training_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    config = TrainConfig(max_steps=1, output_dir=tmp_path, checkpoint_format="sharded", async_checkpoints=False)
    average = {"model": model.state_dict(), "updates": 3}
    training: dict[str, Any] = {"scheduler": None, "local_sgd": {"steps": 1, "own": {"momentum": torch.ones(2)}}}
    state = CheckpointContents(
        step=1, model=model, optimizer=optimizer, average=average, training=training, manifest={"step": 1}
    )
    Checkpointer(config, LocalBackend(torch.device("cpu"))).save(state)
    assert (tmp_path / "step-000000001" / "average" / "rank-00000.safetensors").exists()
    assert set(training) == {"scheduler", "local_sgd"}
    assert set(training["local_sgd"]) == {"steps", "own"}
    assert set(average) == {"model", "updates"}


def run_trainer(folder: Path, max_steps: int, checkpoint_format: Any, **settings: Any) -> tuple[Trainer, StepRecorder]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 6, generator=generator)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    callback = StepRecorder()
    config = TrainConfig(
        max_steps=max_steps, batch_size=8, output_dir=folder, resume=True, progress="off", ema_decay=0.5,
        checkpoint_format=checkpoint_format, checkpoint_every_steps=2, keep_best="val_loss", **settings,
    )  # fmt: skip
    backend = LocalBackend(torch.device("cpu"))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, callbacks=[callback])
    trainer.fit(data, data)
    return trainer, callback


def weights(trainer: Trainer) -> Tensor:
    assert trainer.averaged_model is not None
    modules = (trainer.backend.unwrap(trainer.model), trainer.averaged_model)
    return torch.cat([value.double().flatten() for one in modules for value in one.state_dict().values()])


def test_everything_in_a_full_checkpoint_is_in_a_sharded_one(tmp_path: Path) -> None:
    """Compare data position, RNG, callbacks, averaged weights, retention and the best checkpoint, within and between
    epochs."""
    folders = {}
    for checkpoint_format in ("full", "sharded"):
        for last in (7, 13):
            trainer, callback = run_trainer(tmp_path / checkpoint_format, last, checkpoint_format, keep_last=2)
            folders[checkpoint_format, last] = weights(trainer), callback.steps
        trainer.load_weights("best")
        folders[checkpoint_format, 0] = (
            weights(trainer),
            sorted(p.name for p in trainer.checkpointer.folder.glob("s*-*")),
        )
    for last in (7, 13, 0):
        assert torch.equal(folders["full", last][0], folders["sharded", last][0]), last
        assert folders["full", last][1] == folders["sharded", last][1]
    uninterrupted, _ = run_trainer(tmp_path / "uninterrupted", 13, "full")
    assert torch.equal(weights(uninterrupted), folders["sharded", 13][0])
    assert folders["sharded", 13][1] == list(range(1, 14))

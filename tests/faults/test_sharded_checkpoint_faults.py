"""Sharded checkpoints with damaged files, killed ranks and little memory, and both checkpoint formats on full disks."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from requirements import needs_mounts
from torch import nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend, ShardingMode
from unitrain.checkpoint import files, sharded_files
from unitrain.checkpoint.checkpointer import CheckpointContents, Checkpointer
from unitrain.errors import CheckpointError
from unitrain.testing import RankError, RankGroup

WIDTH = 2**14 + 8  # large enough to be sharded


class Fault(Callback):
    """Calls `action` on rank 1 after step 3, before the checkpoint of step 4."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 3:
            trainer.checkpointer.wait()
            if trainer.backend.rank == 1:
                self.action()


def kill_while_writing() -> None:
    """Replace the function that writes one folder, so that it kills the process after the first folder."""
    write = sharded_files.write_chunks

    def write_and_die(*arguments: Any) -> Any:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    sharded_files.write_chunks = write_and_die


def limit_file_size() -> None:
    """Limit the size of files to 64 KiB to simulate a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))


def train(
    backend: Backend,
    folder: str,
    max_steps: int,
    fault: Callable[[], None] | None = None,
    shard: ShardingMode = "state",
) -> Any:
    """Train with a checkpoint every two steps. Return the step from which the run starts, the parameters and
    the error, if any."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH // 4), nn.ReLU(), nn.Linear(WIDTH // 4, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=generator).double()
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    config = TrainConfig(
        max_steps=max_steps, global_batch_size=6, shard=shard, output_dir=folder, resume=True, progress="off",
        checkpoint_every_steps=2, keep_last=None,
    )  # fmt: skip
    callbacks = [] if fault is None else [Fault(fault)]
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, callbacks=callbacks)
    first, error = trainer.progress.step, None
    try:
        trainer.fit(data)
    except CheckpointError as caught:
        error = str(caught)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return first, nn.utils.parameters_to_vector(model.parameters()).detach(), error


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def test_all_ranks_skip_a_checkpoint_with_a_damaged_file(tmp_path: Path) -> None:
    with RankGroup("ddp", 2) as group:
        expected = group.run(train, str(tmp_path / "run"), 6)[0][1]
        names = list(files.read_manifest(tmp_path / "run" / "step-000000006")["files"])
        assert sorted(names) == [
            "model/rank-00000.safetensors", "model/rank-00001.safetensors", "optimizer/rank-00000.safetensors",
            "optimizer/rank-00001.safetensors", "training.pt",
        ]  # fmt: skip
        damages = [
            (names[0], flip_last_bit),
            (names[1], Path.unlink),
            (names[2], flip_last_bit),
            (names[3], truncate),
            (names[4], flip_last_bit),
        ]
        for name, damage in damages:
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "run", copy)
            damage(copy / "step-000000006" / name)
            for first, parameters, error in group.run(train, str(copy), 6):
                assert (first, error) == (4, None), name
                assert torch.equal(parameters, expected), name
            assert files.find_corruption(copy / "step-000000006") is None  # the checkpoint was written again
            shutil.rmtree(copy)
        for name in ("../run/training.pt", "/etc/passwd"):
            manifest = tmp_path / "run" / "step-000000006" / "manifest.json"
            manifest.write_text(manifest.read_text().replace('"model/rank-00000.safetensors"', f'"{name}"'))
            assert files.find_corruption(manifest.parent) == f"its manifest lists an unknown file {name!r}"
            manifest.write_text(manifest.read_text().replace(f'"{name}"', '"model/rank-00000.safetensors"'))
        content = json.loads(manifest.read_text())
        del content["files"]["model/rank-00001.safetensors"]
        manifest.write_text(json.dumps(content))
        assert files.find_corruption(manifest.parent) == (
            "the list of files in its manifest has changed since it was written"
        )
        for first, parameters, error in group.run(train, str(tmp_path / "run"), 6):
            assert (first, error) == (4, None)
            assert torch.equal(parameters, expected)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_rank_that_is_killed_while_shards_are_written_leaves_an_invisible_checkpoint(
    tmp_path: Path, backend: str
) -> None:
    with RankGroup(backend, 2) as group:
        expected = group.run(train, str(tmp_path / "expected"), 6)[0][1]
        with pytest.raises(RankError):
            group.run(train, str(tmp_path / "run"), 6, kill_while_writing)
        assert checkpoint_steps(tmp_path / "run") == [2]
        for first, parameters, error in group.run(train, str(tmp_path / "run"), 6):
            assert (first, error) == (2, None)
            assert torch.equal(parameters, expected)
    assert checkpoint_steps(tmp_path / "run") == [2, 4, 6]
    assert not list((tmp_path / "run").glob(".*.unfinished"))


def test_full_disk_on_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    with RankGroup("ddp", 2) as group:
        for _, _, error in group.run(train, str(tmp_path), 6, limit_file_size):
            assert error is not None
            assert error.startswith(f"Cannot write checkpoint '{tmp_path}/step-000000004' on rank 1: [Errno 27]")
            assert error.endswith("Check that the folder is writable and has room, or choose another output_dir.")
        assert checkpoint_steps(tmp_path) == [2]
        assert [first for first, _, _ in group.run(train, str(tmp_path), 6)] == [2, 2]
    assert checkpoint_steps(tmp_path) == [2, 4, 6]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a mounted file system of 1.2 MB, which has room for one checkpoint of `train`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(folder)]
    subprocess.run(command, check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def start_error(backend: Backend, folder: str, shard: ShardingMode) -> str:
    try:
        train(backend, folder, 6, None, shard)
    except CheckpointError as error:
        return str(error)
    return "not raised"


@needs_mounts
@pytest.mark.parametrize("shard", ["none", "state"], ids=["full format", "sharded format"])
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_full_or_read_only_file_system_raises_on_all_ranks(small_disk: Path, backend: str, shard: ShardingMode) -> None:
    """The disk becomes full during training. After space is freed, the run resumes and has the same result."""
    with RankGroup(backend, 2) as group:
        expected = group.run(train, str(small_disk.parent / "undisturbed"), 6, None, shard)[0][1]
        (_, _, error), (_, _, other) = group.run(train, str(small_disk), 6, None, shard)
        assert error == other
        assert error.startswith(f"Cannot write checkpoint '{small_disk}/step-000000004'")
        assert "No space left on device" in error
        assert error.endswith("Check that the folder is writable and has room, or choose another output_dir.")
        assert checkpoint_steps(small_disk) == [2]
        assert files.find_corruption(small_disk / "step-000000002") is None
        remount(small_disk, "ro")
        error, other = group.run(start_error, str(small_disk), shard)
        assert error == other
        assert error.startswith(f"Cannot write to output folder '{small_disk}': OSError: [Errno 30] Read-only file")
        remount(small_disk, "rw,size=8m")
        for first, parameters, error in group.run(train, str(small_disk), 6, None, shard):
            assert (first, error) == (2, None)
            assert torch.equal(parameters, expected)
    assert checkpoint_steps(small_disk) == [2, 4, 6]
    assert not list(small_disk.glob(".*.unfinished"))


# --- memory ---

LAYERS, MB = 12, 2**20
_MMAP_THRESHOLD_OPTION = -3  # M_MMAP_THRESHOLD of mallopt(3)


def memory_kilobytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


@contextmanager
def limited_memory(megabytes: int) -> Iterator[None]:
    """Make the kernel reject allocations that increase the private memory of this process by more than `megabytes`."""
    limit = memory_kilobytes("VmData") * 1024 + megabytes * MB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def build_large(backend: Backend) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with 4 * LAYERS MB of parameters, and an optimizer with twice as much sharded state."""
    # Each large tensor gets its own mapping, so that freed memory does not count.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD_OPTION, 2**16)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.Adam(model.parameters())
    backend.distributed_optimizer(optimizer, model, shard="state")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def checkpointer_for(backend: Backend, folder: str, checkpoint_format: Any) -> Checkpointer:
    config = TrainConfig(
        max_steps=1, shard="state", output_dir=folder, checkpoint_format=checkpoint_format, async_checkpoints=False
    )
    return Checkpointer(config, backend)


def create_contents(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointContents:
    training, manifest = {"scheduler": None}, {"step": step}
    return CheckpointContents(
        step=step, model=model, optimizer=optimizer, average=None, training=training, manifest=manifest
    )


def save_and_load_with_little_memory(backend: Backend, folder: str) -> None:
    model, optimizer = build_large(backend)
    checkpointer = checkpointer_for(backend, folder, "sharded")
    for step in (1, 2):  # the first checkpoint also imports modules
        with limited_memory(20 if step == 2 else 1000):
            checkpointer.save(create_contents(step, model, optimizer))
    expected = [value.double().sum().item() for entry in optimizer.state.values() for value in entry.values()]
    weights = [parameter.double().sum().item() for parameter in model.parameters()]
    optimizer.state.clear()
    nn.init.zeros_(model[0].weight)  # type: ignore[index, arg-type]
    path = Path(folder) / "step-000000002"
    with limited_memory(20):
        checkpointer.load(path, model, optimizer, None, required=True)
    with limited_memory(4 * LAYERS + 20):
        checkpointer.load_optimizer_state(path, optimizer)
    if backend.rank == 0:  # distributed_model broadcasts the weights to the other ranks
        assert [parameter.double().sum().item() for parameter in model.parameters()] == weights
    assert [value.double().sum().item() for entry in optimizer.state.values() for value in entry.values()] == expected
    assert sum(value.nbytes for entry in optimizer.state.values() for value in entry.values()) < 4.1 * LAYERS * MB


def gather_with_little_memory(backend: Backend, folder: str) -> None:
    model, optimizer = build_large(backend)
    checkpointer = checkpointer_for(backend, folder, "full")
    try:
        with limited_memory(20):
            checkpointer.save(create_contents(1, model, optimizer))
    except BaseException as error:
        backend.report_failure(error)
        raise


def test_no_rank_holds_more_than_its_shard_and_one_tensor(tmp_path: Path) -> None:
    """A tensor takes 4 MB, a shard of the state 48 MB and the complete state 96 MB. The limits allow copies of some
    tensors, but a checkpoint that gathers the state on rank 0 would exceed them."""
    for name in ("sharded", "full"):
        (tmp_path / name).mkdir()
    with RankGroup("ddp", 2, spawn=True) as group:
        group.run(save_and_load_with_little_memory, str(tmp_path / "sharded"), timeout_seconds=120)
        with pytest.raises(RankError, match=r"can't allocate memory|MemoryError"):
            group.run(gather_with_little_memory, str(tmp_path / "full"), timeout_seconds=120)

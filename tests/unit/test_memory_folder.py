"""The folder for checkpoints in memory is private and is always removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unitrain import TrainConfig
from unitrain.backends.local import LocalBackend
from unitrain.bootstrap import environment, memory_folder
from unitrain.bootstrap.memory_folder import MemoryFolder, remove_abandoned_folder
from unitrain.checkpoint.memory import MemoryCheckpoints
from unitrain.checkpoint.writer import CheckpointWriter
from unitrain.errors import CheckpointError
from unitrain.launchers import LaunchSpec
from unitrain.supervisor.attempt import SupervisedJob

HOLDER = """
import sys, time
from pathlib import Path
from unitrain.bootstrap.memory_folder import MemoryFolder
print(MemoryFolder(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_folder_is_private_and_removed_with_its_content(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    assert folder.path is not None
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "step-000000001").mkdir()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_killed_command_is_removed_by_its_ranks_or_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_folder, "_LOCK_RELEASE_SECONDS", 0.1)
    for removed_by in ("rank", "command"):
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            path = Path(holder.stdout.readline().strip())
            monkeypatch.setenv(environment.SHARED_MEMORY_FOLDER_VARIABLE, str(path))
            other = MemoryFolder(tmp_path)
            remove_abandoned_folder()
            assert path.is_dir()  # its command is still running
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        if removed_by == "rank":
            remove_abandoned_folder()
        else:
            MemoryFolder(tmp_path).close()
        assert list(tmp_path.iterdir()) == [other.path]
        other.close()


def test_abandoned_folder_that_another_command_removes_first_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = tmp_path / f"unitrain-{os.getuid()}-abandoned"
    abandoned.mkdir()
    is_dir = Path.is_dir

    def remove_after_check(path: Path) -> bool:
        found = is_dir(path)
        if path == abandoned and found:
            path.rmdir()
        return found

    monkeypatch.setattr(Path, "is_dir", remove_after_check)
    folder = MemoryFolder(tmp_path)
    assert folder.path is not None
    folder.close()


def test_folder_is_not_created_and_the_reason_is_logged_if_shared_memory_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor passes the reason to the ranks. Rank 0 logs the reason if the run uses checkpoints in memory."""
    folder = MemoryFolder(tmp_path / "missing")
    assert (folder.path, folder.error) == (None, "No such file or directory")
    folder.close()
    job = SupervisedJob("none", LaunchSpec(script="train.py", max_restarts=1), memory_error=folder.error)
    variables = job.build_command().environment
    assert environment.SHARED_MEMORY_FOLDER_VARIABLE not in variables
    name = environment.SHARED_MEMORY_ERROR_VARIABLE
    monkeypatch.setenv(name, variables[name])
    config = TrainConfig(max_epochs=1, output_dir=tmp_path / "run", memory_checkpoint_every_steps=1)
    for used in (replace(config, memory_checkpoint_every_steps=None), config):
        assert MemoryCheckpoints.create(used, LocalBackend(torch.device("cpu")), is_sharded=False) is None
    (message,) = caplog.messages
    assert message.startswith(
        "The run keeps no checkpoints in memory, because /dev/shm is not usable: No such file or directory. A restart "
    )
    assert message.endswith("or leave TrainConfig.memory_checkpoint_every_steps out.")


def test_unfinished_checkpoint_is_removed_after_a_failure(tmp_path: Path) -> None:
    memory = MemoryCheckpoints(tmp_path, LocalBackend(torch.device("cpu")), asynchronous=False)
    unfinished = tmp_path / ".step-000000002.unfinished"

    def fail(writer: CheckpointWriter) -> None:
        unfinished.mkdir()
        (unfinished / "model.safetensors").write_bytes(bytes(1000))
        raise CheckpointError("/dev/shm is full")

    (tmp_path / "step-000000001").mkdir()
    memory.call_with_writer(fail)
    assert not memory.is_enabled
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]

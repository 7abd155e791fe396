"""Only one job at a time can write to an output folder. A job that has ended does not block the next job."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import running_launcher
from torch import nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import files, folder_lock
from unitrain.checkpoint.folder_lock import FolderLock
from unitrain.errors import CheckpointError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))


def make_trainer(output: Path, *callbacks: Callback, backend: Backend = LOCAL, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    chosen = {"max_epochs": 2, "batch_size": 2, "shuffle": False, "progress": "off", **settings}
    config = TrainConfig(output_dir=output, **chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=callbacks)


def create_data() -> TensorDataset:
    return TensorDataset(torch.ones(8, 3), torch.ones(8, 1))


JOB = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import unitrain


class Waits(unitrain.Callback):
    def on_step_end(self, trainer):
        if trainer.progress.step == 6:
            trainer.checkpointer.wait()
            Path(sys.argv[1]).with_suffix(".waits").touch()
            time.sleep(120)


with unitrain.init(device="cpu") as backend:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = unitrain.TrainConfig(max_epochs=2, output_dir=sys.argv[1], progress="off", checkpoint_every_steps=1)
    data = DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), batch_size=2, num_workers=1)
    trainer = unitrain.Trainer(
        model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=[Waits()]
    )
    trainer.fit(data)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not exist"
        time.sleep(0.02)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_error_of_second_job_names_the_first_job_until_the_first_job_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "_OTHER_JOB_TIMEOUT_SECONDS", 0.3)
    run = tmp_path / "run"
    variables = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "4711"}
    with running_launcher([sys.executable, "-c", JOB, str(run)], variables) as first:
        wait_for(tmp_path / "run.waits")
        (run / ".step-000000099.unfinished").mkdir()  # simulates a checkpoint that is being written
        before = contents(run)
        second = make_trainer(run, resume=True)
        assert second.evaluate(create_data())["loss"] >= 0  # evaluation only reads
        found = (
            rf"^Output folder '{run}' is in use by another job: process {first.process.pid} on host \S+, started "
            rf"20\S+, Slurm job 4711\. Wait until .* another folder\. If .* with: rm '{run}/\.lock'"
        )
        with pytest.raises(CheckpointError, match=found):
            second.fit(create_data())
        assert contents(run) == before
        assert (run / ".step-000000099.unfinished").is_dir()
        # The workers of the killed process exit later, and must not hold the lock.
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(20)
        second.fit(create_data())
    assert second.progress.step == 8
    assert not (run / ".step-000000099.unfinished").exists()
    assert [json.loads(line)["step"] for line in (run / "history.jsonl").read_text().splitlines()] == [4, 8]
    assert not (run / ".lock").exists()


def test_lock_waits_for_an_earlier_attempt_of_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_lock, "_OTHER_JOB_TIMEOUT_SECONDS", 0.0)
    program = (
        "import sys; from pathlib import Path; from unitrain.checkpoint.folder_lock import FolderLock\n"
        "assert FolderLock(Path(sys.argv[1])).acquire(1); print('held', flush=True); sys.stdin.readline()"
    )
    environ = {**os.environ, "UNITRAIN_JOB": "abc"}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=r"in use by another job: process \d+ on host .*unitrain launch abc\."
        ):
            FolderLock(tmp_path).acquire(1)
        monkeypatch.setenv("UNITRAIN_JOB", "abc")
        lock = FolderLock(tmp_path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert not lock.acquire(0.2)
            holder.communicate("\n", timeout=30)
            assert lock.acquire(10)
        assert holder.returncode == 0
    assert len(caplog.messages) == 1  # one message for all attempts
    assert caplog.messages[0].startswith(f"Waiting for output folder '{tmp_path}', which process {holder.pid} on host")
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_lock_is_released_by_the_last_holder_and_not_by_forks(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path / ".." / tmp_path.name)
    assert first.acquire(0)
    assert first.acquire(0)
    assert second.acquire(0)
    second.release()
    second.release()
    first.release()
    child = os.fork()
    if not child:
        first.release()
        os._exit(0)
    os.waitpid(child, 0)
    program = (
        "import sys; from pathlib import Path; from unitrain.checkpoint.folder_lock import FolderLock\n"
        "print(FolderLock(Path(sys.argv[1])).acquire(0))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    taken = subprocess.run(command, capture_output=True, text=True, check=True)
    assert taken.stdout == "False\n"
    first.release()
    taken = subprocess.run(command, capture_output=True, text=True, check=True)
    assert taken.stdout == "True\n"
    assert first.acquire(0)  # the process has ended without releasing the lock
    first.release()


def test_file_system_without_locks_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path).fit(create_data())
    (message,) = caplog.messages
    assert message.startswith(f"The file system of output folder '{tmp_path}' does not support locks ([Errno 38]")


def test_lock_is_released_if_its_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("unitrain.checkpoint.folder_lock.os.pwrite", write)
        with pytest.raises(OSError, match="No space left"):
            FolderLock(tmp_path).acquire(0.0)
    lock = FolderLock(tmp_path)
    assert lock.acquire(0.0)
    lock.release()


@pytest.mark.parametrize("call", ["flock", "fstat"])
def test_lock_file_removed_by_another_host_is_created_again(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client returns ESTALE for an open file that another client has removed. Local file systems do not return
    ESTALE, so the test simulates it."""
    module = folder_lock.fcntl if call == "flock" else folder_lock.os
    original, removed = getattr(module, call), []

    def return_stale(descriptor: int, *arguments: int) -> Any:
        if not removed and Path(f"/proc/self/fd/{descriptor}").readlink().name == folder_lock.LOCK_FILE:
            (tmp_path / folder_lock.LOCK_FILE).unlink()
            removed.append(descriptor)
        if removed == [descriptor]:
            removed.append(-1)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return original(descriptor, *arguments)

    monkeypatch.setattr(module, call, return_stale)
    lock = FolderLock(tmp_path)
    assert lock.acquire(0)
    assert removed
    assert json.loads((tmp_path / folder_lock.LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_run_starts_if_a_killed_process_with_the_same_id_left_its_probe_file(tmp_path: Path) -> None:
    probe = tmp_path / f".probe-{os.getpid()}.unfinished"
    probe.mkdir()
    make_trainer(tmp_path)
    assert not probe.exists()


def test_only_folders_of_the_writer_are_removed(tmp_path: Path) -> None:
    users = [".mine.unfinished", ".step-1.unfinished", ".step-000000001x.unfinished", "step-000000004.old"]
    ours = [".step-000000009.unfinished", ".step-000000009.replaced.unfinished", ".probe-77.unfinished"]
    for name in [*users, *ours]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("kept")
    make_trainer(tmp_path, keep_last=1).fit(create_data())
    shutil.copytree(tmp_path / "step-000000008", tmp_path / "step-000000007.copy")
    make_trainer(tmp_path, keep_last=1, max_epochs=3, resume=True).fit(create_data())
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        *users, "step-000000007.copy", "step-000000012"
    }  # fmt: skip


def test_new_trainer_waits_for_the_writer_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an exception, `fit` does not wait for the checkpoint that is being written."""
    write = files.write
    entered, released = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        entered.set()
        released.wait(60)
        write(*arguments)

    class Fails(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 5:
                raise ValueError("stopped by the test")

    monkeypatch.setattr(files, "write", slow)
    with pytest.raises(Exception, match="stopped by the test"):
        make_trainer(tmp_path, Fails()).fit(create_data())
    assert entered.wait(60)
    assert list(tmp_path.glob("step-*")) == []
    threading.Timer(1.0, released.set).start()
    again = make_trainer(tmp_path, resume=True)
    assert again.progress.step == 4
    again.fit(create_data())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000004", "step-000000008"]
    assert not (tmp_path / ".lock").exists()


def test_a_checkpoint_that_another_process_wrote_before_the_lock_is_not_missed(tmp_path: Path) -> None:
    """The run chooses its checkpoint when the Trainer is created, and locks the folder in `fit`."""
    make_trainer(tmp_path, max_epochs=1).fit(create_data())
    first, second = (make_trainer(tmp_path, max_epochs=epochs, resume=True) for epochs in (2, 3))
    first.fit(create_data())
    first.fit(create_data())  # its own checkpoints are known
    found = rf"Another process wrote checkpoint '{tmp_path}/step-000000008' .* with TrainConfig\(resume=True\)"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=found):
            second.fit(create_data())
    assert not (tmp_path / ".lock").exists()
    history = (tmp_path / "history.jsonl").read_text()
    assert [json.loads(line)["step"] for line in history.splitlines()] == [4, 8]
    third = make_trainer(tmp_path, max_epochs=3, resume=True)
    third.fit(create_data())
    assert third.progress.step == 12
    with pytest.raises(CheckpointError, match="step-000000012"):
        first.fit(create_data())  # between two calls of `fit`, the folder is not locked


def test_a_checkpoint_that_another_process_replaced_before_the_lock_is_not_missed(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=1).fit(create_data())
    second = make_trainer(tmp_path, resume=True)
    manifest = tmp_path / "step-000000004" / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text)
    with pytest.raises(CheckpointError, match="Another process wrote checkpoint"):
        second.fit(create_data())
    new = tmp_path / "new"
    second = make_trainer(new)
    make_trainer(new, max_epochs=1).fit(create_data())
    with pytest.raises(CheckpointError, match="Another process wrote checkpoint"):
        second.fit(create_data())


def fit_in_a_locked_folder(backend: Backend, folder: str) -> str:
    try:
        make_trainer(Path(folder), backend=backend).fit(create_data())
    except CheckpointError as error:
        return str(error)
    return "no error was raised"


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_locked_folder_raises_on_every_rank_after_the_collective_timeout(tmp_path: Path, backend: str) -> None:
    lock = FolderLock(tmp_path)
    assert lock.acquire(0)
    try:
        with RankGroup(backend, 2, backend_timeout_seconds=4) as group:  # shorter than the wait for the lock
            first, second = group.run(fit_in_a_locked_folder, str(tmp_path), timeout_seconds=60)
    finally:
        lock.release()
    assert first == second
    assert f"in use by another job: process {os.getpid()} on host" in first


def test_symbolic_link_as_lock_raises_and_keeps_its_target(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not of this job")
    output = tmp_path / "run"
    output.mkdir()
    (output / ".lock").symlink_to(other)
    with pytest.raises(CheckpointError, match=r"is a symbolic link.*rm '.*/run/\.lock'"):
        make_trainer(output).fit(create_data())
    assert other.read_text() == "not of this job"

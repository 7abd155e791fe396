"""Flight recorder files of a timeout or a failure can be read by torch's analyzer."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import ci
from launches import running_ranks
from preload import preloaded
from torch import nn

from unitrain.backends.base import Backend
from unitrain.bootstrap import environment
from unitrain.errors import CollectiveTimeoutError
from unitrain.monitoring import flight_record_file
from unitrain.monitoring.flight_record_file import write_flight_record
from unitrain.monitoring.flight_recorder import CollectiveCall, FlightRecorder, GradientPhase
from unitrain.testing import RankGroup


def miss_a_collective(backend: Backend, folder: str) -> str:
    """Train a step. Then call an allreduce on rank 0 that rank 1 misses."""
    model = backend.distributed_model(nn.Linear(3, 2))
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    backend.allgather(torch.ones(2 + backend.rank, 5))  # the first dimension may differ between ranks
    backend.broadcast_object({"rank": backend.rank} if backend.rank == 0 else None)
    if backend.rank == 1:
        while not Path(folder, "done").exists():
            time.sleep(0.2)
        return ""
    with pytest.raises(CollectiveTimeoutError) as caught:
        backend.allreduce(torch.ones(7))
    Path(folder, "done").touch()
    return str(caught.value)


def analyze(folder: Path) -> str:
    """Return the output of torch's analyzer."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["ddp", *ci("horovod")])
def test_analyzer_names_the_rank_that_missed_a_collective(backend: str, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    variables = preloaded({environment.FLIGHT_RECORD_FOLDER_VARIABLE: str(folder)})
    with RankGroup(backend, 2, backend_timeout_seconds=10.0, variables=variables) as group:
        results = group.run(miss_a_collective, str(tmp_path), timeout_seconds=240)
    assert "Missing ranks: 1" in results[0]
    assert sorted(path.name for path in folder.iterdir()) == ["flight_record_rank_0", "flight_record_rank_1"]
    shown = analyze(folder)
    assert "Not all ranks joining collective" in shown
    assert "collective: gloo:all_reduce\nmissing ranks: {1}" in shown
    assert "MISMATCH" not in shown
    entries = pickle.loads((folder / "flight_record_rank_0").read_bytes())["entries"]
    assert entries[-1]["state"] == "started"
    assert entries[-1]["input_sizes"] == [[7]]
    assert entries[-1]["frames"][0]["filename"] == __file__
    assert {entry["state"] for entry in entries[:-1]} == {"completed"}


FAILING_PROGRAM = """\
import os, sys
import torch
import unitrain

with unitrain.init(device="cpu", timeout_seconds=60) as backend:
    backend.allreduce(torch.ones(2))
    if backend.rank == 1 and sys.argv[1] == "is killed":
        os.kill(os.getpid(), 9)
    if backend.rank == 1:
        raise ValueError("item 31 is broken")
    backend.barrier()
"""


@pytest.mark.parametrize(("fault", "ranks"), [("raises", [0, 1]), pytest.param("is killed", [0], marks=pytest.mark.ci)])
def test_failing_and_reporting_ranks_write_their_records(
    fault: str, ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, script = tmp_path / "records", tmp_path / "train.py"
    monkeypatch.setenv(environment.FLIGHT_RECORD_FOLDER_VARIABLE, str(folder))
    script.write_text(FAILING_PROGRAM)
    with running_ranks(script, "ddp", 2, fault) as processes:
        output = "\n".join(process.communicate(timeout=100)[0] for process in processes)
    assert "rank 1 failed first" in output, output
    assert sorted(path.name for path in folder.iterdir()) == [f"flight_record_rank_{rank}" for rank in ranks]
    for path in folder.iterdir():
        names = [entry["frames"][0]["name"] for entry in pickle.loads(path.read_bytes())["entries"]]
        assert any(name.startswith("allreduce(float32 [2]") for name in names), names


def test_analyzer_names_ranks_with_different_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.FLIGHT_RECORD_FOLDER_VARIABLE, str(tmp_path))
    for rank in range(2):
        recorder = FlightRecorder()
        recorder.record(GradientPhase("backward", 1))
        recorder.begin_wait()
        recorder.record(CollectiveCall(1, ("allreduce", "broadcast")[rank], dtype=torch.float32, shape=(2,)))
        write_flight_record(recorder, rank, 2)
    shown = analyze(tmp_path)
    assert "COLLECTIVE_TYPE_MISMATCH" in shown
    assert (
        "broadcast(float32 [2]) (collective #1) at " in shown or "allreduce(float32 [2]) (collective #1) at " in shown
    )


def test_flight_records_are_not_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.FLIGHT_RECORD_FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_flight_record(FlightRecorder(), 0, 2)
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_reported_without_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(environment.FLIGHT_RECORD_FOLDER_VARIABLE, str(tmp_path / "file" / "below"))
    write_flight_record(FlightRecorder(), 0, 2)
    assert "The flight record of rank 0 cannot be written to" in caplog.text


def test_threads_may_write_the_record_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a timeout, the watchdog thread responds to other ranks while the main thread raises an error. Both write
    the record."""
    monkeypatch.setenv(environment.FLIGHT_RECORD_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(flight_record_file, "_WRITE_SECONDS", 60.0)  # a slow disk must not cause warnings
    recorder = FlightRecorder()
    for number in range(256):
        recorder.record(GradientPhase("backward", number))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: write_flight_record(recorder, 0, 2), range(100)))
    assert caplog.text == ""
    (path,) = tmp_path.iterdir()
    assert len(pickle.loads(path.read_bytes())["entries"]) == 256


def test_a_file_system_that_does_not_respond_delays_a_failure_by_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(environment.FLIGHT_RECORD_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(flight_record_file, "_WRITE_SECONDS", 0.2)
    may_respond, dump = threading.Event(), pickle.dump

    def dump_later(content: object, file: Any) -> None:
        may_respond.wait(20)
        dump(content, file)

    monkeypatch.setattr(pickle, "dump", dump_later)
    began = time.monotonic()
    for _ in range(2):
        write_flight_record(FlightRecorder(), 0, 2)
    assert time.monotonic() - began < 10
    assert caplog.messages == [
        f"The flight record of rank 0 is not complete after 0.2 s: the file system of '{tmp_path}' does not respond."
    ]
    may_respond.set()
    for thread in flight_record_file._late_writers:
        thread.join(30)
    monkeypatch.setattr(flight_record_file, "_WRITE_SECONDS", 30.0)
    write_flight_record(FlightRecorder(), 1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight_record_rank_0", "flight_record_rank_1"]

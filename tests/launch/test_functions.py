"""`unitrain.run`: functions on several ranks, called in a notebook and in a program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest
from fake_programs import write_program
from launches import running_launcher
from nbclient import NotebookClient
from preload import preloaded

import unitrain
from unitrain.errors import ConfigError, FunctionError
from unitrain.functions.call import CallOutcome

SETUP = """
import torch
import unitrain

GREETING = "hello from the notebook"

def train(steps, factor=1.0):
    backend = unitrain.init(device="cpu")
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    model = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1 * factor), model)
    for _ in range(steps):
        model(torch.full((1, 2), float(backend.rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(GREETING, backend.rank, flush=True)
    name, rank, weight = backend.name, backend.rank, backend.unwrap(model).weight.detach()
    backend.shutdown()
    return name, rank, weight

class Broken(Exception):
    pass

def fail():
    with unitrain.init(device="cpu") as backend:
        if backend.rank == 1:
            raise Broken("item 31")  # the line to see
        backend.barrier()
"""
CALLS = [
    """
for backend in ("ddp", "horovod"):
    results = unitrain.run(train, (3,), {"factor": 2.0}, np=2, backend=backend)
    for rank, (name, own, weight) in enumerate(results):
        assert (name, own) == (backend, rank)
        torch.testing.assert_close(weight, torch.full((1, 2), 0.5 - 3 * 0.2 * 0.5))
print("both agree")
""",
    """
from unitrain.errors import RankFailedError
try:
    unitrain.run(fail, np=2, backend="ddp")
except RankFailedError as error:
    assert error.rank == 1 and type(error.__cause__) is Broken, (error.rank, error.__cause__)
    print("caught:", error)
""",
]


def test_functions_defined_in_a_notebook_run_on_ranks() -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, *CALLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(env=preloaded(os.environ))
    first, second = (
        "".join(output.text for output in cell.outputs if output.output_type == "stream") for cell in notebook.cells[1:]
    )
    assert first.count("hello from the notebook 0") == first.count("hello from the notebook 1") == 2
    assert "both agree" in first
    message = second[second.index("caught: ") :]
    assert message.startswith("caught: Rank 1 of 2 failed first:\n\nTraceback")
    # The traceback contains the line of the notebook cell, but not lines of unitrain.
    assert 'raise Broken("item 31")  # the line to see' in message
    assert "unitrain/functions" not in message


def test_program_without_a_main_guard_does_not_leave_processes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            import unitrain

            def run_rank(case):
                if case == "is killed" and os.environ["RANK"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                if case != "returns":
                    print("working", flush=True)
                    time.sleep(300)
                return os.environ["RANK"], case

            print(unitrain.run(run_rank, ("returns",), np=2))
            try:
                unitrain.run(run_rank, ("is killed",), np=2)
            except unitrain.UnitrainError as error:
                print(type(error).__name__, str(error).splitlines()[0])
            try:
                unitrain.run(run_rank, ("takes long",), np=1, timeout_seconds=4)
            except TimeoutError as error:
                print(error)
            unitrain.run(run_rank, ("goes on",), np=2)
            """
        )
    )
    with running_launcher([sys.executable, str(program)]) as launch:
        assert launch.process.stdout is not None
        lines = []
        while not (lines and lines[-1] == "working" and any("did not return within" in line for line in lines)):
            line = launch.process.stdout.readline()
            assert line, lines  # the program must not have exited
            lines.append(line.rstrip())
        assert "[('0', 'returns'), ('1', 'returns')]" in lines
        assert any(line.startswith("RankFailedError Ranks [0, 1] of 2 ended without a result") for line in lines)
        assert "The ranks did not return within 4 s and were killed. Raise the limit with timeout_seconds." in lines
        launch.process.kill()  # like a notebook kernel that is killed
        launch.wait_until_all_exited(60)  # torchrun waits for its ranks for up to 30 s


DAEMONS = """
import os, subprocess, sys, time
import unitrain

def leave_daemons(launcher):
    for variables in (None, {}):  # the environment of the second daemon does not identify the job
        daemon = subprocess.Popen(["sleep", "120"], env=variables, start_new_session=True)
        print(daemon.pid, flush=True)
    sys.stdout.write("without an end of line")
    sys.stdout.flush()
    return launcher

for launcher in ("none", "torchrun"):
    began = time.monotonic()
    print([unitrain.run(leave_daemons, (launcher,), np=1, backend="local", launcher=launcher)], flush=True)
    assert time.monotonic() - began < 90
"""


def test_run_does_not_wait_for_daemons_that_a_rank_has_started() -> None:
    """The daemons keep the output pipe of the rank open."""
    with running_launcher([sys.executable, "-c", DAEMONS]) as launch:
        output = launch.output()
        assert launch.process.returncode == 0, output
        pids = [int(pid) for pid in re.findall(r"^(\d+)$", output, re.MULTILINE)]
        for pid in pids[1::2]:
            os.kill(pid, signal.SIGKILL)
        launch.wait_until_all_exited(15)
    assert len(pids) == 4, output
    for launcher in ("none", "torchrun"):
        assert f"without an end of line[['{launcher}']]" in output


def test_unpicklable_arguments_are_rejected_before_ranks_start() -> None:
    lock = threading.Lock()
    with pytest.raises(
        FunctionError, match=r"^<lambda> or its arguments cannot be sent .*lock.* Inside <lambda>, create"
    ):
        unitrain.run(lambda: lock.acquire(), np=2)
    with pytest.raises(unitrain.UnitrainError, match=r"Unknown backend 'dpp'. Did you mean 'ddp'"):
        unitrain.run(print, np=2, backend="dpp")
    with pytest.raises(ConfigError, match=r"^unitrain\.run\(np=...\) must be at least 1, got 0\. Use np=2"):
        unitrain.run(print, np=0)


def report_devices() -> tuple[str, str | None]:
    """Return the rank of this process and the value of CUDA_VISIBLE_DEVICES."""
    rank = os.environ.get("RANK") or os.environ["HOROVOD_RANK"]
    return rank, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("gpus", "arguments", "visible"),
    [
        (4, {"devices": 2}, "0,1"),
        (4, {"devices": [1, 3], "backend": "horovod"}, "1,3"),
        (4, {"devices": 0, "np": 2}, ""),
        (0, {"devices": "2"}, None),
        (2, {"devices": "-1"}, "0,1"),
    ],
)
def test_devices_argument_sets_the_ranks_and_cuda_visible_devices(
    gpus: int, arguments: dict[str, Any], visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\n".join(f"echo 'GPU {index}: NVIDIA H100'" for index in range(gpus))
    write_program(tmp_path, "nvidia-smi", lines)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in preloaded(os.environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert unitrain.run(report_devices, **arguments) == [("0", visible), ("1", visible)]


def test_contradictory_or_missing_numbers_of_ranks_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"^unitrain\.run starts np ranks, but neither np nor devices is set\. Use np"
    ):
        unitrain.run(print)
    with pytest.raises(
        ConfigError, match=r"^devices=2 starts one rank per device \(2\), but np=3 requests 3\. Use np=2,"
    ):
        unitrain.run(print, np=3, devices=2)
    with pytest.raises(
        ConfigError, match=r"^unitrain\.run\(devices=\.\.\.\) takes a number of devices, .* got 'two'\. Us"
    ):
        unitrain.run(print, devices="two")


def test_missing_and_repeated_devices_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path, "nvidia-smi", "\n".join(f"echo 'GPU {index}: NVIDIA H100'" for index in range(4)))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for devices, message in (
        ([1, 4], r"^devices=\[1, 4\] selects GPU 4, but this host has 4 GPUs, with indices 0 to 3\. Use devices=-1 "),
        (5, r"^devices=5 selects 5 GPUs, but this host has 4 GPUs, with indices 0 to 3\. Use devices=-1 "),
        ("1,3,1", r"^devices=\[1, 3, 1\] selects GPU 1 twice, .* Use devices=\[1, 3\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            unitrain.run(print, devices=devices)


def test_run_inside_a_rank_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^unitrain\.run starts ranks, but torchrun has already started this"):
        unitrain.run(print, np=2)


def test_import_of_unitrain_does_not_import_torch() -> None:
    program = "import sys, unitrain; unitrain.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


class TwoArgumentsError(Exception):
    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")


def test_exception_that_cannot_be_unpickled_keeps_its_text_traceback_and_time(tmp_path: Path) -> None:
    try:
        raise TwoArgumentsError("item", 31)
    except TwoArgumentsError as error:
        outcome = CallOutcome.from_error(error)
    outcome.write(tmp_path, 1)
    (found,) = CallOutcome.load_all(tmp_path, 2).values()
    assert repr(found.error) == "RuntimeError(\"TwoArgumentsError('item 31')\")"
    assert 'raise TwoArgumentsError("item", 31)' in found.traceback
    assert found.time == outcome.time

"""Watchdog: if one rank fails, all ranks end within seconds, and one report shows the status of each rank."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from groups import ci, nightly
from launches import running_launcher, running_ranks

import unitrain
from unitrain.monitoring.flight_recorder import CollectiveCall, FlightRecorder
from unitrain.monitoring.rank_status import Activity, RankStatus, format_ranks, format_statuses
from unitrain.monitoring.stack_inspection import call_site

PROGRAM = """\
import contextlib, os, sys, time
import torch
from torch import nn
import unitrain

FAULT = sys.argv[1]

class EarlyReturn(Exception):
    pass

class UnprintableError(RuntimeError):
    def __str__(self):
        raise ValueError("cannot be shown")

class Items:
    def __init__(self, rank):
        self.rank = rank
    def __getitem__(self, index):
        if self.rank == 1 and index > 30:
            wait_for_rank_2(); time.sleep(0.5); print("fault", time.time(), flush=True)
            if FAULT == "raises":
                raise ValueError("item 31 is broken")
            if FAULT == "raises without text":
                raise UnprintableError
            if FAULT == "is killed":
                os.kill(os.getpid(), 9)
            if FAULT == "exits":
                sys.exit("enough of this")
            if FAULT.startswith("exits with 0"):
                sys.exit(0)
            if FAULT == "returns":
                raise EarlyReturn
            if FAULT == "is interrupted":
                raise KeyboardInterrupt
            if FAULT == "is stopped":
                os.kill(os.getpid(), 19)
            time.sleep(300)
        return torch.ones(3), torch.ones(1)

def busy(seconds):
    time.sleep(seconds)

def own_loop(backend):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = backend.distributed_model(model)
    items = Items(backend.rank)
    for number in range(60):
        if number > 30 and backend.rank == 2:
            open(f"{__file__}.busy", "w").close(); busy(300)
        inputs, targets = items[number]
        nn.functional.mse_loss(model(inputs), targets).backward()

def wait_for_rank_2():
    deadline = time.monotonic() + 30
    while os.environ["WORLD_SIZE"] == "3" and not os.path.exists(f"{__file__}.busy") and time.monotonic() < deadline:
        time.sleep(0.02)

if FAULT.endswith("outside of the block"):
    own_loop(unitrain.init(device="cpu", timeout_seconds=float(sys.argv[2])))
with unitrain.init(device="cpu", timeout_seconds=float(sys.argv[2])) as backend:
    with contextlib.suppress(EarlyReturn):
        own_loop(backend)
"""


LAST = "last operation: backward #30, at train.py:52: nn.functional.mse_loss(model(inputs), targets).backward()"
SHUT_DOWN = "unitrain: rank 1 failed first: it shut down while other ranks still waited for it: "
# The text of the report about rank 1, and the timeout of collectives in seconds.
FAULTS = {
    "raises without text": ("unitrain: rank 1 failed first: UnprintableError", 60.0),
    "raises": ("unitrain: rank 1 failed first: ValueError: item 31 is broken", 60.0),
    "exits": ("unitrain: rank 1 failed first: SystemExit: enough of this", 60.0),
    "is killed": ("unitrain: rank 1 failed first: its process was killed or crashed", 60.0),
    "returns": (f"{SHUT_DOWN}it called shutdown() or left its `with unitrain.init()` block; {LAST}", 60.0),
    "exits with 0": (f"{SHUT_DOWN}it called shutdown() or left its `with unitrain.init()` block; {LAST}", 60.0),
    "exits with 0 outside of the block": (f"{SHUT_DOWN}its process exited; {LAST}", 60.0),
    "is interrupted": ("unitrain: rank 1 failed first: KeyboardInterrupt", 60.0),
    "is stopped": (
        "unitrain: rank 1 failed first: it did not join backward #31 of rank 0 in time, and does not respond",
        6.0,
    ),
    "hangs": (f"\n  rank 1: at train.py:37: time.sleep(300); {LAST}", 6.0),
}

SIMILAR = ("exits", "exits with 0", "exits with 0 outside of the block", "is interrupted")


@pytest.mark.parametrize(
    "fault",
    [
        *(fault for fault in FAULTS if fault not in (*SIMILAR, "raises without text")),
        *ci("raises without text"),
        *nightly(*SIMILAR),
    ],
)
@pytest.mark.parametrize("backend", ["ddp", *ci("horovod")])
def test_a_fault_ends_all_ranks_and_is_reported_once(backend: str, fault: str, tmp_path: Path) -> None:
    report, timeout = FAULTS[fault]
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with running_ranks(script, backend, 3, fault, str(timeout)) as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
        ended = time.time()
    together = "\n".join(outputs)
    succeeds = report.startswith(SHUT_DOWN)
    assert [process.returncode == 0 for process in processes] == [False, succeeds, False], together
    assert together.count(report) == 1, together
    assert "rank 0 failed first" not in together, together
    # The report also includes ranks that neither wait nor are waited for.
    assert f"  rank 2: at train.py:41: time.sleep(seconds); {LAST}" in together, together
    (began,) = re.findall(r"fault (\S+)", together)
    assert ended - float(began) < (timeout if timeout < 60 else 0) + 40, together
    assert together.count("Traceback (most recent call last)") <= 2, together  # including a chained exception


FAILED_WRITER = """\
import unitrain
from unitrain.backends.synchronized_errors import call_on_all_ranks

with unitrain.init(device="cpu", timeout_seconds=60) as backend:
    def write():
        if backend.rank == 2:
            raise unitrain.CheckpointError("the disk is full")
    call_on_all_ranks(backend, write)
"""


def test_error_that_all_ranks_raise_is_reported_for_the_rank_with_its_cause(tmp_path: Path) -> None:
    """The report must be correct, because a launcher excludes the host of the rank that failed first."""
    script = tmp_path / "train.py"
    script.write_text(FAILED_WRITER)
    with running_ranks(script, "ddp", 3) as processes:
        together = "\n".join(process.communicate(timeout=100)[0] for process in processes)
    # One rank prints the report. Each other rank prints one line, which may also name the first failure.
    assert together.count("rank 2 failed first: CheckpointError: the disk is full (of 3 ranks)") == 1, together
    assert not re.search(r"rank [01] failed first", together), together


KILLED = """\
import os, time, unitrain

with unitrain.init(device="cpu", timeout_seconds=60) as backend:
    backend.barrier()
    open(f"{__file__}.{backend.rank}", "w").close()
    if backend.rank == 0:
        deadline = time.monotonic() + 30  # wait until all ranks have left the barrier
        while not all(os.path.exists(f"{__file__}.{rank}") for rank in (1, 2)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if os.fork() == 0:  # like a worker that outlives its parent and holds its connections
            os.close(1)
            os.close(2)
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), 9)
    try:
        time.sleep(300)
    finally:
        os.abort()
"""


def test_killed_rank_is_detected_within_seconds(tmp_path: Path) -> None:
    """The process of rank 0, which serves the store, is killed. The ranks have no launcher, and do not wait for rank
    0."""
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    with running_ranks(script, "ddp", 3) as processes:
        processes[0].wait(60)
        began = time.monotonic()
        outputs = [process.communicate(timeout=60)[0] for process in processes[1:]]
        seconds = time.monotonic() - began
    for rank, output in enumerate(outputs, start=1):
        assert processes[rank].returncode == 1, output
        reason = "rank 0 failed first: its process was killed or crashed"
        status = "at train.py:17: time.sleep(300); last operation: barrier() (collective #0)"
        assert f"unitrain: ending rank {rank} of 3 because {reason}; status: {status}" in output, output
    assert seconds < 30


STUCK = """\
import sys, time
from datetime import timedelta
import torch
from torch.distributed.distributed_c10d import _get_default_group
import unitrain
from unitrain.testing.models import batch, build, compute_loss

with unitrain.init(device="cpu", timeout_seconds=6) as backend:
    model = backend.distributed_model(build())
    for number in range(3):
        if number == 2:
            _get_default_group()._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=300))
            if backend.rank == 1:
                time.sleep(300)
        compute_loss(model(batch(backend.rank))).backward()
"""


def test_the_watchdog_ends_a_backward_that_the_transport_does_not_end(tmp_path: Path) -> None:
    """With NCCL, an exception cannot end the wait. The test simulates this with a much longer timeout for Gloo."""
    script = tmp_path / "train.py"
    script.write_text(STUCK)
    began = time.monotonic()
    with running_ranks(script, "ddp", 3) as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1]
    for rank in (0, 2):
        expected_text = f"unitrain: backward #2 timed out after 6 s on rank {rank}. Missing ranks: 1. "
        assert expected_text in outputs[rank], outputs[rank]
        assert (
            "\n  rank 1: at train.py:14: time.sleep(300); last operation: backward #1, at train.py:15: compute_loss"
            in outputs[rank]
        )
    assert time.monotonic() - began < 100


def test_the_launcher_shows_the_first_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "unitrain", "launch", "--backend", "ddp", "-np", "3", str(script), "raises", "60"]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
        launch.wait_until_all_exited(10)
    assert launch.process.returncode == 1
    summary = output.split("Root Cause (first observed failure):")[1]
    assert "rank      : 1 " in summary
    assert "traceback : rank 1 of 3 ended with ValueError: item 31 is broken, at " in summary
    assert output.count("Traceback (most recent call last)") == 1, output


LAUNCHED = """\
import os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

FAULT = sys.argv[1]

class Fault(unitrain.Callback):
    def on_step_end(self, trainer):
        if trainer.backend.rank == 1 and trainer.progress.step == 3:
            if FAULT == "exits with 3":
                sys.exit(3)
            if FAULT == "is killed":
                os.kill(os.getpid(), 9)

def train(backend):
    if FAULT == "returns" and backend.rank == 1:
        return
    model = nn.Linear(3, 1)
    factor = float("nan") if FAULT == "has a loss of NaN" and backend.rank == 1 else 1.0
    config = unitrain.TrainConfig(max_epochs=1000, batch_size=2, progress="off")
    trainer = unitrain.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda output, target: output.mean() * factor,
        backend=backend, config=config, callbacks=[Fault()],
    )
    trainer.fit(TensorDataset(torch.ones(64, 3), torch.ones(64, 1)))

with unitrain.init(device="cpu", timeout_seconds=60) as backend:
    train(backend)
"""
# The expected text, and the maximum number of lines that the ranks print before torchrun's summary.
LAUNCHED_FAULTS = {
    "exits with 3": ("unitrain: rank 1 failed first: SystemExit: 3", 15),
    "is killed": ("Signal 9 (SIGKILL) received", 15),
    "returns": (f"{SHUT_DOWN}it called shutdown() or left its `with unitrain.init()` block", 15),
    "has a loss of NaN": ("The mean loss became nan on rank 1", 30),
}


@pytest.mark.parametrize("backend", ["ddp", *ci("horovod")])
@pytest.mark.parametrize("fault", ["is killed", "returns", *nightly("exits with 3", "has a loss of NaN")])
def test_a_launch_of_torchrun_with_a_failed_rank_prints_few_lines(fault: str, backend: str, tmp_path: Path) -> None:
    text, max_lines = LAUNCHED_FAULTS[fault]
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    options = ["--backend", backend, "--launcher", "torchrun", "-np", "4"]
    command = [sys.executable, "-m", "unitrain", "launch", *options, str(script), fault]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
        launch.wait_until_all_exited(10)
    assert launch.process.returncode == 1, output
    # torchrun may terminate the reporting rank before the report is complete. In this case, the failed rank is named by
    # the rank whose connection to the failed rank was closed.
    assert text.removeprefix("unitrain: ") in output, output
    of_ranks, summary = output.split("=" * 60, 1)
    num_tracebacks = 1 if fault == "has a loss of NaN" else 0
    assert output.count("Traceback (most recent call last)") == num_tracebacks, output
    assert len(of_ranks.splitlines()) <= max_lines, output
    assert len(summary.splitlines()) <= 12 + 6 * 4, output  # six lines per rank


# The expected text, and the maximum number of lines.
FAULTS_UNDER_HOROVODRUN = {
    "exits with 3": ("rank 1 failed first: SystemExit: 3", 20),
    "is killed": ("Process name: 1\nExit code: 137", 20),
    "returns": (LAUNCHED_FAULTS["returns"][0], 20),
    "has a loss of NaN": ("The mean loss became nan on rank 1", 40),
}


@pytest.mark.parametrize("fault", ["is killed", *ci("returns"), *nightly("exits with 3", "has a loss of NaN")])
def test_a_launch_of_horovodrun_with_a_failed_rank_prints_few_lines(fault: str, tmp_path: Path) -> None:
    text, max_lines = FAULTS_UNDER_HOROVODRUN[fault]
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    options = ["--backend", "horovod", "--launcher", "horovodrun", "-np", "4"]
    command = [sys.executable, "-m", "unitrain", "launch", *options, str(script), fault]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
        launch.wait_until_all_exited(10)
    assert launch.process.returncode == 1, output
    assert text.removeprefix("unitrain: ") in output, output  # horovodrun may also terminate the reporting rank
    num_tracebacks = 1 if fault == "has a loss of NaN" else 0
    assert output.count("Traceback (most recent call last)") == num_tracebacks, output
    assert len(output.splitlines()) <= max_lines, output


@pytest.mark.ci
def test_a_stopped_process_does_not_delay_the_launcher(tmp_path: Path) -> None:
    """SIGTERM does not end a stopped process, and torchrun waits 30 seconds before it sends SIGKILL."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "unitrain", "launch", "--backend", "ddp", "-np", "2", str(script), "is stopped"]
    with running_launcher([*command, "6"], {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
        ended = time.time()
    (began,) = re.findall(r"fault (\S+)", output)
    assert ended - float(began) < 6 + 28, output
    assert "unitrain: rank 1 failed first: it did not join backward #31 of rank 0 in time" in output, output


STOPPED = """\
import os, sys, time, torch, unitrain

with unitrain.init(device="cpu", timeout_seconds=6) as backend:
    for number in range(8):
        if backend.rank == 0 and number == 5:
            os.kill(os.getpid(), 19)
        backend.allreduce(torch.ones(3))
"""


@pytest.mark.parametrize("backend", [*ci("ddp"), *nightly("horovod")])
def test_stopped_rank_0_ends_the_other_ranks(backend: str, tmp_path: Path) -> None:
    """The stopped process of rank 0 serves the store, so the store does not respond."""
    script = tmp_path / "train.py"
    script.write_text(STOPPED)
    with running_ranks(script, backend, 3) as processes:
        outputs = [process.communicate(timeout=70)[0] for process in processes[1:]]
    assert [process.returncode for process in processes[1:]] == [1, 1], outputs
    for output in outputs:
        assert "unitrain: rank 0 failed first: it does not respond: its process is stopped" in output, output
        assert "Missing ranks: 0, which does not respond" in output, output


@pytest.mark.parametrize(("ranks", "named"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")])
def test_consecutive_ranks_are_shown_as_ranges(ranks: list[int], named: str) -> None:
    assert format_ranks(ranks) == named


def test_the_status_shows_the_position_of_the_main_thread() -> None:
    found: list[RankStatus] = []
    flight_recorder = FlightRecorder()
    flight_recorder.record(CollectiveCall(3, "barrier"))

    def main_thread_codes() -> set[CodeType]:
        codes, frame = set(), sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            codes.add(frame.f_code)
            frame = frame.f_back
        return codes

    def inspect(expected_codes: set[CodeType], *, is_waiting: bool) -> None:
        deadline = time.monotonic() + 30
        while not expected_codes <= main_thread_codes() and time.monotonic() < deadline:
            time.sleep(0.01)
        if is_waiting:
            flight_recorder.begin_wait()
        found.append(RankStatus.from_main_thread(flight_recorder))

    for body, is_waiting in (
        (lambda: time.sleep(1), False),
        (lambda: threading.Event().wait(1), False),
        (lambda: time.sleep(1), True),
    ):
        expected_codes = {body.__code__, *([threading.Event.wait.__code__] if len(found) == 1 else [])}
        thread = threading.Thread(target=inspect, args=(expected_codes,), kwargs={"is_waiting": is_waiting})
        thread.start()
        while thread.is_alive():
            body()
    last = r"last operation: barrier\(\) \(collective #3\), at test_watchdog.py:\d+: .*"
    assert re.fullmatch(rf"at test_watchdog.py:\d+: .*time.sleep\(1\).*; {last}", str(found[0]))
    assert re.fullmatch(rf"in Event.wait, at test_watchdog.py:\d+: .*Event\(\)\.wait\(1\).*; {last}", str(found[1]))
    waiting = r"waiting for other ranks in barrier\(\) \(collective #3\), at test_watchdog.py:\d+: .*"
    assert re.fullmatch(waiting, str(found[2]))
    assert [status.may_wait_for_ranks for status in found] == [False, False, True]
    assert [RankStatus.from_json(status.to_json()) for status in found] == found
    assert re.fullmatch(r"test_watchdog.py:\d+: assert re.fullmatch.*call_site.*", call_site(sys._getframe()))


@pytest.mark.parametrize("folder", ["/usr/lib/python3/dist-packages", "/opt/venv/lib/python3.11/site-packages"])
def test_packages_of_another_environment_are_not_user_code(folder: str) -> None:
    """A virtual environment may use the packages of the system."""
    library: dict[str, Any] = {"call_site": call_site, "sys": sys}
    exec(compile("def call():\n    return call_site(sys._getframe())", f"{folder}/library/module.py", "exec"), library)
    assert re.fullmatch(r"test_watchdog.py:\d+: assert re.fullmatch.*", library["call"]())


def test_a_folder_whose_name_begins_with_the_name_of_the_package_contains_user_code() -> None:
    user: dict[str, Any] = {"call_site": call_site, "sys": sys}
    folder = f"{Path(unitrain.__file__).parent}_experiments"
    exec(compile("def call():\n    return call_site(sys._getframe())", f"{folder}/train.py", "exec"), user)
    assert user["call"]() == "train.py:2"


def test_equal_statuses_are_grouped() -> None:
    waiting = RankStatus(Activity.WAITING_FOR_RANKS, "train.py:3: step()", "backward #2", stack=["not shown"])
    running = RankStatus(Activity.RUNNING, "train.py:9: log()", library_function="sleep", stack=["File", "line"])
    statuses = {0: waiting, 1: waiting, 2: running, 3: waiting, 4: RankStatus()}
    assert format_statuses(statuses, {}) == [
        "  ranks 0-1, 3: waiting for other ranks in backward #2, at train.py:3: step()",
        "  rank 2: in sleep, at train.py:9: log()",
        "    File",
        "    line",
        "  rank 4: does not respond: its process has exited or is stopped, or its host is unreachable",
    ]

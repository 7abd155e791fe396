"""After a preemption signal, all ranks stop at the same step, save and exit with code 75. The run can resume."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launches import Launch, running_launcher
from preload import preloaded
from requirements import needs_open_mpi

from unitrain.config import TrainConfig
from unitrain.errors import ConfigError, Preempted
from unitrain.progress.preemption import PreemptionHandler

BIN = Path(sys.executable).parent
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
EPOCHS = ["--epochs", "12", "--device", "cpu"]


def digits_command(launcher: str, output: Path, *more: str) -> list[str]:
    start = {
        "none": [sys.executable],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
        "horovodrun": [str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable],
    }[launcher]
    return [*start, DIGITS, *EPOCHS, "--output", str(output), *more]


def wait_for(path: Path, seconds: float = 150, *, lines: int = 0) -> None:
    """Wait until the file exists and has at least this number of lines."""
    deadline = time.monotonic() + seconds
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"{path} was not created in time"
        time.sleep(0.02)


def final_results(text: str) -> str:
    (line,) = re.findall(r"final val_accuracy=\d\.\d{4} val_loss=\d\.\d{4}", text)
    return str(line)


def run_and_read_results(arguments: list[str]) -> str:
    with running_launcher(arguments, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    return final_results(output)


def find_rank(launch: Launch) -> int:
    """Return the process ID of one of horovodrun's ranks. Ignore the launcher and the shells between launcher and
    ranks."""
    for pid in launch.find_processes():
        with contextlib.suppress(OSError):  # the process has already ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            ranked = b"HOROVOD_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
            if ranked and words[0].endswith(b"python") and DIGITS.encode() in words:
                return pid
    raise LookupError("no rank is running")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_and_read_results(digits_command("torchrun", tmp_path_factory.mktemp("whole") / "run"))


# The signal, its receiver and the possible exit codes. torchrun and horovodrun do not exit with the code of the ranks.
CASES = {
    "none": (signal.SIGTERM, "launcher", {75}),
    "torchrun": (signal.SIGTERM, "launcher", {1}),
    "horovodrun": (signal.SIGUSR1, "one rank", {1, 75}),
}


@pytest.mark.parametrize("launcher", [pytest.param("none", marks=pytest.mark.nightly), "torchrun", "horovodrun"])
def test_signal_saves_a_checkpoint_from_which_the_run_resumes(
    launcher: str, tmp_path: Path, uninterrupted: str
) -> None:
    signum, target, codes = CASES[launcher]
    with running_launcher(digits_command(launcher, tmp_path / "run"), {"OMP_NUM_THREADS": "1"}) as launch:
        wait_for(tmp_path / "run" / "history.jsonl", lines=2)
        pid = launch.process.pid if target == "launcher" else find_rank(launch)
        os.kill(pid, signum)
        output = launch.output()
        launch.wait_until_all_exited(10)
    assert launch.process.returncode in codes, output
    assert re.search(rf"stopped after step \d+: {signum.name} was received by rank \d", output), output
    assert "Traceback" not in output.split("stopped after step")[0]
    done = len((tmp_path / "run" / "history.jsonl").read_text().splitlines())
    assert 1 < done < 12
    resumed = run_and_read_results(
        digits_command("torchrun" if launcher == "none" else launcher, tmp_path / "run", "--resume")
    )
    if launcher != "none":  # one process has smaller global batches
        assert resumed == uninterrupted


def test_ranks_save_and_end_if_their_launcher_is_killed(tmp_path: Path) -> None:
    launch_command = [sys.executable, "-m", "unitrain", "launch", "-np", "2", DIGITS, "--epochs", "1000"]
    command_line = [*launch_command, "--device", "cpu", "--output", str(tmp_path)]
    # Use fresh interpreters: the stub process of a forked rank would receive the parent-death signal that the rank
    # disables.
    with running_launcher(command_line, {"OMP_NUM_THREADS": "1"}, fresh=True) as launch:
        wait_for(tmp_path / "history.jsonl")
        launch.process.kill()
        output = launch.output()  # ends when the last rank closes it
        launch.wait_until_all_exited(30)
    assert re.search(r"stopping rank \d of 2 because torchrun has ended", output), output
    assert re.search(r"stopped after step \d+: SIGTERM was received by rank \d", output), output
    (step,) = re.findall(r"stopped after step (\d+)", output)
    assert (tmp_path / f"step-{int(step):09d}" / "manifest.json").exists()


WARNED = """
import os, sys, time
from pathlib import Path

from unitrain.progress.preemption import PreemptionHandler

folder = Path(sys.argv[1])
rank = next(os.environ[name] for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
with PreemptionHandler(["SIGUSR1", "SIGTERM"]) as preemption:
    with (folder / f"started-{rank}").open("a") as started:
        started.write("x")
    end = time.monotonic() + 60
    while preemption.received_signal is None and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(1)  # simulates saving a checkpoint
    (folder / f"saved-{rank}").write_text(str(preemption.received_signal))
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("target", "options", "received", "code"),
    [
        pytest.param(target, options, received, code, id=f"{target}-{name}", marks=tier + needs)
        for name, options, received, code, fast in (
            ("torchrun", ["--launcher", "torchrun"], "SIGUSR1", 75, "launcher"),
            ("horovodrun", ["--launcher", "horovodrun"], "SIGUSR1", 75, "every process"),
            (
                "torchrun with restarts",
                ["--launcher", "torchrun", "--launcher-args", "--max-restarts 1"],
                "SIGTERM",
                143,
                "launcher",
            ),
            ("mpirun", ["--launcher", "mpirun"], "SIGUSR1", 75, "launcher"),
            (
                "mpirun with restarts",
                ["--launcher", "mpirun", "--max-restarts", "1"],
                "SIGUSR1",
                75,
                "launcher",
            ),
        )
        for target in ("launcher", "every process")
        for tier in ([] if target == fast else [pytest.mark.nightly],)
        for needs in ([needs_open_mpi] if name.startswith("mpirun") else [],)
    ],
)
def test_ranks_save_after_a_warning_signal(
    target: str, options: list[str], received: str, code: int, tmp_path: Path
) -> None:
    """A scheduler sends SIGUSR1 as a warning. By default, this signal would end the launcher, and the ranks before they
    save."""
    script = tmp_path / "train.py"
    script.write_text(WARNED)
    command = [sys.executable, "-m", "unitrain", "launch", "-np", "2", *options, str(script), str(tmp_path)]
    with running_launcher(command, fresh=True) as launch:  # ranks must be descendants of the launcher
        for rank in (0, 1):
            wait_for(tmp_path / f"started-{rank}")
        for pid in [launch.process.pid] if target == "launcher" else launch.find_processes():
            with contextlib.suppress(ProcessLookupError):  # a short-lived process of the launcher has ended
                os.kill(pid, signal.SIGUSR1)
        output = launch.output()
        launch.wait_until_all_exited(10)
    assert launch.process.returncode == code, output
    for rank in (0, 1):
        assert (tmp_path / f"started-{rank}").read_text() == "x", output
        saved_text = (tmp_path / f"saved-{rank}").read_text()
        assert saved_text == received or target == "every process", output


@pytest.mark.parametrize(
    ("options", "received"),
    [
        pytest.param(["--launcher", "torchrun"], "SIGTERM", id="torchrun"),
        pytest.param(["--launcher", "horovodrun"], "SIGTERM", id="horovodrun"),
        pytest.param(["--launcher", "mpirun"], "SIGTERM", id="mpirun", marks=needs_open_mpi),
        pytest.param(["--launcher", "torchrun", "--log-dir", "logs"], "SIGTERM", id="supervised torchrun"),
    ],
)
def test_ranks_save_if_the_terminal_is_closed(options: list[str], received: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WARNED)
    command = [sys.executable, "-m", "unitrain", "launch", "-np", "2", *options, str(script), str(tmp_path)]
    with running_launcher(command, fresh=True) as launch:
        for rank in (0, 1):
            wait_for(tmp_path / f"started-{rank}")
        launch.process.send_signal(signal.SIGHUP)
        output = launch.output()
        launch.wait_until_all_exited(10)
    assert launch.process.returncode not in (0, 128 + signal.SIGHUP, -signal.SIGHUP), output
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").read_text() == received, output


NO_RANK = """
import os, signal, sys
from unitrain.bootstrap.signal_forwarding import forward_warning_signals

forward_warning_signals("NO_SUCH_VARIABLE")
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_warning_signal_that_does_not_reach_a_rank_is_reported() -> None:
    done = subprocess.run([sys.executable, "-c", NO_RANK], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "unitrain: SIGUSR1 was not forwarded: no rank runs on this host\n"


WORKERS = """
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset

import unitrain


class Forever(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(3), torch.ones(1)


class Counts:
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.ones(3), torch.ones(1)


class Ready(unitrain.Callback):
    def on_step_end(self, trainer):
        if trainer.progress.step == 4:  # both workers have started, so they ignore the signals
            Path(sys.argv[1], "ready").touch()


with unitrain.init(device="cpu") as backend:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = unitrain.TrainConfig(
        max_steps=10**9, batch_size=2, num_workers=2, shuffle=False, output_dir=sys.argv[1], progress="off"
    )
    loss = nn.functional.mse_loss
    trainer = unitrain.Trainer(model, optimizer, loss, backend=backend, config=config, callbacks=[Ready()])
    trainer.fit(Forever() if sys.argv[2] == "stream" else Counts())
"""


@pytest.mark.parametrize(
    ("dataset", "signum"),
    [("stream", signal.SIGTERM), pytest.param("items", signal.SIGUSR1, marks=pytest.mark.ci)],
)
def test_signal_to_every_process_counts_once(dataset: str, signum: signal.Signals, tmp_path: Path) -> None:
    """Like a scheduler, the test sends the signal to the ranks and to the workers of their DataLoaders."""
    with running_launcher([sys.executable, "-c", WORKERS, str(tmp_path), dataset], {"OMP_NUM_THREADS": "1"}) as launch:
        wait_for(tmp_path / "ready")
        assert len(launch.find_processes()) > 2
        os.killpg(launch.process.pid, signum)
        output = launch.output()
    assert launch.process.returncode == 75, output
    assert list(tmp_path.glob("*/manifest.json"))


SPAWNED = """
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unitrain


class Ready(unitrain.Callback):
    def on_step_end(self, trainer):
        Path(sys.argv[1], "ready").touch()


def main():
    data = TensorDataset(torch.ones(1 << 12, 3), torch.ones(1 << 12, 1))
    loader = DataLoader(data, 2, num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    with unitrain.init(device="cpu") as backend:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = unitrain.TrainConfig(
            max_steps=10**9, output_dir=sys.argv[1], preemption_signals=("SIGHUP",), progress="off"
        )
        loss = nn.functional.mse_loss
        unitrain.Trainer(model, optimizer, loss, backend=backend, config=config, callbacks=[Ready()]).fit(loader)


if __name__ == "__main__":
    main()
"""


@pytest.mark.ci
def test_spawned_workers_survive_the_configured_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    with running_launcher([sys.executable, str(script), str(tmp_path)], {"OMP_NUM_THREADS": "1"}, fresh=True) as launch:
        wait_for(tmp_path / "ready")
        os.killpg(launch.process.pid, signal.SIGHUP)
        output = launch.output()
    assert launch.process.returncode == 75, output
    assert "is killed by signal" not in output, output
    assert list(tmp_path.glob("*/manifest.json"))


SPAWNED_WORKER = """
import pickle, signal
from unitrain import processes
from unitrain.data.workers import WorkerInit
from unitrain.progress.preemption import PreemptionHandler
PreemptionHandler(["SIGHUP"])
content = pickle.dumps(WorkerInit())
processes.preemption_signals.clear()  # a spawned process starts with an empty list
pickle.loads(content)(0)
print(*(signal.getsignal(number).name for number in (signal.SIGHUP, signal.SIGUSR1)))
"""


def test_a_spawned_worker_ignores_the_signals_that_its_rank_handles(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED_WORKER)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=preloaded(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "SIG_IGN SIG_IGN\n"


LIVING_WORKERS = """
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unitrain


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(3), torch.ones(1)


class Fails(unitrain.Callback):
    def on_step_end(self, trainer):
        raise ValueError("stopped by the test")


case, output = sys.argv[1:]
data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
if case != "persistent workers":
    loader = DataLoader(Endless(), batch_size=2, num_workers=2)
held = []
with unitrain.init(device="cpu") as backend:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = unitrain.TrainConfig(max_epochs=2, output_dir=output, progress="off")
    callbacks = [] if case == "persistent workers" else [Fails()]
    trainer = unitrain.Trainer(
        model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=callbacks
    )
    try:
        trainer.fit(loader)
    except unitrain.UnitrainError as error:
        held.append(error)  # the traceback keeps the iterator and its workers alive
    alive = [one.name for one in threading.enumerate() if one.name == "unitrain preemption"]
    print("fit has ended", alive, flush=True)
"""


@pytest.mark.parametrize("case", ["persistent workers", "an exception"])
def test_fit_returns_while_dataloader_workers_run(case: str, tmp_path: Path) -> None:
    """Workers are forked while signals are handled, so they inherit the connection that forwards signals."""
    with running_launcher(
        [sys.executable, "-c", LIVING_WORKERS, case, str(tmp_path)], {"OMP_NUM_THREADS": "1"}
    ) as launch:
        output = launch.output()
    assert "fit has ended []" in output, output
    # torch raises an error in this process if a worker is killed by a signal, even intentionally at exit.
    assert "is killed by signal" not in output, output


FORKED = """
import os, signal, time
from unitrain.progress.preemption import PreemptionHandler
with PreemptionHandler(["SIGTERM"]) as preemption:
    with PreemptionHandler([]):
        child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 30
        while preemption.received_signal is None and time.monotonic() < end:
            time.sleep(0.01)
        print(preemption.received_signal, flush=True)
os._exit(0)
"""


def test_forked_process_does_not_end_the_handler_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "SIGTERM\n"


TWICE = """
import sys, time
from unitrain.progress.preemption import PreemptionHandler
with PreemptionHandler(["SIGTERM"]) as preemption:
    print("ready", flush=True)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if preemption.received_signal:
            print(preemption.received_signal, flush=True)
            preemption.received_signal = preemption.received_signal
            time.sleep(0.05)
"""


def test_later_signal_ends_the_process_immediately() -> None:
    """Signals within three seconds count as the same notice, because a scheduler may signal every process."""
    process = subprocess.Popen([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n"
        time.sleep(3.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def receive_signal(preemption: PreemptionHandler, signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)
    limit = time.monotonic() + 30
    while preemption.received_signal is None and time.monotonic() < limit:
        time.sleep(0.01)


@pytest.mark.parametrize("handled", [["SIGUSR1", "SIGUSR2"], ["SIGUSR1"], []])
@pytest.mark.parametrize("received", ["SIGUSR1", "SIGUSR2"])
def test_handlers_of_the_program_are_called_after_the_checkpoint(handled: list[str], received: str) -> None:
    calls: list[int] = []
    handlers = {signal.Signals[name]: lambda signum, frame: calls.append(signum) for name in handled}
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    try:
        with PreemptionHandler(["SIGUSR1", "SIGUSR2"]) as preemption:
            receive_signal(preemption, signal.Signals[received])
            assert (calls, preemption.received_signal) == ([], received)
        assert calls == [signal.Signals[received]] * (received in handled)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            assert signal.getsignal(signum) == handlers.get(signum, signal.SIG_DFL)
    finally:
        for signum in handlers:
            signal.signal(signum, signal.SIG_DFL)
    assert not [one for one in threading.enumerate() if one.name == "unitrain preemption"]


def test_exception_of_a_handler_of_the_program_is_raised() -> None:
    def exit_process(signum: int, frame: object) -> None:
        sys.exit(3)

    signal.signal(signal.SIGUSR2, exit_process)
    try:
        with pytest.raises(SystemExit, match="3"), PreemptionHandler(["SIGUSR2"]) as preemption:
            receive_signal(preemption, signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is exit_process
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with PreemptionHandler(["SIGUSR2"]):
            assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_inner_context_leaves_the_handler_of_the_outer_context() -> None:
    with PreemptionHandler(["SIGUSR2"]) as outer, PreemptionHandler(["SIGUSR2"]):
        receive_signal(outer, signal.SIGUSR2)
        assert outer.received_signal == "SIGUSR2"


def test_signals_are_not_handled_outside_the_main_thread() -> None:
    found = []

    def body() -> None:
        with PreemptionHandler(["SIGUSR2"]):
            found.append(signal.getsignal(signal.SIGUSR2))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_preempted_exits_with_code_75() -> None:
    assert Preempted("SIGTERM came").code == 75
    assert not issubclass(Preempted, Exception)  # must not be caught by `except Exception`


def test_unknown_signal_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"preemption_signals has 'SIGTREM'.*Did you mean 'SIGTERM'\?"):
        TrainConfig(max_epochs=1, preemption_signals=("SIGTREM",))
    with pytest.raises(ConfigError, match="'SIGKILL', which is not a signal that a program can handle"):
        TrainConfig(max_epochs=1, preemption_signals=("SIGKILL",))

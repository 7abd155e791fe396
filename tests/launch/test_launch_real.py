"""Every backend under every launcher, started by `unitrain launch` and by the command of the launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launches import SECONDS, read_rank_reports, running_launcher
from requirements import needs_mpi, needs_network_namespaces

BIN = Path(sys.executable).parent
PYTHON = sys.executable
UNITRAIN = [str(BIN / "unitrain"), "launch", "-np", "2"]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", "--gloo", PYTHON]
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe", PYTHON]
# Arguments: the folder for the reports of the ranks, how the script ends, and optionally the backend.
SCRIPT = """
import json, os, sys, time
import torch
import unitrain

folder, end, *backend = sys.argv[1:]
with unitrain.init(*backend, device="cpu", timeout_seconds=60) as backend:
    total = backend.allreduce(torch.tensor([backend.rank + 1.0, 10.0]), op="sum")
    report = dict(
        rank=backend.rank, size=backend.size, local_rank=backend.local_rank, local_size=backend.local_size,
        node_rank=backend.node_rank, num_nodes=backend.num_nodes, backend=backend.name, transport=backend.transport,
        total=total.tolist(), pid=os.getpid(), threads=torch.get_num_threads(),
    )
    with open(f"{folder}/{backend.rank}", "w") as file:
        json.dump(report, file)
    os.rename(f"{folder}/{backend.rank}", f"{folder}/{backend.rank}.json")
    backend.barrier()
    if end == "fails" and backend.rank == 1:
        sys.exit(7)
    if end != "returns":
        time.sleep(300)
"""


def check_two_ranks(folder: Path, backend: str, transport: str) -> list[dict[str, Any]]:
    """Check that the reports of two ranks have the values required under every launcher, and return the reports."""
    reports = read_rank_reports(folder)
    common = {
        "size": 2, "local_size": 2, "node_rank": 0, "num_nodes": 1, "backend": backend, "transport": transport,
        "total": [3.0, 20.0],
    }  # fmt: skip
    ranks = [{"rank": rank, "local_rank": rank} for rank in (0, 1)]
    assert [{key: one[key] for key in (*common, "rank", "local_rank")} for one in reports] == [
        common | own for own in ranks
    ]
    assert reports[0]["pid"] != reports[1]["pid"]
    return reports


@pytest.mark.parametrize(
    ("options", "backend", "transport"),
    [
        ([], "ddp", "gloo"),
        pytest.param(["--backend", "ddp", "--launcher", "horovodrun"], "ddp", "gloo", marks=pytest.mark.nightly),
        (["--backend", "horovod"], "horovod", "gloo"),
        pytest.param(["--backend", "horovod", "--mpi"], "horovod", "mpi", marks=[needs_mpi, pytest.mark.nightly]),
        (["--backend", "horovod", "--launcher", "torchrun"], "horovod", "gloo"),
        pytest.param(["--backend", "ddp", "--launcher", "mpirun"], "ddp", "gloo", marks=needs_mpi),
        pytest.param(["--backend", "horovod", "--launcher", "mpirun"], "horovod", "mpi", marks=needs_mpi),
    ],
    ids=[
        "ddp", "ddp under horovodrun", "horovod", "horovod with mpi", "horovod under torchrun", "ddp under mpirun",
        "horovod under mpirun",
    ],
)  # fmt: skip
def test_launch_runs_the_printed_command(
    options: list[str], backend: str, transport: str, script: str, tmp_path: Path
) -> None:
    command = [*UNITRAIN, *options, script, str(tmp_path), "returns"]
    with running_launcher([*command[:2], "--dry-run", *command[2:]]) as launch:
        printed = launch.output()
    assert not read_rank_reports(tmp_path), "a dry run must not start ranks"
    with running_launcher(command) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    port = re.compile(r"(?<=MASTER_PORT=)\d+")  # each launch chooses a free port
    assert port.sub("N", output).startswith(port.sub("N", printed)), output
    reports = check_two_ranks(tmp_path, backend, transport)
    assert {one["threads"] for one in reports} == {max(1, len(os.sched_getaffinity(0)) // 2)}


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_module_runs_under_the_default_launcher_of_every_backend(
    backend: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--log-dir runs the module of each rank in a wrapper."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    Path(script).rename(tmp_path / "package" / "train.py")
    options = ["--backend", backend, "--log-dir", str(tmp_path / "logs"), "-m", "package.train"]
    with running_launcher([*UNITRAIN, *options, str(tmp_path), "returns"]) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    check_two_ranks(tmp_path, backend, "gloo")


@pytest.mark.parametrize(
    ("command", "backend", "transport"),
    [
        (TORCHRUN, "ddp", "gloo"),
        (HOROVODRUN, "horovod", "gloo"),
        pytest.param(MPIRUN, "horovod", "mpi", marks=needs_mpi),
        pytest.param(
            [*UNITRAIN, "--launcher", "mpirun", "--backend", "ddp"],
            "ddp",
            "gloo",
            marks=[needs_mpi, pytest.mark.nightly],
        ),
    ],
    ids=["torchrun", "horovodrun", "mpirun", "unitrain's mpirun"],
)
def test_job_ends_if_a_rank_fails(
    command: list[str], backend: str, transport: str, script: str, tmp_path: Path
) -> None:
    """The script does not select a backend, so the launcher determines the default."""
    with running_launcher([*command, script, str(tmp_path), "fails"]) as launch:
        output = launch.output()
        check_two_ranks(tmp_path, backend, transport)
        assert launch.process.returncode != 0, output
        launch.wait_until_all_exited(30)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--backend", "ddp"], id="torchrun"),
        pytest.param(["--backend", "horovod"], id="horovodrun"),
        pytest.param(
            ["--backend", "horovod", "--mpi"], id="horovodrun with mpi", marks=[needs_mpi, pytest.mark.nightly]
        ),
        pytest.param(["--backend", "horovod", "--launcher", "mpirun"], id="mpirun", marks=needs_mpi),
    ],
)
def test_signal_to_the_launch_terminates_all_ranks(options: list[str], script: str, tmp_path: Path) -> None:
    with running_launcher([*UNITRAIN, *options, script, str(tmp_path), "stays"]) as launch:
        deadline = time.monotonic() + SECONDS
        while len(read_rank_reports(tmp_path)) < 2 and launch.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks = {one["pid"] for one in read_rank_reports(tmp_path)}
        assert len(ranks) == 2
        assert ranks < set(launch.find_processes())
        launch.process.send_signal(signal.SIGTERM)
        launch.wait_until_all_exited(25)  # torchrun sends SIGKILL after 30 s
        output = launch.output()
        assert launch.process.returncode == 143 if "ddp" in options else launch.process.returncode != 0, output
        assert "Traceback" not in output or "ddp" not in options


WITHOUT_INIT = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], os.environ['RANK']).touch(); time.sleep(300)"


@pytest.mark.parametrize(
    ("rank", "options"), [("0", []), ("1", ["--backend", "horovod", "--launcher", "torchrun"])], ids=["ddp", "horovod"]
)
def test_job_ends_if_a_rank_exits_normally_before_init(
    rank: str, options: list[str], script: str, tmp_path: Path
) -> None:
    """The ranks would otherwise wait for 60 s, and the message would not name the exit."""
    Path(script).write_text(f"import os\nif os.environ['RANK'] == '{rank}':\n    raise SystemExit(0)\n{SCRIPT}")
    with running_launcher([*UNITRAIN, *options, script, str(tmp_path), "returns"]) as launch:
        output = launch.output()
        launch.wait_until_all_exited(30)
    assert launch.process.returncode == 1, output
    assert f"failed: rank {rank} exited with status 0 before unitrain.init(). Call" in output


@pytest.mark.parametrize("options", [[], ["--max-restarts", "1"]], ids=["torchrun", "supervisor"])
def test_ranks_that_do_not_call_init_exit_if_the_launch_is_killed(options: list[str], tmp_path: Path) -> None:
    """`unitrain launch` replaces itself with torchrun or, with --max-restarts, supervises torchrun."""
    script, folder = tmp_path / "train.py", tmp_path / "ranks"
    script.write_text(WITHOUT_INIT)
    folder.mkdir()
    with running_launcher([*UNITRAIN, *options, str(script), str(folder)]) as launch:
        deadline = time.monotonic() + SECONDS
        while len(list(folder.iterdir())) < 2 and launch.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(launch.find_processes()) >= 3
        launch.process.kill()
        launch.wait_until_all_exited(25)  # torchrun sends SIGKILL after 30 s


@pytest.mark.nightly
def test_launch_ignores_the_rank_variables_of_its_container(script: str, tmp_path: Path) -> None:
    """A PyTorchJob in Kubernetes sets RANK for the container, but not for the processes in the container."""
    for backend in ("ddp", "horovod"):
        folder = tmp_path / backend
        folder.mkdir()
        command = [*UNITRAIN, "--backend", backend, script, str(folder), "returns"]
        with running_launcher(command, {"RANK": "0", "WORLD_SIZE": "1"}) as launch:
            output = launch.output()
        assert launch.process.returncode == 0, output
        check_two_ranks(folder, backend, "gloo")


def test_script_runs_in_one_process_without_a_launcher(script: str, tmp_path: Path) -> None:
    for folder, command in (("plain", [PYTHON]), ("launched", [UNITRAIN[0], "launch", "--backend", "local"])):
        (tmp_path / folder).mkdir()
        with running_launcher([*command, script, str(tmp_path / folder), "returns"]) as launch:
            output = launch.output()
        assert launch.process.returncode == 0, output
        (report,) = read_rank_reports(tmp_path / folder)
        assert (report["backend"], report["rank"], report["size"], report["total"]) == (
            "local",
            0,
            1,
            [1.0, 10.0],
        )


def test_backend_local_with_two_ranks_is_rejected(script: str, tmp_path: Path) -> None:
    with running_launcher([*TORCHRUN, script, str(tmp_path), "returns", "local"]) as launch:
        output = launch.output()
    assert launch.process.returncode != 0
    assert (
        "LauncherMismatchError: Backend 'local' runs in one process, but torchrun started 2. "
        "Use --backend ddp or --backend horovod, or start it with: python script.py"
    ) in output


CHECK_THREADS = """
import os, time
import torch
import unitrain

def gloo_threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read())
        except OSError:  # the thread has exited since it was listed
            continue
    return [name for name in names if "gloo" in name]

with unitrain.init(device="cpu") as backend:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(optimizer, wrapped)
    wrapped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
deadline = time.monotonic() + 10  # the kernel may still list a thread that has been joined
while (left := gloo_threads()) and time.monotonic() < deadline:
    time.sleep(0.01)
assert not left, left
wrapped(torch.ones(1, 2) * backend.rank).sum().backward()  # the user's model works without communication
assert model.weight.grad.unique().tolist() == [backend.rank], model.weight.grad
"""


def test_threads_of_a_backend_exit_with_the_process_group(tmp_path: Path) -> None:
    """A thread that outlives the interpreter may abort the process of a successful job."""
    script = tmp_path / "train.py"
    script.write_text(CHECK_THREADS)
    with running_launcher([*TORCHRUN, str(script)]) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output


@needs_network_namespaces
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun"])
def test_host_without_a_loopback_address_is_reported_before_the_launch(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    command = ["unshare", "--net", sys.executable, "-m", "unitrain", "launch", "--launcher", launcher, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Error: Ranks on one host connect through 127.0.0.1, which this host does not have" in done.stderr

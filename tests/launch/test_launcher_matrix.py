"""Every launcher with every backend has the same placement and results on one host and on two hosts.

Each test launches `short_digits.py` with the command that a user types, on simulated hosts (`hosts.py`). There are two
ranks on one host, or three ranks on two hosts. The results are compared with the same steps in plain torch.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Host, hosts
from requirements import needs_hosts, needs_mpi, needs_mpich, needs_slurm
from short_digits import GLOBAL_BATCH, LEARNING_RATE, SEED, STEPS, digits, flatten_parameters, network
from slurm import slurm
from torch import nn

from unitrain.data.order import epoch_order

pytestmark = needs_hosts
BIN = Path(sys.executable).parent
SCRIPT = str(Path(__file__).parents[1] / "support" / "short_digits.py")
VARIABLES = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # there are more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
RENDEZVOUS = {"MASTER_ADDR": "h1", "MASTER_PORT": "29511"}
COUNTS = pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.nightly), 2], ids=["one host", "two hosts"]
)
# Number of hosts: number of ranks on each host.
RANKS_PER_HOST = {1: (2,), 2: (2, 1)}


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """The expected results: the parameters after the same steps in plain torch on global batches."""
    images, targets = digits().tensors
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    steps: list[torch.Tensor] = []
    for epoch in range(STEPS):
        steps += epoch_order(len(images), seed=SEED, epoch=epoch, shuffle=True).split(GLOBAL_BATCH)
    for samples in steps[:STEPS]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[samples]), targets[samples]).backward()
        optimizer.step()
    return flatten_parameters(model)


@pytest.fixture
def loopback_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts in a difficult network: host names resolve to 127.0.1.1, and there is no default route."""
    with hosts(2, tmp_path_factory.mktemp("hosts"), hostname_is_loopback=True) as found:
        yield found


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], dict[str, str]]]:
    """Two hosts whose names resolve to 127.0.1.1, with Slurm, and the environment variables that its programs need."""
    with (
        hosts(2, tmp_path_factory.mktemp("hosts"), hostname_is_loopback=True) as found,
        slurm(found, tmp_path_factory.mktemp("slurm")) as variables,
    ):
        yield found, variables


def check_reports(
    folder: Path,
    launcher: str,
    backend: str,
    transport: str,
    ranks_per_host: tuple[int, ...],
    expected: list[float],
    *,
    hierarchical: bool = False,
) -> None:
    """Check that the reports of all ranks have the expected positions, and the `expected` parameters."""
    reports: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if launcher == "none":  # one process does not communicate, so the transport may be gloo or mpi
        transport = reports[0]["transport"]
    size = sum(ranks_per_host)
    positions = [(node, local) for node, num_ranks in enumerate(ranks_per_host) for local in range(num_ranks)]
    common = {
        "launcher": launcher, "backend": backend, "transport": transport, "size": size,
        "num_nodes": len(ranks_per_host), "total": [size * (size + 1) / 2, 10.0 * size], "hierarchical": hierarchical,
    }  # fmt: skip
    assert [{key: value for key, value in one.items() if key != "numbers"} for one in reports] == [
        {
            **common, "rank": rank, "node_rank": node, "host": f"h{node + 1}", "local_rank": local,
            "local_size": ranks_per_host[node],
        }
        for rank, (node, local) in enumerate(positions)
    ]  # fmt: skip
    for one in reports:
        torch.testing.assert_close(torch.tensor(one["numbers"]), torch.tensor(expected), rtol=0, atol=1e-6)


def export_options(*names: str) -> list[str]:
    return [word for name in (*VARIABLES, *names) for word in ("-x", name)]


def user_command(launcher: str, backend: str, count: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that a user types before the script, and the variables that the user exports."""
    size = str(sum(RANKS_PER_HOST[count]))
    slots = ",".join(f"h{number}:{slots}" for number, slots in enumerate(RANKS_PER_HOST[count], 1))
    python = sys.executable
    match launcher:
        case "none":
            return [python], {}
        case "horovodrun --gloo" | "horovodrun --mpi":
            controller = launcher.split()[1]
            rendezvous_options = RENDEZVOUS if backend == "ddp" and controller == "--mpi" else {}
            return [
                str(BIN / "horovodrun"),
                "-np",
                size,
                "-H",
                slots,
                "--disable-cache",
                controller,
                python,
            ], rendezvous_options
        case "mpirun":
            rendezvous_options = RENDEZVOUS if backend == "ddp" else {}
            given = [*export_options(*rendezvous_options), "--bind-to", "none", "--map-by", "slot"]
            return ["mpirun.openmpi", "-np", size, "-H", slots, *given, python], rendezvous_options
        case "mpiexec":
            return ["mpiexec.mpich", "-n", size, "-hosts", slots, python], RENDEZVOUS
    raise AssertionError(launcher)


@COUNTS
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize(
    "launcher",
    [
        "horovodrun --gloo",
        pytest.param("horovodrun --mpi", marks=needs_mpi),
        pytest.param("mpirun", marks=needs_mpi),
        pytest.param("mpiexec", marks=needs_mpich),
    ],
)
def test_horovodrun_mpirun_and_mpiexec_start_all_ranks_from_one_host(
    launcher: str, backend: str, count: int, loopback_hosts: list[Host], tmp_path: Path, reference: list[float]
) -> None:
    command, variables = user_command(launcher, backend, count)
    done = loopback_hosts[0].run([*command, SCRIPT, str(tmp_path), backend], VARIABLES | variables)
    assert done.returncode == 0, done.stdout
    over_mpi = backend == "horovod" and launcher in ("mpirun", "horovodrun --mpi")
    detected_launcher = {"horovodrun --gloo": "horovodrun", "horovodrun --mpi": "mpirun"}.get(launcher, launcher)
    check_reports(tmp_path, detected_launcher, backend, "mpi" if over_mpi else "gloo", RANKS_PER_HOST[count], reference)
    for host in loopback_hosts:
        host.wait_until_all_exited(30)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_script_without_a_launcher_is_one_rank(
    backend: str, loopback_hosts: list[Host], tmp_path: Path, reference: list[float]
) -> None:
    done = loopback_hosts[0].run([sys.executable, SCRIPT, str(tmp_path), backend], VARIABLES)
    assert done.returncode == 0, done.stdout
    check_reports(tmp_path, "none", backend, "gloo", (1,), reference)


@COUNTS
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_torchrun_is_started_on_each_host(
    backend: str, count: int, loopback_hosts: list[Host], tmp_path: Path, reference: list[float]
) -> None:
    agents = []
    for number, num_ranks in enumerate(RANKS_PER_HOST[count]):
        rendezvous_options = [
            "--nnodes",
            str(count),
            "--node-rank",
            str(number),
            "--master-addr",
            "h1",
            "--master-port",
            "29511",
        ]
        options = rendezvous_options if count > 1 else ["--standalone"]
        command = [str(BIN / "torchrun"), *options, "--nproc-per-node", str(num_ranks)]
        agents.append(loopback_hosts[number].start([*command, SCRIPT, str(tmp_path), backend], VARIABLES))
    outputs = [agent.communicate(timeout=100)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * count, outputs
    check_reports(tmp_path, "torchrun", backend, "gloo", RANKS_PER_HOST[count], reference)


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "ddp"), ("horovodrun", "horovod")])
def test_hierarchical_allreduce_supports_different_numbers_of_ranks_per_host(
    launcher: str, backend: str, loopback_hosts: list[Host], tmp_path: Path, reference: list[float]
) -> None:
    options = ["--backend", backend, "-H", "h1:2,h2:1", "-x", "UNITRAIN_HIERARCHICAL_ALLREDUCE=1"]
    command = [sys.executable, "-m", "unitrain", "launch", *options, SCRIPT, str(tmp_path), backend]
    done = loopback_hosts[0].run(command, VARIABLES)
    assert done.returncode == 0, done.stdout
    check_reports(tmp_path, launcher, backend, "gloo", RANKS_PER_HOST[2], reference, hierarchical=True)


@needs_slurm
@pytest.mark.parametrize(
    ("options", "launcher", "backend"),
    [([], "torchrun", "ddp"), (["--backend", "horovod", "--launcher", "srun"], "srun", "horovod")],
    ids=["torchrun", "srun"],
)
def test_launch_in_a_batch_job_uses_the_hosts_of_the_job(
    options: list[str],
    launcher: str,
    backend: str,
    allocated: tuple[list[Host], dict[str, str]],
    tmp_path: Path,
    reference: list[float],
) -> None:
    loopback_hosts, given = allocated
    line = [sys.executable, "-m", "unitrain", "launch", *options, SCRIPT, str(tmp_path), backend]
    output, ended = tmp_path / "output", tmp_path / "ended"
    job = ["sbatch", "-N", "2", "-n", "3", "-o", str(output), "--wrap", f"{shlex.join(line)}; echo $? >{ended}"]
    assert loopback_hosts[0].run(job, VARIABLES | given).returncode == 0
    deadline = time.monotonic() + 90
    while not (ended.exists() and ended.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended.exists(), output.read_text()
    assert ended.read_text() == "0\n", output.read_text()
    check_reports(tmp_path, launcher, backend, "gloo", RANKS_PER_HOST[2], reference)


# The batch jobs above cover the other two combinations on two hosts.
@needs_slurm
@COUNTS
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        ("srun", "ddp"),
        ("torchrun", "horovod"),
        pytest.param("srun", "horovod", marks=pytest.mark.nightly),
        pytest.param("torchrun", "ddp", marks=pytest.mark.nightly),
    ],
)
def test_srun_and_torchrun_start_ranks_in_a_slurm_allocation(
    launcher: str,
    backend: str,
    count: int,
    allocated: tuple[list[Host], dict[str, str]],
    tmp_path: Path,
    reference: list[float],
) -> None:
    loopback_hosts, given = allocated
    rest = [SCRIPT, str(tmp_path), backend]
    if launcher == "srun":
        command = ["srun", "-N", str(count), "-n", str(sum(RANKS_PER_HOST[count])), sys.executable, *rest]
    else:
        agent = (
            f"exec {BIN}/torchrun --nnodes {count} --nproc-per-node $((2 - SLURM_NODEID)) --node-rank $SLURM_NODEID "
            f'--master-addr h1 --master-port 29511 "$@"'
        )
        command = [
            "srun",
            "-N",
            str(count),
            "-n",
            str(count),
            "--cpus-per-task=2",
            "bash",
            "-c",
            agent,
            "torchrun",
            *rest,
        ]
    # When `run` times out, it kills all processes on the host, including Slurm's daemons, which other tests need.
    command = ["timeout", "--kill-after=5", "85", *command]
    done = loopback_hosts[0].run(command, VARIABLES | given | (RENDEZVOUS if launcher == "srun" else {}))
    assert done.returncode == 0, done.stdout
    check_reports(tmp_path, launcher, backend, "gloo", RANKS_PER_HOST[count], reference)

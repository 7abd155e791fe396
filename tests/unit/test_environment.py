"""Detection of the rank from the environment variables of each launcher. Most variables were recorded from real runs.
Comments name the source of the others."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys

import pytest

import unitrain
from unitrain.backends.base import Backend
from unitrain.bootstrap import environment
from unitrain.bootstrap.environment import RankInfo, detect
from unitrain.errors import EnvironmentVariableError
from unitrain.testing import run_ranks

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_HOSTNAME": "b",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "1",
}  # fmt: skip
# MPICH 4.0.2.
MPIEXEC = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm", "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2"}
# The variables of mpirun_rsh that open-mpi/ompi-tests-public reads (comm_split_type, get_rank_size_info).
MPIRUN_RSH = {
    "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2", "PMI_ID": "3",
}  # fmt: skip
# The variables of jsrun, from Lightning's test of LSFEnvironment.
JSRUN = {
    "LSB_MCPU_HOSTS": "10.10.10.0 1 10.10.10.1 1 10.10.10.2 1 10.10.10.3 1", "LSB_JOBID": "1234",
    "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_LOCAL_RANK": "1", "PMIX_RANK": "3",
}  # fmt: skip
# The variables that flux-core sets for every task (src/shell/task.c).
FLUX = {
    "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "FLUX_JOB_ID": "f9",
    "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9",
}  # fmt: skip
# The mpiexec of PALS, on Polaris and Aurora (ALCF).
PALS = {
    "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
}  # fmt: skip
# The training-operator since kubeflow/trainer#1840. RANK is the index of the pod.
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": "digits-master-0",
    "PET_MASTER_ADDR": "digits-master-0", "WORLD_SIZE": "2", "RANK": "1", "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1", "PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip
# Earlier versions of the training-operator, and DLC of Alibaba Cloud.
OLD_PYTORCHJOB = {
    name: value for name, value in PYTORCHJOB.items() if not name.startswith("PET_")
}  # fmt: skip
# The torch plugin of Kubeflow Trainer 2 (pkg/runtime/framework/plugins/torch).
TRAINJOB = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "29500",
    "PET_MASTER_ADDR": "digits-node-0-0.digits", "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip
# A worker of an MPIJob (MPI operator) has the variables of mpirun.
MPIJOB = MPIRUN | {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "digits-worker-1", "K_MPI_JOB_ROLE": "worker"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, RankInfo("torchrun", 3, 4, 1, 2, 1, 2)),
        (HOROVODRUN, RankInfo("horovodrun", 2, 3, 0, 1)),
        (MPIRUN, RankInfo("mpirun", 1, 2, 1, 2)),
        (MPIEXEC, RankInfo("mpiexec", 1, 2, 1, 2)),
        (SRUN, RankInfo("srun", 3, 4, 1, None, 1)),
        (BY_HAND, RankInfo("env", 1, 2, 1)),
        (BY_HAND | {"LOCAL_RANK": "0"}, RankInfo("env", 1, 2, 0)),
        ({}, RankInfo("none", 0, 1, 0, 1, 0, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, RankInfo("none", 0, 1, 0, 1, 0, 1)),
        # Nested launchers: the inner launcher started this process.
        (SRUN | TORCHRUN, RankInfo("torchrun", 3, 4, 1, 2, 1, 2)),
        (SRUN | HOROVODRUN, RankInfo("horovodrun", 2, 3, 0, 1)),
        (SRUN | MPIRUN, RankInfo("mpirun", 1, 2, 1, 2)),
        (SRUN | MPIEXEC, RankInfo("mpiexec", 1, 2, 1, 2)),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}, RankInfo("srun", 3, 4, 1, None, 1)),
        (MPIEXEC | TORCHRUN, RankInfo("torchrun", 3, 4, 1, 2, 1, 2)),
        (MPIRUN | TORCHRUN, RankInfo("torchrun", 3, 4, 1, 2, 1, 2)),
        (HOROVODRUN | TORCHRUN, RankInfo("torchrun", 3, 4, 1, 2, 1, 2)),
        (MPIRUN_RSH, RankInfo("mpirun_rsh", 3, 4, 1, 2)),
        ({f"MVP{name[3:]}": value for name, value in MPIRUN_RSH.items()}, RankInfo("mpirun_rsh", 3, 4, 1, 2)),
        (JSRUN, RankInfo("jsrun", 3, 4, 1)),
        (JSRUN | MPIRUN, RankInfo("mpirun", 1, 2, 1, 2)),
        (FLUX, RankInfo("flux", 3, 4, 1, None, None, 2)),
        (SRUN | {"SLURM_PROCID": "0"} | FLUX, RankInfo("flux", 3, 4, 1, None, None, 2)),
        (SRUN | {"SLURM_PROCID": "0"} | PALS, RankInfo("mpiexec", 3, 4, 1, 2)),
        (FLUX | MPIRUN, RankInfo("mpirun", 1, 2, 1, 2)),
        (PALS, RankInfo("mpiexec", 3, 4, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, RankInfo("mpiexec", 0, 1, 0)),
        (PYTORCHJOB, RankInfo("kubernetes", 1, 2, 0, None, 1, 2)),
        (OLD_PYTORCHJOB, RankInfo("kubernetes", 1, 2, 0, None, 1, 2)),
        (TRAINJOB, RankInfo("kubernetes", 1, 2, 0, None, 1, 2)),
        (TRAINJOB | TORCHRUN, RankInfo("torchrun", 3, 4, 1, 2, 1, 2)),
        (PYTORCHJOB | TORCHRUN, RankInfo("torchrun", 3, 4, 1, 2, 1, 2)),
        (MPIJOB, RankInfo("mpirun", 1, 2, 1, 2)),
        # Processes that a script in the pod starts.
        (OLD_PYTORCHJOB | {"LOCAL_RANK": "1"}, RankInfo("env", 1, 2, 1)),
        (OLD_PYTORCHJOB | {"MASTER_ADDR": "localhost"}, RankInfo("env", 1, 2, 1)),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, RankInfo("none", 0, 1, 0, 1, 0, 1)),
        # Redundant and incomplete variables.
        (HOROVODRUN | {"RANK": "2", "WORLD_SIZE": "3"}, RankInfo("horovodrun", 2, 3, 0, 1)),
        (MPIRUN | BY_HAND, RankInfo("mpirun", 1, 2, 1, 2)),
        (SRUN | {"RANK": "3", "WORLD_SIZE": "4"}, RankInfo("srun", 3, 4, 1, None, 1)),
        (SRUN | {"RANK": "", "WORLD_SIZE": "2"}, RankInfo("srun", 3, 4, 1, None, 1)),
        (SRUN | {"WORLD_SIZE": "2"}, RankInfo("srun", 3, 4, 1, None, 1)),
    ],
    ids=[
        "torchrun", "horovodrun", "mpirun", "mpiexec", "srun", "by hand", "by hand with local rank", "nothing",
        "in an allocation", "torchrun in srun", "horovodrun in srun", "mpirun in srun", "mpiexec in srun",
        "srun with PMI", "torchrun in mpiexec", "torchrun in mpirun", "torchrun in horovodrun", "mvapich2",
        "mvapich 3", "jsrun", "jsrun with Spectrum MPI", "flux", "flux in srun", "pals in srun",
        "mpirun in flux", "pals", "PMI with one rank", "PyTorchJob", "older PyTorchJob",
        "TrainJob", "torchrun in a TrainJob", "torchrun in a PyTorchJob", "MPIJob", "ranks in a pod",
        "ranks at the address of the pod", "a pod", "horovodrun with RANK",
        "mpirun with RANK", "srun with RANK",
        "srun with an empty RANK", "srun with WORLD_SIZE only",
    ],
)  # fmt: skip
def test_rank_is_detected_for_every_launcher(variables: dict[str, str], expected: RankInfo) -> None:
    found = detect(variables)
    assert found == RankInfo(**{**vars(expected), "evidence": found.evidence})
    for item in found.evidence:
        name, _, value = item.partition("=")
        assert variables[name] == value
    assert bool(found.evidence) == (expected.launcher != "none")
    assert len(set(found.evidence)) == len(found.evidence)


def test_horovod_variables_set_by_unitrain_do_not_change_the_detected_launcher() -> None:
    variables = BY_HAND | {environment.HOROVOD_SET_BY_UNITRAIN: "1", "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    assert detect(variables) == detect(BY_HAND)


def test_evidence_lists_the_variables_that_were_used() -> None:
    assert detect(SRUN | HOROVODRUN).evidence == (
        "HOROVOD_RANK=2", "HOROVOD_SIZE=3", "HOROVOD_LOCAL_RANK=0", "HOROVOD_LOCAL_SIZE=1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "1"},
            "RANK is set, but WORLD_SIZE is not. Set WORLD_SIZE too, or clear RANK with: unset RANK",
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "2"},
            "RANK must be a whole number, got 'one'. Set it, or clear it with: unset RANK",
        ),
        (
            {"RANK": "²", "WORLD_SIZE": "2"},
            "RANK must be a whole number, got '²'. Set it, or clear it with: unset RANK",
        ),
        (
            {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"},
            "SLURM_STEP_ID is set, but SLURM_STEP_NUM_TASKS is not. Set SLURM_STEP_NUM_TASKS too, or "
            "clear SLURM_STEP_ID with: unset SLURM_STEP_ID",
        ),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": ""},
            "OMPI_COMM_WORLD_LOCAL_SIZE must be a whole number, got ''. Set it, or clear it with: "
            "unset OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "0"},
            "WORLD_SIZE must be at least 1, got 0. Set it, or clear it with: unset RANK WORLD_SIZE",
        ),
        (
            TORCHRUN | {"LOCAL_RANK": "-1"},
            "LOCAL_RANK must be a whole number, got '-1'. Set it, or clear it with: unset LOCAL_RANK",
        ),
        (
            HOROVODRUN | {"HOROVOD_SIZE": "2"},
            "HOROVOD_RANK=2 is out of range for HOROVOD_SIZE=2: ranks are 0 to 1. Set both, or clear them with: "
            "unset HOROVOD_RANK HOROVOD_SIZE",
        ),
        (
            # Another program starts two processes in a shell of `srun --pty bash`.
            SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"} | {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=2 contradict SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1 of srun. Clear the "
            "stale variables: unset RANK WORLD_SIZE, or, if srun has not started this process: "
            "unset SLURM_STEP_ID",
        ),
        (
            MPIRUN | {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=2 contradict OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2 of mpirun. Clear "
            "the stale variables: unset RANK WORLD_SIZE, or, if mpirun has not started this process: "
            "unset OMPI_COMM_WORLD_RANK",
        ),
        (
            HOROVODRUN | {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK=0 and WORLD_SIZE=1 contradict HOROVOD_RANK=2 and HOROVOD_SIZE=3 of horovodrun. Clear the stale "
            "variables: unset RANK WORLD_SIZE, or, if horovodrun has not started this process: "
            "unset HOROVOD_RANK",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "PMI_RANK is set, but PMI_LOCAL_RANK is not. Set PMI_LOCAL_RANK too, or clear PMI_RANK with: "
            "unset PMI_RANK",
        ),
        (
            {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-a-1@1"},
            "PMIX_RANK=1 shows that a PMIx launcher has started this process, but no variable contains the number "
            "of ranks. Set the rank, size and local rank in the command of every rank: "
            "env RANK=$PMIX_RANK WORLD_SIZE=<ranks> LOCAL_RANK=<rank on its host> python ..., or clear it with: "
            "unset PMIX_RANK",
        ),
        (
            PYTORCHJOB | {"PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"},
            "PET_NPROC_PER_NODE=4 requests 4 processes in this pod, but no launcher has started them. "
            "Start the script with torchrun, which reads this variable: torchrun train.py",
        ),
    ],
    ids=[
        "missing",
        "not a number",
        "not an ASCII digit",
        "missing under srun",
        "empty",
        "zero ranks",
        "negative",
        "too large",
        "spawned in srun",
        "spawned in mpirun",
        "stale under horovodrun",
        "PMI without local rank",
        "PMIx only",
        "pod for several processes",
    ],
)
def test_invalid_variables_are_reported_with_a_fix(variables: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironmentVariableError) as caught:
        detect(variables)
    assert str(caught.value) == message


def get_rank_and_size(backend: Backend) -> tuple[int, int, int]:
    return backend.rank, backend.size, backend.local_rank


def test_job_started_inside_other_jobs_ignores_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = SRUN | MPIRUN | HOROVODRUN | TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    assert run_ranks(get_rank_and_size, 1, backend="local") == [(0, 1, 0)]
    assert run_ranks(get_rank_and_size, 2, backend="ddp") == [(0, 2, 0), (1, 2, 1)]
    kept = environment.without_launcher_variables()
    assert {name for name in outer if name in kept} == {"SLURM_JOB_ID", "SLURM_NTASKS"}  # required by mpirun and srun


def test_pods_use_the_rendezvous_address_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("PET_MASTER_ADDR", TRAINJOB["PET_MASTER_ADDR"])
    assert environment.get_variable("MASTER_ADDR") == TRAINJOB["PET_MASTER_ADDR"]
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert environment.get_variable("MASTER_ADDR") == "10.0.0.1"


def test_launch_in_a_pod_ignores_the_variables_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, torchrun would read PET_NNODES and wait indefinitely for the other pods."""
    for name, value in PYTORCHJOB.items():
        monkeypatch.setenv(name, value)
    assert environment.max_pods() == 2
    kept = environment.without_rank_variables()
    assert {name for name in PYTORCHJOB if name in kept} == {
        "PYTHONUNBUFFERED", "MASTER_ADDR", "MASTER_PORT", "KUBERNETES_SERVICE_HOST",
    }  # fmt: skip
    monkeypatch.setenv("PET_NNODES", "1:3")
    assert environment.max_pods() == 3
    monkeypatch.setenv("PET_NNODES", "")
    assert environment.max_pods() == 1
    assert "KUBERNETES_SERVICE_HOST" in environment.without_launcher_variables()


def test_export_defaults_keeps_existing_variables_and_export_replaces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNITRAIN_A", "UNITRAIN_B"):
        monkeypatch.setenv(name, "of the user")
    monkeypatch.setenv("UNITRAIN_C", "")
    monkeypatch.setenv("UNITRAIN_EMPTY", "")
    environment.export_defaults({"UNITRAIN_A": "ours", "UNITRAIN_EMPTY": "ours"})
    assert environment.get_variable("UNITRAIN_EMPTY") == "ours"
    environment.export({"UNITRAIN_B": "ours"})
    assert [environment.get_variable(f"UNITRAIN_{letter}") for letter in "ABCD"] == ["of the user", "ours", None, None]
    assert environment.copy()["UNITRAIN_B"] == "ours"


@pytest.mark.parametrize(("value", "is_enabled"), [("1", True), ("0", False), ("", False)])
def test_debug_checks_are_enabled_by_1(value: str, is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_DEBUG", value)
    assert environment.is_debug_enabled() is is_enabled


@pytest.mark.parametrize("variable", ["UNITRAIN_DEBUG", "UNITRAIN_POLLING"])
@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_init_rejects_values_other_than_0_and_1(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(EnvironmentVariableError, match=f"{variable} must be 0 or 1, got '{value}'. Use: export "):
        unitrain.init("local", device="cpu")


@pytest.mark.parametrize(
    ("value", "local_size", "is_polling"),
    [("", 4, True), ("", 5, False), ("1", 5, True), ("0", 1, False)],
)
def test_ranks_poll_by_default_if_the_host_has_a_core_for_each(
    value: str, local_size: int, is_polling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("UNITRAIN_POLLING", value)
    assert (environment.max_polling_seconds(local_size) > 0) is is_polling


CHECK_STEP_SHELL = """
from unitrain.bootstrap import environment
from unitrain.errors import EnvironmentVariableError

try:
    environment.check_not_in_step_shell(environment.detect())
    print("accepted")
except EnvironmentVariableError as error:
    print(error)
"""


def run_in_terminal(command: list[str], variables: dict[str, str]) -> str:
    """Run a command in a new controlling terminal, like `srun --pty`, and return its output."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: os.login_tty(terminal),
        pass_fds=[terminal],
    )
    os.close(terminal)
    output = b""
    try:
        while received := os.read(controller, 4096):
            output += received
    except OSError:  # the process has closed the terminal
        pass
    finally:
        os.close(controller)
        process.wait(60)
    return output.decode()


def test_command_in_the_shell_of_srun_pty_is_not_accepted_as_a_rank() -> None:
    step = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "4711"}
    program = [sys.executable, "-c", CHECK_STEP_SHELL]
    shell = ["bash", "--norc", "-i", "-c", f"{shlex.join(program)}; true"]
    output = run_in_terminal(shell, step)
    assert "SLURM_STEP_NUM_TASKS=8 belongs to the shell of 'srun --pty', whose other 7 tasks do not" in output
    assert "unitrain launch -np 8 train.py" in output
    # These are accepted: a single task, a program started by srun, and a script started by srun.
    assert "accepted" in run_in_terminal(shell, step | {"SLURM_STEP_NUM_TASKS": "1"})
    assert "accepted" in run_in_terminal(program, step)
    assert "accepted" in run_in_terminal(["bash", "-c", f"{shlex.join(program)}; true"], step)

"""Where a process finds itself: by what each launcher sets, as recorded from real runs."""

from __future__ import annotations

import pytest

from unitrain import environment
from unitrain.backends.base import Backend
from unitrain.environment import Placement, detect
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, Placement("torchrun", 3, 4, 1, 2, 1, 2)),
        (HOROVODRUN, Placement("horovodrun", 2, 3, 0, 1)),
        (MPIRUN, Placement("mpirun", 1, 2, 1, 2)),
        (MPIEXEC, Placement("mpiexec", 1, 2, 1, 2)),
        (SRUN, Placement("srun", 3, 4, 1, None, 1)),
        (BY_HAND, Placement("env", 1, 2, 1)),
        (BY_HAND | {"LOCAL_RANK": "0"}, Placement("env", 1, 2, 0)),
        ({}, Placement("none", 0, 1, 0, 1, 0, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, Placement("none", 0, 1, 0, 1, 0, 1)),
        # One launcher inside another: the inner one started this process.
        (SRUN | TORCHRUN, Placement("torchrun", 3, 4, 1, 2, 1, 2)),
        (SRUN | HOROVODRUN, Placement("horovodrun", 2, 3, 0, 1)),
        (SRUN | MPIRUN, Placement("mpirun", 1, 2, 1, 2)),
        (SRUN | MPIEXEC, Placement("mpiexec", 1, 2, 1, 2)),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}, Placement("srun", 3, 4, 1, None, 1)),
        (MPIEXEC | TORCHRUN, Placement("torchrun", 3, 4, 1, 2, 1, 2)),
        (MPIRUN | TORCHRUN, Placement("torchrun", 3, 4, 1, 2, 1, 2)),
        (HOROVODRUN | TORCHRUN, Placement("torchrun", 3, 4, 1, 2, 1, 2)),
        # The same said twice, and too little said to be a place.
        (HOROVODRUN | {"RANK": "2", "WORLD_SIZE": "3"}, Placement("horovodrun", 2, 3, 0, 1)),
        (MPIRUN | BY_HAND, Placement("mpirun", 1, 2, 1, 2)),
        (SRUN | {"RANK": "3", "WORLD_SIZE": "4"}, Placement("srun", 3, 4, 1, None, 1)),
        (SRUN | {"RANK": "", "WORLD_SIZE": "2"}, Placement("srun", 3, 4, 1, None, 1)),
        (SRUN | {"WORLD_SIZE": "2"}, Placement("srun", 3, 4, 1, None, 1)),
    ],
    ids=[
        "torchrun", "horovodrun", "mpirun", "mpiexec", "srun", "by hand", "by hand with local rank", "nothing",
        "in an allocation", "torchrun in srun", "horovodrun in srun", "mpirun in srun", "mpiexec in srun",
        "srun with PMI", "torchrun in mpiexec", "torchrun in mpirun", "torchrun in horovodrun", "horovodrun said twice",
        "mpirun said twice", "srun said twice",
        "srun and an empty RANK", "srun and no RANK",
    ],
)  # fmt: skip
def test_every_launcher_is_recognised(variables: dict[str, str], expected: Placement) -> None:
    found = detect(variables)
    assert found == Placement(**{**vars(expected), "evidence": found.evidence})
    for item in found.evidence:
        name, _, value = item.partition("=")
        assert variables[name] == value
    assert bool(found.evidence) == (expected.launcher != "none")


def test_a_horovod_that_unitrain_leads_does_not_change_who_started_the_process() -> None:
    led = BY_HAND | {environment.LED_BY_UNITRAIN: "1", "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    assert detect(led) == detect(BY_HAND)


def test_the_evidence_names_what_was_believed() -> None:
    assert detect(SRUN | HOROVODRUN).evidence == (
        "HOROVOD_RANK=2", "HOROVOD_SIZE=3", "HOROVOD_LOCAL_RANK=0", "HOROVOD_LOCAL_SIZE=1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "1"},
            "RANK is set, but WORLD_SIZE is not. Set it too, or clear the other with: unset RANK",
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
            "SLURM_STEP_ID is set, but SLURM_STEP_NUM_TASKS is not. Set it too, or clear the other with: "
            "unset SLURM_STEP_ID",
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
            "HOROVOD_RANK=2 does not fit HOROVOD_SIZE=2: ranks go from 0 to 1. Set both, or clear them with: "
            "unset HOROVOD_RANK HOROVOD_SIZE",
        ),
        (
            # A shell from `srun --pty bash`, in which something else starts two processes.
            SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"} | {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=2 contradict SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1 of srun. Clear those that "
            "are left over: unset RANK WORLD_SIZE, or, where srun did not start this process itself: "
            "unset SLURM_STEP_ID",
        ),
        (
            MPIRUN | {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=2 contradict OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2 of mpirun. Clear "
            "those that are left over: unset RANK WORLD_SIZE, or, where mpirun did not start this process itself: "
            "unset OMPI_COMM_WORLD_RANK",
        ),
        (
            HOROVODRUN | {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK=0 and WORLD_SIZE=1 contradict HOROVOD_RANK=2 and HOROVOD_SIZE=3 of horovodrun. Clear those that are "
            "left over: unset RANK WORLD_SIZE, or, where horovodrun did not start this process itself: "
            "unset HOROVOD_RANK",
        ),
    ],
    ids=[
        "missing",
        "not a number",
        "a digit but no number",
        "missing under srun",
        "empty",
        "no ranks",
        "negative",
        "too large",
        "a spawner in srun",
        "a spawner in mpirun",
        "leftovers under horovodrun",
    ],
)
def test_variables_that_cannot_be_believed(variables: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironmentVariableError) as caught:
        detect(variables)
    assert str(caught.value) == message


def place(backend: Backend) -> tuple[int, int, int]:
    return backend.rank, backend.size, backend.local_rank


def test_a_job_started_inside_others_has_places_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = SRUN | MPIRUN | HOROVODRUN | TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    assert run_ranks(place, 1, backend="local") == [(0, 1, 0)]
    assert run_ranks(place, 2, backend="ddp") == [(0, 2, 0), (1, 2, 1)]
    kept = environment.without_launcher()
    assert {name for name in outer if name in kept} == {"SLURM_JOB_ID", "SLURM_NTASKS"}  # which mpirun and srun ask for


def test_reading_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNITRAIN_A", "UNITRAIN_B"):
        monkeypatch.setenv(name, "of the user")
    monkeypatch.setenv("UNITRAIN_C", "")
    environment.export_defaults({"UNITRAIN_A": "ours"})
    environment.export({"UNITRAIN_B": "ours"})
    assert [environment.setting(f"UNITRAIN_{letter}") for letter in "ABCD"] == ["of the user", "ours", None, None]
    assert environment.inherited()["UNITRAIN_B"] == "ours"

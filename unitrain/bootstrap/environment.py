"""Which launcher started this process and where it put it; the only reader, and writer, of the process environment.

When one launcher runs inside another, as in `srun torchrun`, the innermost wins: it is the one that started this
process. The table below is in that order. An Open MPI or Slurm variable that an outer launcher left behind is never
mixed in. `unitrain.bootstrap.environment.detect().evidence` tells which variables were believed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unitrain.errors import EnvironmentVariableError


@dataclass(frozen=True)
class RankInfo:
    """Where a launcher put this process, in the words of DESIGN; what the launcher does not tell is None.

    `launcher` is "torchrun", "horovodrun", "mpirun" (Open MPI's), "mpiexec" (MPICH's, Intel MPI's, PALS'), "mpirun_rsh"
    (MVAPICH's), "jsrun" (LSF's), "srun", "flux", "kubernetes" (a pod of a PyTorchJob or TrainJob, in which nothing
    starts more processes), "env" (somebody set RANK and WORLD_SIZE) or "none". `evidence` names the variables that were
    believed, as "RANK=0".
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    evidence: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Who said so, for a sentence that the user reads: the launcher, or "RANK and WORLD_SIZE"."""
        return {"env": "RANK and WORLD_SIZE", "kubernetes": "Kubernetes"}.get(self.launcher, self.launcher)


@dataclass(frozen=True)
class _Variables:
    """What a launcher sets: `marker` tells that it was there, the others name the variable that holds each number.

    Without a variable for local_rank it is 0, each process being alone on its host, or the rank, under "env".
    """

    launcher: str
    marker: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node_rank: str | None = None
    num_nodes: str | None = None


# Set where unitrain tells Horovod its place as horovodrun would: what started the process stays who it was.
LED_BY_UNITRAIN = "UNITRAIN_LEADS_HOROVOD"

_LAUNCHERS = (
    _Variables(
        "torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    ),
    # Horovod's cross_rank is not the number of the node when hosts are uneven, so node_rank is left to be agreed.
    _Variables("horovodrun", "HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE"),
    # docs.open-mpi.org, "Environment variables set for MPI applications". The ranks of a Kubernetes MPIJob have them
    # too, and those that jsrun starts with Spectrum MPI.
    _Variables(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MVAPICH2's, and what MVAPICH 3 made of its names.
    *(
        _Variables(
            "mpirun_rsh", f"{name}_COMM_WORLD_RANK", f"{name}_COMM_WORLD_RANK", f"{name}_COMM_WORLD_SIZE",
            f"{name}_COMM_WORLD_LOCAL_RANK", f"{name}_COMM_WORLD_LOCAL_SIZE",
        )
        for name in ("MV2", "MVP")
    ),
    # LSF's Job Step Manager.
    _Variables(
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    # MPICH's and Intel MPI's (pmodels/mpich#2371). The marker is theirs alone: srun may set PMI_RANK too, and it may
    # have started them.
    _Variables("mpiexec", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Flux and HPE's PALS may run in a step of Slurm's, whose variables their tasks then have too. Flux sets PMI_RANK.
    _Variables("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", None, None,
    "FLUX_JOB_NNODES"),
    _Variables("mpiexec", "PALS_RANKID", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    # A process in an allocation is a task of a step only when srun started it.
    _Variables("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, "SLURM_NODEID"),
    # Others that speak PMI.
    _Variables("mpiexec", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    # A pod of Kubeflow's PyTorchJob or TrainJob, told for torchrun (kubeflow/trainer#1840), which has not come.
    _Variables("kubernetes", "PET_NODE_RANK", "PET_NODE_RANK", "PET_NNODES", None, None, "PET_NODE_RANK", "PET_NNODES"),
    # A pod of an older PyTorchJob: there RANK is the pod's, and every pod is a host.
    _Variables("kubernetes", "KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", None, None, "RANK", "WORLD_SIZE"),
    _Variables("env", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)  # fmt: skip
# Told under a second name, for torchrun to read: the address at which the pods of a TrainJob meet.
_ALSO_CALLED = {"MASTER_ADDR": "PET_MASTER_ADDR", "MASTER_PORT": "PET_MASTER_PORT"}
# The name of a job that `unitrain launch` starts again when it fails, the same in every attempt.
JOB = "UNITRAIN_JOB"
# Where the `unitrain launch` that does so is reached.
SUPERVISOR = "UNITRAIN_SUPERVISOR"
# What identifies a job, the scheduler's name for it first.
_JOB_IDS = (
    ("SLURM_JOB_ID", "Slurm job"), ("LSB_JOBID", "LSF job"), ("PBS_JOBID", "PBS job"), ("FLUX_JOB_ID", "Flux job"),
    (JOB, "unitrain launch"), ("TORCHELASTIC_RUN_ID", "torchrun run"),
)  # fmt: skip
# The key with which the processes of a job sign what they send each other; the same for all ranks of an attempt.
JOB_KEY = "UNITRAIN_JOB_KEY"
# How many ranks such a job may have, as "2:8", where that may change from one attempt to the next.
ELASTIC = "UNITRAIN_ELASTIC"
# Set to 1, ranks also agree on the gradients that they are about to send.
DEBUG = "UNITRAIN_DEBUG"
# The terminal of `unitrain launch`, for ranks whose output goes through the launcher.
TERMINAL = "UNITRAIN_TERMINAL"
# What launchers tell their processes beside that, by the start of its name. What a scheduler or a user tells a
# launcher, as SLURM_JOB_ID, is not among it.
_TOLD_BESIDE = (
    "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS_", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS",
    JOB, JOB_KEY, SUPERVISOR, ELASTIC,
    LED_BY_UNITRAIN, "OMPI_COMM", "OMPI_ARGV", "OMPI_UNIVERSE_SIZE", "OMPI_NUM_APP_CTX", "OMPI_APP_CTX_",
    "OMPI_FIRST_RANKS", "OMPI_FILE_LOCATION", "OMPI_MCA_initial_wdir", "OMPI_MCA_ess", "OMPI_MCA_orte_",
    "OMPI_MCA_pmix", "PMIX_", "PMI_", "HYDI_", "MV2_COMM_WORLD_", "MVP_COMM_WORLD_", "JSM_", "FLUX_TASK_", "PALS_",
    "PET_",
)  # fmt: skip


def detect(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Return where this process was put, by its environment or by `environ`.

    Raises EnvironmentVariableError for a variable that is missing, not a number, or contradicts another; so do RANK and
    WORLD_SIZE when they contradict the launcher, because a process started by something else inside a job of that
    launcher would otherwise take the place of the job's own process, alone.
    """
    environ = os.environ if environ is None else environ
    for variables in _LAUNCHERS:
        if variables.launcher == "horovodrun" and LED_BY_UNITRAIN in environ:
            continue
        if variables.marker == "KUBERNETES_SERVICE_HOST" and not _is_alone_in_its_pod(environ):
            continue
        if variables.marker in environ:
            if variables.marker == "PET_NODE_RANK":
                _check_one_process_a_pod(environ)
            rank_info = _placement(variables, environ)
            _check_no_other_spawner(rank_info, variables, environ)
            return rank_info
    if "PMIX_RANK" in environ:
        # A single process would take itself for the only one, and so would all others of the job.
        raise EnvironmentVariableError(
            f"PMIX_RANK={environ['PMIX_RANK']} says that a launcher of PMIx started this process, but no variable says "
            "how many there are. Tell every rank, in the command that it runs: "
            "env RANK=$PMIX_RANK WORLD_SIZE=<ranks> LOCAL_RANK=<number on its host> python ..., or clear it with: "
            "unset PMIX_RANK"
        )
    return RankInfo("none", rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1)


def setting(name: str) -> str | None:
    """Return an environment variable, or None when it is unset or empty."""
    return os.environ.get(name) or os.environ.get(_ALSO_CALLED.get(name, "")) or None


def pass_terminal_on() -> None:
    """Set the variable by which ranks on this host find the terminal that this process prints errors to, if any."""
    try:
        os.environ[TERMINAL] = os.ttyname(2)
    except OSError:
        os.environ.pop(TERMINAL, None)


def job() -> str | None:
    """Return the name of this job if it is started again when it fails; all attempts have the same."""
    return setting(JOB)


def job_name() -> str | None:
    """Return a name that identifies this job to a person and is the same in every attempt at it; None without one."""
    for variable, kind in _JOB_IDS:
        value = setting(variable)
        if value is not None and value != "none":  # torchrun's run id, where nobody has given one
            return f"{kind} {value}"
    return None


def elastic() -> bool:
    """Return whether this job may have another number of ranks when it is started again."""
    return setting(ELASTIC) is not None


def debugs() -> bool:
    """Return whether UNITRAIN_DEBUG asks for checks that cost time. Raises EnvironmentVariableError unless 0 or 1."""
    value = setting(DEBUG) or "0"
    if value not in ("0", "1"):
        raise EnvironmentVariableError(f"{DEBUG} must be 0 or 1, got {value!r}. Use: export {DEBUG}=1")
    return value == "1"


def inherited() -> dict[str, str]:
    """Return a copy of the whole environment, for a process to be started."""
    return dict(os.environ)


def without_ranks() -> dict[str, str]:
    """Return a copy of the environment without the RANK and WORLD_SIZE that a cluster gives to every container, as
    Kubernetes' PyTorchJob does, and what it tells torchrun: the launcher that is about to start says its own."""
    return {name: value for name, value in without_pod().items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def without_pod() -> dict[str, str]:
    """Return a copy of the environment without what a PyTorchJob or TrainJob tells the torchrun of each pod."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")}


def pods() -> int:
    """Return how many pods at most share the PyTorchJob or TrainJob that this process is in, or 1 outside of one."""
    number = os.environ.get("PET_NNODES", "").rpartition(":")[2]
    return int(number) if number.isascii() and number.isdecimal() else 1


def without_launcher() -> dict[str, str]:
    """Return a copy of the environment without what a launcher has told this process, for a job to be started in it."""
    told = {name for variables in _LAUNCHERS for name in vars(variables).values()} - {"KUBERNETES_SERVICE_HOST"}
    return {name: value for name, value in os.environ.items() if name not in told and not name.startswith(_TOLD_BESIDE)}


def replace(values: Mapping[str, str]) -> None:
    """Give this process another environment, for what it begins anew as."""
    os.environ.clear()
    os.environ.update(values)


def export(values: Mapping[str, str]) -> None:
    """Set variables for libraries that read them."""
    os.environ.update(values)


def export_defaults(values: Mapping[str, str]) -> None:
    """Set those of the variables that the user has not."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def _is_alone_in_its_pod(environ: Mapping[str, str]) -> bool:
    """Return whether RANK counts the pods of a job. Ranks that one pod's script starts know their LOCAL_RANK, or meet
    at the pod's own address."""
    address = environ.get("MASTER_ADDR", "")
    told = bool(address and environ.get("RANK") and environ.get("WORLD_SIZE"))
    return told and "LOCAL_RANK" not in environ and address != "localhost" and not address.startswith("127.")


def _check_one_process_a_pod(environ: Mapping[str, str]) -> None:
    """Raise EnvironmentVariableError in a pod for more processes, which torchrun is to start."""
    processes = environ.get("PET_NPROC_PER_NODE", "1")
    if processes not in ("1", "auto", "gpu", "cpu", ""):
        raise EnvironmentVariableError(
            f"PET_NPROC_PER_NODE={processes} says that {processes} processes share this pod, but nothing has started "
            "them. Start the script with torchrun, which reads it, as in: torchrun train.py"
        )


def _check_no_other_spawner(rank_info: RankInfo, variables: _Variables, environ: Mapping[str, str]) -> None:
    rank, size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if not rank or not size or (rank, size) == (str(rank_info.rank), str(rank_info.size)):
        return
    raise EnvironmentVariableError(
        f"RANK={rank} and WORLD_SIZE={size} contradict {variables.rank}={rank_info.rank} and "
        f"{variables.size}={rank_info.size} of {rank_info.launcher}. Clear those that are left over: "
        f"unset RANK WORLD_SIZE, or, where {rank_info.launcher} did not start this process itself: "
        f"unset {variables.marker}"
    )


def _placement(variables: _Variables, environ: Mapping[str, str]) -> RankInfo:
    evidence: list[str] = []

    def number(name: str | None, default: int | None = None) -> int | None:
        if name is None or (name not in environ and default is not None):
            return default
        value = environ.get(name)
        if value is None:
            raise EnvironmentVariableError(
                f"{variables.marker} is set, but {name} is not. Set it too, or clear the other with: "
                f"unset {variables.marker}"
            )
        if not (value.isascii() and value.isdecimal()):
            raise EnvironmentVariableError(
                f"{name} must be a whole number, got {value!r}. Set it, or clear it with: unset {name}"
            )
        evidence.append(f"{name}={value}")
        return int(value)

    rank, size = number(variables.rank) or 0, number(variables.size) or 0
    alone = variables.local_rank is None or size == 1
    # Without a local_rank all processes are taken to be on one host, as torch's own env:// does.
    local_rank = (
        number(variables.local_rank, default=rank if variables.launcher == "env" else 0 if alone else None) or 0
    )
    if size < 1:
        raise EnvironmentVariableError(
            f"{variables.size} must be at least 1, got {size}. Set it, or clear it with: "
            f"unset {variables.rank} {variables.size}"
        )
    if rank >= size:
        raise EnvironmentVariableError(
            f"{variables.rank}={rank} does not fit {variables.size}={size}: ranks go from 0 to {size - 1}. "
            f"Set both, or clear them with: unset {variables.rank} {variables.size}"
        )
    optional = {
        name: number(variable)
        for name, variable in (
            ("local_size", variables.local_size),
            ("node_rank", variables.node_rank),
            ("num_nodes", variables.num_nodes),
        )
        if variable is not None and variable in environ
    }
    return RankInfo(variables.launcher, rank, size, local_rank, **optional, evidence=tuple(dict.fromkeys(evidence)))

"""Environment variables of this process: detection of the launcher and of this process's rank, and job settings.

Other modules, except `unitrain.launchers`, read and write the environment only through this module. If launchers are
nested, as in `srun torchrun`, the innermost one is used, because it started this process; `_LAUNCHERS` lists inner
launchers before outer ones. Variables of outer launchers, such as Open MPI or Slurm, are ignored. `detect().evidence`
lists the variables that were used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unitrain.errors import EnvironmentVariableError


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process and the launcher that started it. Optional values are None if the launcher does not provide
    them.

    `launcher` is "torchrun", "horovodrun", "mpirun" (Open MPI), "mpiexec" (MPICH, Intel MPI, PALS), "mpirun_rsh"
    (MVAPICH), "jsrun" (LSF), "srun", "flux", "kubernetes" (a pod of a PyTorchJob or TrainJob, without torchrun), "env"
    (RANK and WORLD_SIZE were set by another program), "init_process_group" (the arguments of torch's function) or
    "none". `evidence` lists the variables that were used, as "RANK=0".
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
        """Source of the rank and size, for messages: the launcher, or "RANK and WORLD_SIZE"."""
        return {"env": "RANK and WORLD_SIZE", "kubernetes": "Kubernetes"}.get(self.launcher, self.launcher)


@dataclass(frozen=True)
class _Variables:
    """Names of the environment variables that a launcher sets; `marker` identifies the launcher.

    If the variable of the local rank is not set, the local rank is 0 in a job of one rank and under a launcher without
    such a variable (one process per host). For "env", it is equal to the rank, because all processes are assumed to run
    on one host.
    """

    launcher: str
    marker: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    node_rank: str | None = None
    num_nodes: str | None = None


# Marks Horovod variables that unitrain has set, which do not indicate horovodrun as the launcher.
HOROVOD_SET_BY_UNITRAIN = "UNITRAIN_SETS_HOROVOD"

_LAUNCHERS = (
    _Variables(
        "torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    ),
    # Horovod's cross_rank is not the node rank if hosts have different numbers of ranks (see rendezvous.py).
    _Variables("horovodrun", "HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE"),
    # docs.open-mpi.org, "Environment variables set for MPI applications". Ranks of a Kubernetes MPIJob, and ranks that
    # jsrun starts with Spectrum MPI, also have these variables.
    _Variables(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MVAPICH2 and MVAPICH 3.
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
    # MPICH and Intel MPI (pmodels/mpich#2371). PMI_RANK is not the marker, because srun may set it too.
    _Variables("mpiexec", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Flux and HPE's PALS may run in a Slurm step, so their tasks also have Slurm's variables. Flux also sets PMI_RANK,
    # so it comes before the launchers that PMI_RANK identifies.
    _Variables("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", None, None,
    "FLUX_JOB_NNODES"),
    _Variables("mpiexec", "PALS_RANKID", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    # Within a Slurm allocation, only processes that srun has started have a step.
    _Variables("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, "SLURM_NODEID"),
    # Other launchers that use PMI.
    _Variables("mpiexec", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    # A pod of Kubeflow's PyTorchJob or TrainJob in which torchrun does not run, although the variables for it are set
    # (kubeflow/trainer#1840).
    _Variables("kubernetes", "PET_NODE_RANK", "PET_NODE_RANK", "PET_NNODES", None, None, "PET_NODE_RANK", "PET_NNODES"),
    # A pod of an older PyTorchJob: RANK is the index of the pod, and every pod is a host.
    _Variables("kubernetes", "KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", None, None, "RANK", "WORLD_SIZE"),
    _Variables("env", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)  # fmt: skip
# Alternative names of variables. In the pods of a TrainJob, the rendezvous address has these names, for torchrun.
_ALTERNATIVE_NAMES = {"MASTER_ADDR": "PET_MASTER_ADDR", "MASTER_PORT": "PET_MASTER_PORT"}
# ID of a job that `unitrain launch` supervises, equal in all attempts.
JOB_ID_VARIABLE = "UNITRAIN_JOB"
# Address, host:port, of the supervisor in `unitrain launch`.
SUPERVISOR_VARIABLE = "UNITRAIN_SUPERVISOR"
# Variables that identify a job, with their descriptions. Variables of schedulers come first.
_JOB_IDS = (
    ("SLURM_JOB_ID", "Slurm job"), ("LSB_JOBID", "LSF job"), ("PBS_JOBID", "PBS job"), ("FLUX_JOB_ID", "Flux job"),
    (JOB_ID_VARIABLE, "unitrain launch"), ("TORCHELASTIC_RUN_ID", "torchrun run"),
)  # fmt: skip
# Key that signs the messages between processes of a job, equal on all ranks of an attempt.
JOB_KEY_VARIABLE = "UNITRAIN_JOB_KEY"
# Minimum and maximum number of ranks of an elastic job, as "2:8".
ELASTIC_VARIABLE = "UNITRAIN_ELASTIC"
# Folder in shared memory for the checkpoints of a supervised job, on the host of rank 0.
SHARED_MEMORY_FOLDER_VARIABLE = "UNITRAIN_MEMORY_FOLDER"
# Reason why there is no such folder, although rank 0 of the supervised job runs on the host of `unitrain launch`.
SHARED_MEMORY_ERROR_VARIABLE = "UNITRAIN_MEMORY_FOLDER_ERROR"
# Port and address of the metrics endpoint of rank 0, from `unitrain launch --metrics-port`.
METRICS_PORT_VARIABLE, METRICS_ADDRESS_VARIABLE = "UNITRAIN_METRICS_PORT", "UNITRAIN_METRICS_ADDRESS"
# "1" adds a consistency check to every gradient bucket; "0" or unset omits it.
DEBUG_VARIABLE = "UNITRAIN_DEBUG"
# "1": a wait for other ranks polls before it sleeps; "0": it sleeps immediately.
POLLING_VARIABLE = "UNITRAIN_POLLING"
# Folder in which every rank writes its flight recorder after a timeout or failure. Without it, no files are written.
FLIGHT_RECORD_FOLDER_VARIABLE = "UNITRAIN_FLIGHT_RECORD_DIR"
# Terminal of `unitrain launch`, for ranks whose output is redirected by the launcher.
TERMINAL_VARIABLE = "UNITRAIN_TERMINAL"
# Prefixes of variables that launchers set for their ranks, in addition to the names in _LAUNCHERS. Variables that a
# scheduler or a user sets for a launcher, such as SLURM_JOB_ID, are not included.
_LAUNCHER_PREFIXES = (
    "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS_", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS",
    JOB_ID_VARIABLE, JOB_KEY_VARIABLE, SUPERVISOR_VARIABLE, ELASTIC_VARIABLE, SHARED_MEMORY_FOLDER_VARIABLE,
    METRICS_PORT_VARIABLE, METRICS_ADDRESS_VARIABLE,
    HOROVOD_SET_BY_UNITRAIN, "OMPI_COMM", "OMPI_ARGV", "OMPI_UNIVERSE_SIZE", "OMPI_NUM_APP_CTX", "OMPI_APP_CTX_",
    "OMPI_FIRST_RANKS", "OMPI_FILE_LOCATION", "OMPI_MCA_initial_wdir", "OMPI_MCA_ess", "OMPI_MCA_orte_",
    "OMPI_MCA_pmix", "PMIX_", "PMI_", "HYDI_", "MV2_COMM_WORLD_", "MVP_COMM_WORLD_", "JSM_", "FLUX_TASK_", "PALS_",
    "PET_",
)  # fmt: skip


def detect(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Return this process's rank and launcher, from the environment or from `environ`.

    Raises EnvironmentVariableError if a variable is missing, is not a number, or contradicts another one. RANK and
    WORLD_SIZE must match the launcher's variables. Without this check, processes that a rank starts with a different
    RANK and WORLD_SIZE would use the rank of their parent.
    """
    environ = os.environ if environ is None else environ
    for variables in _LAUNCHERS:
        if variables.launcher == "horovodrun" and HOROVOD_SET_BY_UNITRAIN in environ:
            continue
        if variables.marker == "KUBERNETES_SERVICE_HOST" and not _is_single_process_pod(environ):
            continue
        if variables.marker in environ:
            if variables.marker == "PET_NODE_RANK":
                _check_one_process_per_pod(environ)
            rank_info = _read_rank_info(variables, environ)
            _check_no_contradiction(rank_info, variables, environ)
            return rank_info
    if "PMIX_RANK" in environ:
        # Otherwise each process of the job would run as a job of one rank.
        raise EnvironmentVariableError(
            f"PMIX_RANK={environ['PMIX_RANK']} shows that a PMIx launcher has started this process, but no variable "
            "contains the number of ranks. Set the rank, size and local rank in the command of every rank: "
            "env RANK=$PMIX_RANK WORLD_SIZE=<ranks> LOCAL_RANK=<rank on its host> python ..., or clear it with: "
            "unset PMIX_RANK"
        )
    return RankInfo("none", rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1)


def get_variable(name: str) -> str | None:
    """Return the value of an environment variable, or of its alternative name, or None if both are unset or empty."""
    return os.environ.get(name) or os.environ.get(_ALTERNATIVE_NAMES.get(name, "")) or None


def job_id() -> str | None:
    """Return the ID of this job, which is the same in all attempts, or None if `unitrain launch` does not supervise the
    job.
    """
    return get_variable(JOB_ID_VARIABLE)


def job_description() -> str | None:
    """Return a readable name of this job that is the same in all attempts, such as "Slurm job 12", or None."""
    for variable, description in _JOB_IDS:
        value = get_variable(variable)
        if value is not None and value != "none":  # torchrun's default run ID
            return f"{description} {value}"
    return None


def is_elastic() -> bool:
    """Return whether the number of ranks may change when this job is restarted."""
    return get_variable(ELASTIC_VARIABLE) is not None


def is_debug_enabled() -> bool:
    """Return whether UNITRAIN_DEBUG is 1. Raises EnvironmentVariableError unless it is 0, 1 or unset."""
    return _read_switch(DEBUG_VARIABLE) or False


def max_polling_seconds(local_size: int) -> float:
    """Return the time for which a wait for other ranks polls before it sleeps: 5 ms, or 0 if UNITRAIN_POLLING is 0 or,
    by default, if this host has more ranks (`local_size`) than CPU cores.

    Waking a sleeping core takes longer than a small collective: polling reduces the time of a 1 KB exchange between two
    ranks from 0.9 ms to 0.3 ms. But a polling rank takes CPU time from the ranks for which it waits if they share a
    core. Raises EnvironmentVariableError unless UNITRAIN_POLLING is 0, 1 or unset.
    """
    is_polling = _read_switch(POLLING_VARIABLE)
    if is_polling is None:
        is_polling = local_size <= (os.cpu_count() or 1)
    return 0.005 if is_polling else 0.0


def _read_switch(variable: str) -> bool | None:
    """Return whether `variable` is 1 rather than 0, or None if it is unset. Raises EnvironmentVariableError for other
    values."""
    value = get_variable(variable)
    if value not in (None, "0", "1"):
        raise EnvironmentVariableError(
            f"{variable} must be 0 or 1, got {value!r}. Use: export {variable}=1, or clear it with: unset {variable}"
        )
    return None if value is None else value == "1"


def flight_record_folder() -> str | None:
    """Return the folder for the files of flight recorders, or None."""
    return get_variable(FLIGHT_RECORD_FOLDER_VARIABLE)


def max_pods() -> int:
    """Return the maximum number of pods of this process's PyTorchJob or TrainJob; 1 outside such a job."""
    max_nodes = os.environ.get("PET_NNODES", "").rpartition(":")[2]
    return int(max_nodes) if max_nodes.isascii() and max_nodes.isdecimal() else 1


def check_not_in_step_shell(rank_info: RankInfo) -> None:
    """Raise EnvironmentVariableError if this process was started from the interactive shell of `srun --pty`.

    The shell is task 0 of the step, so its commands inherit rank 0. The other tasks of the step are shells without a
    terminal, which exit immediately, so the rendezvous would wait for them until its timeout.
    """
    if rank_info.launcher != "srun" or rank_info.size == 1 or "SLURM_PTY_PORT" not in os.environ:
        return
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return  # a task without a terminal, started by a second srun inside the shell
    # An interactive shell runs each command in a new process group. srun itself and shell scripts do not.
    if os.getpgrp() != os.getsid(0):
        raise EnvironmentVariableError(
            f"SLURM_STEP_NUM_TASKS={rank_info.size} belongs to the shell of 'srun --pty', whose other "
            f"{rank_info.size - 1} tasks do not run this program. Start all ranks with: unitrain launch -np "
            f"{rank_info.size} train.py, or run one process with: env -u SLURM_STEP_ID python train.py"
        )


def copy() -> dict[str, str]:
    """Return a copy of the environment for a child process."""
    return dict(os.environ)


def without_rank_variables() -> dict[str, str]:
    """Return a copy of the environment for a launcher that sets the ranks itself.

    The copy does not contain RANK, WORLD_SIZE, LOCAL_RANK or the variables that `without_pod_variables` removes. A
    PyTorchJob sets RANK and WORLD_SIZE in every container.
    """
    rank_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {name: value for name, value in without_pod_variables().items() if name not in rank_variables}


def without_pod_variables() -> dict[str, str]:
    """Return a copy of the environment without the variables that a PyTorchJob or TrainJob sets for torchrun."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")}


def without_launcher_variables() -> dict[str, str]:
    """Return a copy of the environment without the variables of any launcher, for a job that this process starts."""
    names = {name for variables in _LAUNCHERS for name in vars(variables).values()} - {"KUBERNETES_SERVICE_HOST"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(_LAUNCHER_PREFIXES)
    }


def replace_all(values: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    os.environ.clear()
    os.environ.update(values)


def export(values: Mapping[str, str]) -> None:
    """Set environment variables, for libraries and child processes."""
    os.environ.update(values)


def export_defaults(values: Mapping[str, str]) -> None:
    """Set the variables that are unset or empty."""
    for name, value in values.items():
        if not os.environ.get(name):
            os.environ[name] = value


def export_terminal() -> None:
    """Set UNITRAIN_TERMINAL to the terminal of this process's standard error, or clear it if there is none."""
    try:
        os.environ[TERMINAL_VARIABLE] = os.ttyname(2)
    except OSError:
        os.environ.pop(TERMINAL_VARIABLE, None)


def _is_single_process_pod(environ: Mapping[str, str]) -> bool:
    """Return whether RANK is the index of this process's pod, in a job with one process per pod.

    Ranks that a script starts inside a pod have LOCAL_RANK, or a loopback address as MASTER_ADDR.
    """
    address = environ.get("MASTER_ADDR", "")
    is_complete = bool(address and environ.get("RANK") and environ.get("WORLD_SIZE"))
    return is_complete and "LOCAL_RANK" not in environ and address != "localhost" and not address.startswith("127.")


def _check_one_process_per_pod(environ: Mapping[str, str]) -> None:
    """Raise EnvironmentVariableError in a pod in which torchrun should start several processes."""
    num_processes = environ.get("PET_NPROC_PER_NODE", "1")
    if num_processes not in ("1", "auto", "gpu", "cpu", ""):
        raise EnvironmentVariableError(
            f"PET_NPROC_PER_NODE={num_processes} requests {num_processes} processes in this pod, but no launcher has "
            "started them. Start the script with torchrun, which reads this variable: torchrun train.py"
        )


def _check_no_contradiction(rank_info: RankInfo, variables: _Variables, environ: Mapping[str, str]) -> None:
    """Raise EnvironmentVariableError if RANK and WORLD_SIZE differ from the launcher's variables."""
    rank, size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if not rank or not size or (rank, size) == (str(rank_info.rank), str(rank_info.size)):
        return
    raise EnvironmentVariableError(
        f"RANK={rank} and WORLD_SIZE={size} contradict {variables.rank}={rank_info.rank} and "
        f"{variables.size}={rank_info.size} of {rank_info.launcher}. Clear the stale variables: "
        f"unset RANK WORLD_SIZE, or, if {rank_info.launcher} has not started this process: "
        f"unset {variables.marker}"
    )


def _read_rank_info(variables: _Variables, environ: Mapping[str, str]) -> RankInfo:
    """Return the values of a launcher's variables. Raises EnvironmentVariableError for invalid values."""
    evidence: list[str] = []

    def read_number(name: str | None, default: int | None = None) -> int | None:
        if name is None or (name not in environ and default is not None):
            return default
        value = environ.get(name)
        if value is None:
            raise EnvironmentVariableError(
                f"{variables.marker} is set, but {name} is not. Set {name} too, or clear {variables.marker} with: "
                f"unset {variables.marker}"
            )
        if not (value.isascii() and value.isdecimal()):
            raise EnvironmentVariableError(
                f"{name} must be a whole number, got {value!r}. Set it, or clear it with: unset {name}"
            )
        evidence.append(f"{name}={value}")
        return int(value)

    rank, size = read_number(variables.rank) or 0, read_number(variables.size) or 0
    if variables.launcher == "env":
        default_local_rank: int | None = rank  # all processes on one host, as torch's env:// assumes
    else:
        default_local_rank = 0 if variables.local_rank is None or size == 1 else None
    local_rank = read_number(variables.local_rank, default_local_rank) or 0
    if size < 1:
        raise EnvironmentVariableError(
            f"{variables.size} must be at least 1, got {size}. Set it, or clear it with: "
            f"unset {variables.rank} {variables.size}"
        )
    if rank >= size:
        raise EnvironmentVariableError(
            f"{variables.rank}={rank} is out of range for {variables.size}={size}: ranks are 0 to {size - 1}. "
            f"Set both, or clear them with: unset {variables.rank} {variables.size}"
        )
    optional = {
        name: read_number(variable)
        for name, variable in (
            ("local_size", variables.local_size),
            ("node_rank", variables.node_rank),
            ("num_nodes", variables.num_nodes),
        )
        if variable is not None and variable in environ
    }
    return RankInfo(variables.launcher, rank, size, local_rank, **optional, evidence=tuple(dict.fromkeys(evidence)))

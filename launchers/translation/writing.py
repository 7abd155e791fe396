"""Write command lines with their variables, and remarks about options without an equivalent under a launcher."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.words import join, quote

# Variables that only Open MPI reads. horovodrun passes them to mpirun.
_OPEN_MPI_PREFIXES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
_OPEN_MPI_LAUNCHERS = ("mpirun", "horovodrun")
# The backend that a script without an explicit backend uses under each launcher; ddp under all other launchers.
DEFAULT_BACKENDS = {"horovodrun": "horovod", "mpirun": "horovod", "mpiexec": "horovod"}


# Alternatives under each launcher, by the topic of the option.
_SSH = {
    "horovodrun": "use -p PORT and -i KEY.",
    "mpirun": 'give ssh its options with: -mca plm_rsh_args "-p 2222".',
    "mpiexec": "write them into ~/.ssh/config.",
    "torchrun": "torchrun is started on each host and does not use ssh.",
    "unitrain": "pass an option of the launcher with --launcher-args, or write them into ~/.ssh/config.",
}
_OUTPUT = {
    "horovodrun": "use --output-filename FOLDER.",
    "mpirun": "use --output-filename FOLDER, or --tag-output.",
    "mpiexec": "use -outfile-pattern and -errfile-pattern, or -prepend-rank.",
    "torchrun": "use --log-dir FOLDER --tee 3.",
    "srun": "use --output FILE, with %t for the rank, or --label.",
    "sbatch": "the batch script sets --output. Add --label to srun.",
    "kubernetes": "use kubectl logs.",
    "unitrain": "use --log-dir FOLDER.",
}
_BINDING = {
    "horovodrun": 'use --mpi --binding-args "--bind-to core".',
    "mpirun": "use --bind-to and --map-by.",
    "mpiexec": "use -bind-to and -map-by.",
    "torchrun": "use --numa-binding node.",
    "srun": "use --cpu-bind.",
    "sbatch": "give srun --cpu-bind.",
    "kubernetes": "request whole cores, under the static policy of the CPU manager.",
    "unitrain": "pass an option of the launcher with --launcher-args.",
}
_GRACE = {
    "horovodrun": "ranks have five seconds after SIGTERM, which cannot be changed.",
    "mpirun": "use -mca odls_base_sigkill_timeout SECONDS.",
    "torchrun": "use --shutdown-timeout SECONDS, and --signals-to-handle.",
    "srun": "request a warning with --signal=USR1@SECONDS.",
    "sbatch": "the batch script requests a warning: --signal=USR1@SECONDS.",
    "kubernetes": "set terminationGracePeriodSeconds.",
    "unitrain": "pass an option of the launcher with --launcher-args.",
}
_RESOURCES = {
    "srun": "request it with options of srun.",
    "sbatch": "add a line: #SBATCH ...",
    "kubernetes": "request it under resources, in the manifest.",
}
_ELASTIC = {
    "torchrun": "use --nnodes MIN:MAX with --max-restarts, on each host.",
    "horovodrun": "use --min-np and --max-np with --host-discovery-script.",
    "kubernetes": "use elasticPolicy of a PyTorchJob.",
    "unitrain": "use --elastic MIN:MAX with --host-discovery-script.",
}
_ADVICE: dict[str, tuple[dict[str, str], str]] = {
    "ssh": (_SSH, "the scheduler starts the ranks without ssh."),
    "output": (_OUTPUT, "let the script write to its own files."),
    "binding": (_BINDING, "let the script bind its process to cores."),
    "grace": (_GRACE, "let the script save within the time that the launcher allows."),
    "resources": (_RESOURCES, "the launcher does not request resources. Start it on hosts that have them."),
    "elastic": (
        _ELASTIC,
        "the number of ranks is fixed. To use a different number, start again from a checkpoint: resume='auto'.",
    ),
    "rendezvous": ({}, "the rendezvous is determined by the target launcher, or by MASTER_ADDR and MASTER_PORT."),
    "mapping": ({}, "ranks are numbered host by host, in the order of the hosts. Order the hosts as needed."),
    "network": (
        {
            "mpirun": "use -mca btl_tcp_if_include NAME -mca oob_tcp_if_include NAME.",
            "mpiexec": "use -iface NAME.",
            "unitrain": "use --interface NAME.",
        },
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME for every rank.",
    ),
    "diagnosis": (
        {},
        "it only inspects the launch. To display the command without running it, use: unitrain launch --dry-run.",
    ),
    "queue": (
        {"kubernetes": "it is a setting of Slurm's queue."},
        "it is a setting of Slurm's queue. Start the launcher in an allocation with this setting.",
    ),
    "unneeded": ({}, "it is not needed here."),
    "variables": (
        {
            "mpirun": "name each variable with -x.",
            "torchrun": "set the variables on each host.",
            "srun": "use --export.",
            "unitrain": "name each variable with -x.",
        },
        "set the variables before the command.",
    ),
    "other": ({}, "it has no equivalent here. Check whether the job depends on it."),
}


@dataclass(frozen=True)
class CommandLine:
    """A command, and its host if it must run on a specific host. The values of `private_names` are not shown."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    host: str | None = None
    private_names: Collection[str] = ()

    def shell(self) -> str:
        """Return the command as text for a shell."""
        assignments = [
            f"{name}={'...' if name in self.private_names else quote(value)}" for name, value in self.variables.items()
        ]
        change_directory = f"cd {quote(self.directory)} && " if self.directory is not None else ""
        return change_directory + " ".join([*assignments, join(self.words)])


@dataclass(frozen=True)
class Translation:
    """A job written for a launcher: command lines, or the text of a file, and remarks for the user.

    `private_values` are variables of the job that the text does not contain: sbatch forwards them from its environment,
    and the pods of a manifest read them from the Kubernetes Secret `secret`.
    """

    lines: Sequence[CommandLine] = ()
    remarks: Sequence[str] = ()
    text: str | None = None
    private_values: Mapping[str, str] = field(default_factory=dict)
    secret: str | None = None


def variables_for(job: Job, launcher: str) -> dict[str, str]:
    """Return the variables of every rank under `launcher`, with UNITRAIN_BACKEND if the launcher's default differs.

    They include the variables of launcher options without an equivalent, and exclude variables that only Open MPI reads
    if `launcher` does not use Open MPI.
    """
    variables = dict(job.environment)
    if launcher not in _OPEN_MPI_LAUNCHERS:
        variables = {name: value for name, value in variables.items() if not is_open_mpi_variable(name)}
    for option in job.launcher_options:
        if option.launcher != launcher and launcher not in option.equivalents:
            variables = {**option.variables, **variables}
    if job.backend is not None and job.backend != DEFAULT_BACKENDS.get(launcher, "ddp"):
        variables = {"UNITRAIN_BACKEND": job.backend, **variables}
    return variables


def is_open_mpi_variable(name: str) -> bool:
    """Return whether Open MPI's mpirun reads this variable itself."""
    return name.startswith(_OPEN_MPI_PREFIXES)


def options_for(job: Job, launcher: str, *, advice_target: str | None = None) -> tuple[list[str], list[str]]:
    """Convert the launcher options to arguments of `launcher`. Return the arguments and the remarks.

    There is a remark for each option without equivalent options or variables, and for each omitted Open MPI variable.
    The remarks name alternatives under `advice_target`, or under `launcher` if it is None.
    """
    advice_target = advice_target or launcher
    words: list[str] = []
    remarks: list[str] = []
    if launcher not in _OPEN_MPI_LAUNCHERS:
        remarks += [
            f"{name} is left out: only Open MPI reads this variable."
            for name in job.environment
            if is_open_mpi_variable(name)
        ]
    for option in job.launcher_options:
        if option.launcher == launcher:
            words += option.words
        elif launcher in option.equivalents:
            words += option.equivalents[launcher]
        elif not option.variables and not option.is_nested:
            alternative = advice(option.topic, advice_target)
            remarks.append(f"{join(option.words)} of {option.launcher} is left out: {alternative}")
    return words, remarks


def restart_remarks(job: Job) -> list[str]:
    """Return the remark about restarts for a launcher that does not restart jobs; empty for a job without restarts."""
    if not job.max_restarts:
        return []
    return [
        f"--max-restarts {job.max_restarts} is left out: the launcher does not restart the job. To let unitrain "
        f"restart it, use: unitrain launch --max-restarts {job.max_restarts} ..."
    ]


def advice(topic: str, launcher: str) -> str:
    """Return a sentence with the alternative under `launcher` to an option of `topic`."""
    by_launcher, otherwise = _ADVICE[topic]
    return by_launcher.get(launcher, otherwise)

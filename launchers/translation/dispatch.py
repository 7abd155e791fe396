"""Parse the command line of any known launcher, and build the command line of a job for any target."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from unitrain.launchers.errors import LaunchError, did_you_mean
from unitrain.launchers.rendezvous import DEFAULT_PORT, check_address_of_first_host
from unitrain.launchers.torchrun import RESTART_VARIABLES
from unitrain.launchers.translation import horovodrun, kubernetes, mpich, openmpi, sbatch, srun, torchrun, unitrain
from unitrain.launchers.translation.job import Job, parse_number
from unitrain.launchers.translation.words import as_typed, has_expansion, join, split, split_assignments
from unitrain.launchers.translation.writing import DEFAULT_BACKENDS, Translation

_CD_PREFIX = re.compile(r"\s*cd\s+((?:[^&|;<>()'\"\s]|'[^']*'|\"[^\"]*\")+)\s*&&")
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_PYTHON_FLAG = re.compile(r"-[BEIOPSsu]+|-[WX].+")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch", "unitrain.bootstrap.torchrun")
_HOROVODRUN_MODULES = ("horovod.runner.launch", "unitrain.backends.horovod.horovodrun")
_LOCAL_HOST_NAMES = ("localhost", "127.0.0.1")
_LAUNCHERS = ("torchrun", "horovodrun", "mpirun", "mpiexec", "srun")
_PARSED_LAUNCHERS = f"{', '.join(_LAUNCHERS)}, python and unitrain launch"
TARGETS: dict[str, Callable[[Job], Translation]] = {
    "torchrun": torchrun.build,
    "horovodrun": horovodrun.build,
    "mpirun": openmpi.build,
    "mpiexec": mpich.build,
    "srun": srun.build,
    "sbatch": sbatch.build,
    "kubernetes": kubernetes.build,
    "unitrain": unitrain.build,
}

_TARGETS_WITH_DISCOVERY = ("horovodrun", "unitrain")


def parse(line: str) -> Job:
    """Parse the command line `line` into a job.

    The backend is --backend of a `unitrain launch` command, else UNITRAIN_BACKEND, else the default of the launcher.
    Raises LaunchError for a command that is neither a launcher nor Python, and for unknown options.
    """
    directory = None
    if (match := _CD_PREFIX.match(line)) is not None:
        directory, line = split(match[1])[0], line[match.end() :]
    variables, words = split_assignments(split(line))
    if not words:
        raise LaunchError(
            f"{line.strip()!r} does not contain a command. Give the command that starts the job, as in: "
            "'torchrun train.py'"
        )
    launcher, job = _parse_command(words, variables)
    variables = {**variables, **job.environment}
    if RESTART_VARIABLES.items() <= variables.items():
        variables = {name: value for name, value in variables.items() if name not in RESTART_VARIABLES}
    backend = variables.pop("UNITRAIN_BACKEND", None) or job.backend or DEFAULT_BACKENDS.get(launcher, "ddp")
    address, port = _pop_rendezvous(variables)
    job = replace(
        job,
        environment=variables,
        backend=backend,
        address=job.address or address,
        port=job.port or port,
        directory=job.directory or directory,
    )
    name = as_typed(job.program[0]).rpartition("/")[2]
    if name in _LAUNCHERS or any(module in job.program[1:3] for module in (*_TORCHRUN_MODULES, *_HOROVODRUN_MODULES)):
        remark = f"The program that {launcher} starts is a launcher, which is not translated: {join(job.program)}."
        job = replace(job, remarks=(*job.remarks, remark))
    return _without_defaults(job)


def build(job: Job, target: str, kind: str | None = None) -> Translation:
    """Build the command lines, batch script or Kubernetes manifest of a job for `target`.

    `kind` is the kind of a Kubernetes job. Raises LaunchError for an unknown target, and for a job that `target` cannot
    run.
    """
    if target not in TARGETS:
        raise LaunchError(f"Unknown target {target!r}. {did_you_mean(target, TARGETS)}Available: {', '.join(TARGETS)}.")
    if job.discovery_script is not None and target not in _TARGETS_WITH_DISCOVERY:
        raise LaunchError(
            f"The script {job.discovery_script!r} lists the hosts while the job runs, but {target} needs them at the "
            f"start. Name them with their slots, as in: --hosts node1:{(job.size + 1) // 2},node2:{(job.size + 1) // 2}"
        )
    if kind is not None and target != kubernetes.LAUNCHER:
        raise LaunchError(f"--kind {kind} is an option for kubernetes, but --to is {target}. Leave --kind out")
    _check_first_host(job)
    settings = kubernetes.ManifestSettings(kind=kind)
    translation = TARGETS[target](job) if kind is None else kubernetes.build(job, settings)
    if translation.lines and job.private_values:
        remark = f"NAME=... stands for the value in the original command: {', '.join(job.private_values)}."
        return replace(translation, remarks=[*translation.remarks, remark])
    return translation


def _check_first_host(job: Job) -> None:
    """Raise LaunchError if the address at which several hosts connect to the first host is localhost or 127.*."""
    address = job.address or (job.hosts[0] if job.hosts else None)
    if address is not None:
        check_address_of_first_host(address, len(job.ranks_per_host), job.ranks_per_host[0])


def _parse_command(words: Sequence[str], variables: dict[str, str]) -> tuple[str, Job]:
    """Return the launcher and the job of a command.

    Remove torchrun's options (PET_*) and the backend of `unitrain launch` from `variables`.
    """
    name, arguments = words[0].rpartition("/")[2], words[1:]
    parsers: dict[str, Callable[[Sequence[str]], Job]] = {
        "torchrun": lambda arguments: torchrun.parse([*_pop_torchrun_options(variables), *arguments]),
        "horovodrun": horovodrun.parse, "srun": srun.parse, "orterun": openmpi.parse,
        "mpirun.openmpi": openmpi.parse, "mpiexec.openmpi": openmpi.parse, "mpiexec.hydra": mpich.parse,
        "mpiexec.mpich": mpich.parse, "mpirun.mpich": mpich.parse,
        "mpirun": _parse_mpi_command, "mpiexec": _parse_mpi_command,
    }  # fmt: skip
    if name in parsers:
        return {"orterun": "mpirun"}.get(name, name.partition(".")[0]), parsers[name](arguments)
    if name == "unitrain" and arguments[:1] == ["launch"]:
        return "unitrain", unitrain.parse(arguments[1:], variables.pop("UNITRAIN_BACKEND", None))
    if _PYTHON.fullmatch(words[0]):
        # Flags such as -u before the module of a launcher apply only to the launcher.
        command = list(itertools.dropwhile(_PYTHON_FLAG.fullmatch, arguments))
        module, options = (command[1], command[2:]) if command[:1] == ["-m"] and len(command) > 1 else ("", [])
        if module in _HOROVODRUN_MODULES:
            return "horovodrun", horovodrun.parse(options)
        if module in _TORCHRUN_MODULES:
            job = torchrun.parse([*_pop_torchrun_options(variables), *options], python=words[0])
            if module.endswith("launch") and not {"--use_env", "--use-env"} & set(options):
                remark = (
                    "torch.distributed.launch passes --local-rank=N to the script: make it read LOCAL_RANK instead."
                )
                job = replace(job, remarks=(*job.remarks, remark))
            return "torchrun", job
        if module == "unitrain" and options[:1] == ["launch"]:
            return "unitrain", unitrain.parse(options[1:], variables.pop("UNITRAIN_BACKEND", None))
        if not arguments:
            raise LaunchError(f"{as_typed(words[0])} needs a script. End the command as in: python train.py")
        return "none", Job(program=tuple(words))
    raise LaunchError(
        f"{as_typed(words[0])!r} is not a launcher that can be translated. Give a command of one of "
        f"these: {_PARSED_LAUNCHERS}."
    )


def _pop_torchrun_options(variables: dict[str, str]) -> list[str]:
    """Remove the variables that torchrun reads as options, such as PET_NNODES=2, and return these options."""
    settings = {name: variables.pop(name) for name in list(variables) if name.startswith("PET_")}
    options = {f"--{name[4:].lower().replace('_', '-')}": value for name, value in settings.items()}
    flags = [option for option, value in options.items() if torchrun.SYNTAX.arity.get(option) == 0 and value == "1"]
    return flags + [f"{option}={value}" for option, value in options.items() if torchrun.SYNTAX.arity.get(option) == 1]


def _parse_mpi_command(words: Sequence[str]) -> Job:
    """Parse the arguments of mpirun or mpiexec. The options distinguish Open MPI from MPICH."""
    try:
        openmpi.SYNTAX.parse(words)
    except LaunchError as error:
        try:
            return mpich.parse(words)
        except LaunchError:
            raise error from None
    return openmpi.parse(words)


def _pop_rendezvous(variables: dict[str, str]) -> tuple[str | None, int | None]:
    """Remove MASTER_ADDR and MASTER_PORT from `variables` and return them; None for a value with a shell expansion."""
    address, port = variables.pop("MASTER_ADDR", None), variables.pop("MASTER_PORT", None)
    return (
        None if address is None or has_expansion(address) else address,
        None if port is None or has_expansion(port) else parse_number("MASTER_PORT", port),
    )


def _without_defaults(job: Job) -> Job:
    """Return the job without its hosts, address and port where they are equal to the defaults."""
    if len(job.ranks_per_host) == 1 and job.hosts and job.hosts[0] in _LOCAL_HOST_NAMES:
        job = replace(job, hosts=())
    default_addresses = job.hosts[:1] or (_LOCAL_HOST_NAMES if len(job.ranks_per_host) == 1 else ())
    return replace(
        job,
        address=None if job.address in default_addresses else job.address,
        port=None if job.port == DEFAULT_PORT else job.port,
    )

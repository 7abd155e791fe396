"""From a line as somebody typed it to the job that it starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.torchrun import RESTART_VARIABLES
from unitrain.launchers.translation import horovodrun, mpich, openmpi, srun, torchrun, unitrain
from unitrain.launchers.translation.job import Job, number
from unitrain.launchers.translation.words import assignments, expands, shown, split
from unitrain.launchers.translation.writing import IMPLIED

_DIRECTORY = re.compile(r"\s*cd\s+((?:[^&|;<>()'\"\s]|'[^']*'|\"[^\"]*\")+)\s*&&")
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch", "unitrain.bootstrap.torchrun")
_HOROVODRUN_MODULES = ("horovod.runner.launch", "unitrain.bootstrap.horovodrun")
_LOCAL = ("localhost", "127.0.0.1")
KNOWN = "torchrun, horovodrun, mpirun, mpiexec, srun, python and unitrain launch"


def read(line: str) -> Job:
    """Return the job that `line` starts, in the words of no launcher in particular.

    Its backend is the one that UNITRAIN_BACKEND or the launcher chooses. Raises LaunchError for a line that is not one
    of a launcher, and for options that it does not know.
    """
    directory = None
    if (match := _DIRECTORY.match(line)) is not None:
        directory, line = split(match[1])[0], line[match.end() :]
    variables, words = assignments(split(line))
    if not words:
        raise LaunchError(
            f"{line.strip()!r} starts nothing. Give the line that starts the job, as in: 'torchrun train.py'"
        )
    launcher, job = _read(words, variables)
    variables = {**variables, **job.environment}
    if RESTART_VARIABLES.items() <= variables.items():
        variables = {name: value for name, value in variables.items() if name not in RESTART_VARIABLES}
    backend = variables.pop("UNITRAIN_BACKEND", None) or job.backend or IMPLIED.get(launcher, "ddp")
    address, port = _rendezvous(variables)
    job = replace(
        job,
        environment=variables,
        backend=backend,
        address=job.address or address,
        port=job.port or port,
        directory=job.directory or directory,
    )
    return _plain(job)


def _read(words: Sequence[str], variables: dict[str, str]) -> tuple[str, Job]:
    """Return the launcher of a line, and its job; what the launcher itself reads of `variables` is taken out."""
    name, rest = words[0].rpartition("/")[2], words[1:]
    readers: dict[str, Callable[[Sequence[str]], Job]] = {
        "torchrun": lambda rest: torchrun.read([*_settings(variables), *rest]),
        "horovodrun": horovodrun.read, "srun": srun.read, "orterun": openmpi.read,
        "mpirun.openmpi": openmpi.read, "mpiexec.openmpi": openmpi.read, "mpiexec.hydra": mpich.read,
        "mpiexec.mpich": mpich.read, "mpirun.mpich": mpich.read, "mpirun": _read_mpi, "mpiexec": _read_mpi,
    }  # fmt: skip
    if name in readers:
        return {"orterun": "mpirun"}.get(name, name.partition(".")[0]), readers[name](rest)
    if name == "unitrain" and rest[:1] == ["launch"]:
        return "unitrain", unitrain.read(rest[1:])
    if _PYTHON.fullmatch(words[0]):
        rest = rest[1:] if rest[:2] == ["-P", "-m"] else rest
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _HOROVODRUN_MODULES:
            return "horovodrun", horovodrun.read(rest[2:])
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _TORCHRUN_MODULES:
            job = torchrun.read([*_settings(variables), *rest[2:]], python=words[0])
            if rest[1].endswith("launch") and not {"--use_env", "--use-env"} & set(rest):
                local = "torch.distributed.launch gives the script --local-rank=N: let it read LOCAL_RANK instead."
                job = replace(job, remarks=(*job.remarks, local))
            return "torchrun", job
        if rest[:2] == ["-m", "unitrain"] and rest[2:3] == ["launch"]:
            return "unitrain", unitrain.read(rest[3:])
        if not rest:
            raise LaunchError(f"{shown(words[0])} is given no script. End the line as in: python train.py")
        return "none", Job(program=tuple(words))
    raise LaunchError(
        f"{shown(words[0])!r} is no launcher that can be translated. Give a line of one of these: {KNOWN}."
    )


def _settings(variables: dict[str, str]) -> list[str]:
    """Take out of `variables` what torchrun reads as options, as PET_NNODES=2, and return these."""
    told = {name: variables.pop(name) for name in list(variables) if name.startswith("PET_")}
    options = {f"--{name[4:].lower().replace('_', '-')}": value for name, value in told.items()}
    flags = [option for option, value in options.items() if torchrun.SYNTAX.arity.get(option) == 0 and value == "1"]
    return flags + [f"{option}={value}" for option, value in options.items() if torchrun.SYNTAX.arity.get(option) == 1]


def _read_mpi(words: Sequence[str]) -> Job:
    """Read what may be Open MPI's or MPICH's: their options tell them apart."""
    try:
        openmpi.SYNTAX.take(words)
    except LaunchError as error:
        try:
            return mpich.read(words)
        except LaunchError:
            raise error from None
    return openmpi.read(words)


def _rendezvous(variables: dict[str, str]) -> tuple[str | None, int | None]:
    """Take MASTER_ADDR and MASTER_PORT out of `variables`, and return them where they are known."""
    address, port = variables.pop("MASTER_ADDR", None), variables.pop("MASTER_PORT", None)
    return (
        None if address is None or expands(address) else address,
        None if port is None or expands(port) else number("MASTER_PORT", port),
    )


def _plain(job: Job) -> Job:
    """Return the same job without what goes without saying."""
    if len(job.counts) == 1 and job.hosts and job.hosts[0] in _LOCAL:
        job = replace(job, hosts=())
    usual = job.hosts[:1] or (_LOCAL if len(job.counts) == 1 else ())
    return replace(
        job,
        address=None if job.address in usual else job.address,
        port=None if job.port == DEFAULT_PORT else job.port,
    )

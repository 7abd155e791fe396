"""What all writers share: a line, what is set before it, and what is said about options that have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.topics import advice
from unitrain.launchers.translation.words import join, quote

# What Open MPI alone reads, and horovodrun hands on to it.
_OF_OPEN_MPI = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
_STARTS_OPEN_MPI = ("mpirun", "horovodrun")
# The launcher's own backend, which a script asks for that asks for none.
IMPLIED = {"horovodrun": "horovod", "mpirun": "horovod", "mpiexec": "horovod"}


@dataclass(frozen=True)
class Line:
    """A command, and the host that it is typed on where that matters."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    host: str | None = None

    def shell(self) -> str:
        """Return it as it is typed."""
        before = [f"{name}={quote(value)}" for name, value in self.variables.items()]
        there = f"cd {quote(self.directory)} && " if self.directory is not None else ""
        return there + " ".join([*before, join(self.words)])


@dataclass(frozen=True)
class Written:
    """A job for some launcher: lines to type, or the text of a file, and what the user must know of them."""

    lines: Sequence[Line] = ()
    remarks: Sequence[str] = ()
    text: str | None = None


def variables_of(job: Job, launcher: str) -> dict[str, str]:
    """Return what is set for every rank under `launcher`, with the backend where the launcher implies another."""
    variables = dict(job.environment)
    if launcher not in _STARTS_OPEN_MPI:
        variables = {name: value for name, value in variables.items() if not is_of_open_mpi(name)}
    for other in job.others:
        if other.launcher != launcher and launcher not in other.passes:
            variables = {**other.variables, **variables}
    if job.backend is not None and job.backend != IMPLIED.get(launcher, "ddp"):
        variables = {"UNITRAIN_BACKEND": job.backend, **variables}
    return variables


def is_of_open_mpi(name: str) -> bool:
    """Return whether a variable is one that Open MPI's mpirun reads itself."""
    return name.startswith(_OF_OPEN_MPI)


def options_of(job: Job, launcher: str) -> tuple[list[str], list[str]]:
    """Return the other options of the job that `launcher` takes, and a remark for each that it does not."""
    words: list[str] = []
    said: list[str] = []
    if launcher not in _STARTS_OPEN_MPI:
        own = [f"{name}={value}" for name, value in job.environment.items() if is_of_open_mpi(name)]
        said += [f"{join([one])} is left out: {advice('own', launcher)}" for one in own]
    for other in job.others:
        if other.launcher == launcher:
            words += other.words
        elif launcher in other.passes:
            words += other.passes[launcher]
        elif not other.variables:
            said.append(f"{join(other.words)} of {other.launcher} is left out: {advice(other.topic, launcher)}")
    return words, said


def restarts(job: Job) -> list[str]:
    """Return what is to be said of restarts under a launcher that has none."""
    if not job.max_restarts:
        return []
    return [
        f"--max-restarts {job.max_restarts} is left out: let unitrain start the job again, with: "
        f"unitrain launch --max-restarts {job.max_restarts} ..."
    ]

"""An sbatch script: a job that Slurm may stop and start again, and that goes on where it was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unitrain.launchers.arguments import looks_secret, merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.srun import task_options
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.srun import rendezvous
from unitrain.launchers.translation.words import expands, join, quote, shown
from unitrain.launchers.translation.writing import Written, options_of, variables_of

LAUNCHER = "sbatch"
# What unitrain's ranks end with when a signal has come and their checkpoint is written: EX_TEMPFAIL of sysexits.h.
_AGAIN = 75
_WARNING_SECONDS = 120
# Ranks that were warned end one after another, each with a failure's code: the first must not have the others killed,
# whose code would then be another. Ranks that are left by one that has failed end themselves, or are ended here.
_TOGETHER = ("--kill-on-bad-exit=0",)
_DEFAULTS = (("--wait", "300"), ("--export", "ALL"))
# The ranks sign with it what they send each other. It is made anew on the first host in each attempt, and srun hands it
# on: neither a command line nor the script has its value.
_KEY = "${UNITRAIN_JOB_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}"
_PORT = "$((29500 + SLURM_JOB_ID % 1000))"  # two jobs that share a host seldom meet


def write(job: Job, directives: Sequence[str] = ()) -> Written:
    """Return the script. `directives` are options of sbatch's, which go before its own where both say the same.

    Slurm warns the ranks with SIGUSR1 two minutes before the time is over; they save, end with 75, and the job is
    queued again. Raises LaunchError for a script that could not be queued.
    """
    # What srun is told and sbatch does not know stays with srun.
    own = [other for other in job.others if other.launcher == "srun" and LAUNCHER not in other.passes]
    given, said = options_of(replace(job, others=tuple(one for one in job.others if one not in own)), LAUNCHER)
    secrets = [name for name, value in job.environment.items() if looks_secret(name, value)]
    if secrets:
        raise LaunchError(
            f"{secrets[0]}=... would be written into the script, and looks secret. "
            f"Leave it out, and set it where sbatch is typed, which hands it on: export {secrets[0]}=..."
        )
    usual = [
        f"--job-name={name_of(job)}",
        *_tasks(job),
        f"--signal=USR1@{_WARNING_SECONDS}",
        "--requeue",
        "--output=%x-%j.out",
        "--open-mode=append",
    ]
    start_in: list[str] = []
    if job.directory is not None and expands(job.directory):  # which Slurm does not do in a #SBATCH line
        start_in = [f"cd {quote(job.directory)} || exit", ""]
    elif job.directory is not None:
        usual.append(f"--chdir={job.directory}")
    if job.hosts:
        usual.append(f"--nodelist={','.join(name.strip('[]') for name in job.hosts)}")
    asked = _merged(usual, [*given, *directives])
    variables = {**variables_of(job, LAUNCHER), **rendezvous(job, said)}
    if job.port is None:
        del variables["MASTER_PORT"]
    exports = [f"export {name}={quote(value)}" for name, value in variables.items()]
    if job.port is None:
        exports.append(f"export MASTER_PORT={_PORT}")
    exports.append(f"export UNITRAIN_JOB_KEY={_KEY}")
    if "OMP_NUM_THREADS" not in variables:
        exports.append("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}")
    start = join(["srun", *_TOGETHER, *merge_options(_DEFAULTS, [word for one in own for word in one.words])])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {_directive(option)}" for option in asked),
        "",
        *start_in,
        *exports,
        "",
        # From Slurm 22.05 on srun does not take it over from sbatch, and each rank would have one core.
        f"{start} ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {join(job.program)}",
        "code=$?",
        f'if [ "$code" -eq {_AGAIN} ]; then  # the ranks were warned, and have saved',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    said.append('The script goes on from its newest checkpoint with TrainConfig(resume="auto", output_dir=...).')
    if job.max_restarts:
        said.append(f"--max-restarts {job.max_restarts} is left out: a job that fails is not queued again.")
    return Written(text="\n".join(lines) + "\n", remarks=[*job.remarks, *said])


def _tasks(job: Job) -> list[str]:
    words = task_options(job.counts)[:-1]
    return [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]


def name_of(job: Job) -> str:
    """Return a name after the script."""
    names = [word for word in job.program[1:] if not word.startswith("-")] or [job.program[0]]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", names[0].rpartition("/")[2].removesuffix(".py")).strip("-") or "job"


def _directive(option: str) -> str:
    """Return an option as a #SBATCH line has it. Raises LaunchError for a value that such a line cannot have."""
    name, equals, value = option.partition("=")
    if expands(option):
        raise LaunchError(
            f"{shown(option)!r} is for a shell to expand, and a #SBATCH line has none. Write its value in its place"
        )
    if not option.isprintable():
        raise LaunchError(
            f"{option!r} cannot be written into a #SBATCH line, which ends with the line. Use a value in one line"
        )
    return f"{name}{equals}{quote(value) if equals else ''}"


def _merged(usual: Iterable[str], given: Sequence[str]) -> list[str]:
    """Return the usual options that are not given otherwise, and those that are given."""
    names = {option.partition("=")[0] for option in given}
    return [*(option for option in usual if option.partition("=")[0] not in names), *given]

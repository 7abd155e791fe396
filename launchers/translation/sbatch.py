"""Write an sbatch script for a preemptible job that Slurm requeues and that resumes from its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from unitrain.launchers.arguments import merge_options
from unitrain.launchers.errors import PREEMPTED_EXIT_CODE, LaunchError
from unitrain.launchers.spec import CONFIG_SUFFIXES
from unitrain.launchers.srun import task_options
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.srun import rendezvous_variables
from unitrain.launchers.translation.words import as_typed, has_expansion, join, quote
from unitrain.launchers.translation.writing import Translation, options_for, variables_for

LAUNCHER = "sbatch"
_WARNING_SECONDS = 120
# Preempted ranks exit one after another with a nonzero code. The first exit must not cause srun to kill the other
# ranks, which would change their exit code. After a failure, the remaining ranks exit on their own, or srun terminates
# them when the --wait time has passed.
_SRUN_OPTIONS = ("--kill-on-bad-exit=0",)
_SRUN_DEFAULTS = (("--wait", "300"), ("--export", "ALL"))
# The key with which ranks authenticate each other. The first host creates it in each attempt and srun forwards it, so
# neither a command line nor the script contains its value.
_KEY = "${UNITRAIN_JOB_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}"
_PORT = "$((29500 + SLURM_JOB_ID % 1000))"  # so that jobs on the same host rarely collide


def build(job: Job, directives: Sequence[str] = ()) -> Translation:
    """Return the sbatch script. `directives` are options of sbatch, which override the defaults.

    Slurm signals the ranks with SIGUSR1 two minutes before the time limit. They save a checkpoint and exit with 75, and
    the script requeues the job. Raises LaunchError if a value cannot be written into a script.
    """
    # Options of srun that sbatch does not have are passed to srun.
    srun_only = [
        option for option in job.launcher_options if option.launcher == "srun" and LAUNCHER not in option.equivalents
    ]
    extra_options, remarks = options_for(
        replace(job, launcher_options=tuple(option for option in job.launcher_options if option not in srun_only)),
        LAUNCHER,
    )
    if private_names := list(job.private_values):
        remarks.append(
            f"The script does not contain the values of {', '.join(private_names)}. sbatch forwards its environment, "
            f"in which unitrain submit sets them. To use the script without it: export {' '.join(private_names)}"
        )
    defaults = [
        f"--job-name={job_name(job)}",
        *_task_options(job),
        f"--signal=USR1@{_WARNING_SECONDS}",
        "--requeue",
        "--output=%x-%j.out",
        "--open-mode=append",
    ]
    start_in: list[str] = []
    if job.directory is not None and has_expansion(job.directory):  # Slurm expands nothing in a #SBATCH line
        start_in = [f"cd {quote(job.directory)} || exit", ""]
    elif job.directory is not None:
        defaults.append(f"--chdir={job.directory}")
    if job.hosts:
        defaults.append(f"--nodelist={','.join(name.strip('[]') for name in job.hosts)}")
    directives = _merge_directives(defaults, [*extra_options, *directives])
    variables = {**variables_for(job, LAUNCHER), **rendezvous_variables(job, remarks)}
    if job.port is None:
        del variables["MASTER_PORT"]
    exports = [f"export {name}={quote(value)}" for name, value in variables.items() if name not in job.private_values]
    if job.port is None:
        exports.append(f"export MASTER_PORT={_PORT}")
    exports.append(f"export UNITRAIN_JOB_KEY={_KEY}")
    if "OMP_NUM_THREADS" not in variables:
        exports.append("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}")
    start = join(
        [
            "srun",
            *_SRUN_OPTIONS,
            *merge_options(_SRUN_DEFAULTS, [word for option in srun_only for word in option.words]),
        ]
    )
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {_format_directive(option)}" for option in directives),
        "",
        *start_in,
        *exports,
        "",
        # Since Slurm 22.05, srun does not inherit this option from sbatch, and each rank would have one core.
        f"{start} ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {join(job.program)}",
        "code=$?",
        f'if [ "$code" -eq {PREEMPTED_EXIT_CODE} ]; then  # the ranks were warned and have saved',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    needs = (
        'the training script needs TrainConfig(resume="auto", output_dir=...)'
        if _config_file(job) is None
        else "the configuration needs the keys resume: auto and output_dir"
    )
    remarks.append(f"To resume from the newest checkpoint, {needs}.")
    if job.max_restarts:
        remarks.append(f"--max-restarts {job.max_restarts} is left out: Slurm does not requeue a job that fails.")
    text = "\n".join(lines) + "\n"
    return Translation(text=text, remarks=[*job.remarks, *remarks], private_values=job.private_values)


def _task_options(job: Job) -> list[str]:
    words = task_options(job.ranks_per_host)[:-1]
    return [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]


def job_name(job: Job) -> str:
    """Return a name for the job, derived from the script, or from the configuration file."""
    names = [word for word in job.program[1:] if not word.startswith("-")] or [job.program[0]]
    path = PurePosixPath(_config_file(job) or names[0])
    name = path.stem if path.suffix in (".py", *CONFIG_SUFFIXES) else path.name
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "job"


def _config_file(job: Job) -> str | None:
    """Return the first word of the program with the suffix of a configuration file, or None."""
    return next((word for word in job.program if PurePosixPath(word).suffix in CONFIG_SUFFIXES), None)


def _format_directive(option: str) -> str:
    """Return an option as text for a #SBATCH line. Raises LaunchError for a value that it cannot contain."""
    name, equals, value = option.partition("=")
    if has_expansion(option):
        raise LaunchError(
            f"{as_typed(option)!r} needs a shell to expand it, but Slurm expands nothing in #SBATCH lines. Write "
            "its value instead"
        )
    if not option.isprintable():
        raise LaunchError(
            f"{option!r} contains a line break or control character, which a #SBATCH line cannot contain. "
            "Use a value on one line"
        )
    return f"{name}{equals}{quote(value) if equals else ''}"


def _merge_directives(defaults: Iterable[str], extra_options: Sequence[str]) -> list[str]:
    """Return the default options that are not overridden, followed by the given options."""
    names = {option.partition("=")[0] for option in extra_options}
    return [*(option for option in defaults if option.partition("=")[0] not in names), *extra_options]

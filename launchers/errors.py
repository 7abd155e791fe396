"""Errors in a launch request, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Exit code of preempted ranks after a checkpoint: EX_TEMPFAIL of sysexits.h, as in `unitrain.errors`.
PREEMPTED_EXIT_CODE = 75


class LaunchError(ValueError):
    """The requested launch is not possible. The message states the reason and a fix that can be pasted."""


class MissingLauncherError(LaunchError):
    """The program of the launcher is not installed on this host."""


# Names of other programs and projects for launchers, targets and schedulers.
_SYNONYMS = {
    "k8s": ("kubernetes",),
    "slurm": ("srun", "slurm"),
    "srun": ("slurm",),
    "sbatch": ("srun", "slurm"),
    "mpi": ("mpirun",),
    "openmpi": ("mpirun",),
    "mpiexec": ("mpirun",),
    "mpich": ("mpiexec", "mpirun"),
    "horovod": ("horovodrun",),
    "ddp": ("torchrun",),
    "pytorch": ("torchrun",),
    "elastic": ("torchrun",),
    "local": ("none",),
    "python": ("none",),
}


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "Did you mean ...? " with a choice that `name` is a synonym of or is close to, or an empty string."""
    choices = list(choices)
    close_matches = [choice for choice in _SYNONYMS.get(name.lower(), ()) if choice in choices]
    close_matches += difflib.get_close_matches(name, choices, n=1)
    return f"Did you mean {close_matches[0]!r}? " if close_matches else ""

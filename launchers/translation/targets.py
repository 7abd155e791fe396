"""The launchers and schedulers that a job can be written for."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.translation import horovodrun, kubernetes, mpich, openmpi, sbatch, srun, torchrun, unitrain
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.writing import Written

TARGETS: dict[str, Callable[[Job], Written]] = {
    "torchrun": torchrun.write,
    "horovodrun": horovodrun.write,
    "mpirun": openmpi.write,
    "mpiexec": mpich.write,
    "srun": srun.write,
    "sbatch": sbatch.write,
    "kubernetes": kubernetes.write,
    "unitrain": unitrain.write,
}

_DISCOVERING = ("horovodrun", "unitrain")


def write(job: Job, target: str) -> Written:
    """Return the job as `target` has it. Raises LaunchError for a job that it cannot have, and an unknown target."""
    if target not in TARGETS:
        near = difflib.get_close_matches(target, TARGETS, n=1)
        suggestion = f"Did you mean {near[0]!r}? " if near else ""
        raise LaunchError(f"Unknown target {target!r}. {suggestion}Available: {', '.join(TARGETS)}.")
    if job.discovery is not None and target not in _DISCOVERING:
        raise LaunchError(
            f"The hosts of the job are what {job.discovery!r} prints while it runs, and {target} has them from the "
            f"start. Name them, as in: --hosts node1:{job.size},node2:{job.size}"
        )
    return TARGETS[target](job)

"""`unitrain follow`: show the state and the log of a job until it ends."""

from __future__ import annotations

import sys

import click

from unitrain.errors import did_you_mean
from unitrain.launchers import LaunchError
from unitrain.launchers.translation.kubernetes import KINDS
from unitrain.supervisor import following
from unitrain.supervisor.kubernetes_job import KubernetesJob
from unitrain.supervisor.slurm_job import SlurmJob

_SCHEDULERS = ("slurm", "kubernetes")


@click.command()
@click.option("--to", "scheduler", required=True, metavar="SCHEDULER", help="slurm or kubernetes.")
@click.option("--cluster", metavar="NAME", help="slurm: cluster of the job. [default: the cluster of this host]")
@click.option("--kind", metavar="KIND", help="kubernetes: TrainJob, PyTorchJob or MPIJob. [default: TrainJob]")
@click.option("--namespace", metavar="NAME", help="kubernetes: namespace of the job.")
@click.argument("job", metavar="JOB")
def follow(scheduler: str, cluster: str | None, kind: str | None, namespace: str | None, job: str) -> None:
    """Show the state and the log of JOB, a Slurm job ID or the name of a Kubernetes job, until the job ends.

    Exits with the exit code of the job. Ctrl-C stops following; the job continues.

    \b
      unitrain follow --to slurm 4071
      unitrain follow --to kubernetes --namespace team train-digits
    """
    try:
        sys.exit(following.follow(_create_followed_job(scheduler, cluster, kind, namespace, job)))
    except LaunchError as error:
        raise click.UsageError(str(error)) from error


def _create_followed_job(
    scheduler: str, cluster: str | None, kind: str | None, namespace: str | None, job: str
) -> following.FollowedJob:
    if scheduler not in _SCHEDULERS:
        suggestion = did_you_mean(scheduler, _SCHEDULERS)
        raise LaunchError(f"Unknown scheduler {scheduler!r}. {suggestion}Available: {', '.join(_SCHEDULERS)}.")
    other_scheduler = "kubernetes" if scheduler == "slurm" else "slurm"
    options = {"--kind": kind, "--namespace": namespace} if scheduler == "slurm" else {"--cluster": cluster}
    for name, value in options.items():
        if value is not None:
            raise LaunchError(
                f"{name} {value} is an option for {other_scheduler}, but --to is {scheduler}. Leave {name} out"
            )
    if scheduler == "slurm":
        return SlurmJob(job, cluster)
    return KubernetesJob(job, KINDS[0] if kind is None else kind, namespace)

"""`unitrain submit`: submit a training script as a Slurm or Kubernetes job."""

from __future__ import annotations

import sys

import click

from unitrain.cli.translate import print_translation
from unitrain.errors import ConfigError
from unitrain.launchers import LaunchError
from unitrain.supervisor import submission

_MAX_NODES = 65_536  # Slurm supports at most this number


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option("--to", "scheduler", required=True, metavar="SCHEDULER", help="slurm or kubernetes.")
@click.option("--backend", default="ddp", metavar="NAME", help="ddp, horovod, or a plug-in. [default: ddp]")
@click.option(
    "--nodes",
    type=click.IntRange(min=1, max=_MAX_NODES),
    default=1,
    metavar="N",
    help="Number of hosts or pods. [default: 1]",
)
@click.option(
    "-np",
    "-n",
    "--num-processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Total number of ranks. [default: one per GPU, else one per node]",
)
@click.option("--gpus-per-node", type=click.IntRange(min=0), metavar="N", help="GPUs per node.")
@click.option("--cpus-per-task", type=click.IntRange(min=1), metavar="N", help="CPU cores per rank.")
@click.option("--memory", metavar="SIZE", help="Memory per node, e.g. 64G.")
@click.option("--time", "time_limit", metavar="TIME", help="Time limit in Slurm's notation: 90, 4:00:00 or 2-12.")
@click.option("--job-name", metavar="NAME", help="Job name. [default: derived from the script]")
@click.option("--partition", metavar="NAME", help="slurm: partition.")
@click.option("--account", metavar="NAME", help="slurm: account to charge.")
@click.option("--output", metavar="FILE", help="slurm: log file. [default: %x-%j.out]")
@click.option(
    "--signal-seconds",
    type=click.IntRange(min=1, max=65535),
    metavar="N",
    help="slurm: seconds before the time limit at which Slurm signals the job to checkpoint, exit and requeue. "
    "[default: 120]",
)
@click.option("--kind", metavar="KIND", help="kubernetes: TrainJob, PyTorchJob or MPIJob. [default: TrainJob]")
@click.option(
    "--runtime", metavar="NAME", help="kubernetes: ClusterTrainingRuntime of a TrainJob. [default: torch-distributed]"
)
@click.option(
    "--mpi-runtime",
    metavar="NAME",
    help="kubernetes: ClusterTrainingRuntime with an MPI policy, in which mpirun starts the ranks of a TrainJob.",
)
@click.option("--image", metavar="NAME", help="kubernetes: container image.")
@click.option("--namespace", metavar="NAME", help="kubernetes: namespace of the job.")
@click.option(
    "-x",
    "exports",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Forward or set an environment variable on all ranks. Repeatable.",
)
@click.option(
    "--follow",
    "is_followed",
    is_flag=True,
    help="Show the state and the log of the job until it ends, and exit with its exit code.",
)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Print the script or manifest and exit.")
@click.argument(
    "script_and_args", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[OPTION=VALUE]... SCRIPT [ARGS]..."
)
def submit(scheduler: str, is_dry_run: bool, **arguments: object) -> None:
    """Submit SCRIPT with its ARGS to a scheduler, as a preemptible job that resumes from its checkpoint.

    SCRIPT may be a configuration file of `unitrain train`, whose options follow the file.

    Prints the batch script or manifest first. Unknown options are passed to sbatch and must use the form --qos=high.
    With --follow, Ctrl-C stops following, but not the job.

    \b
      unitrain submit --to slurm --nodes 2 --gpus-per-node 8 --time 12:00:00 --partition gpu train.py --epochs 90
      unitrain submit --to kubernetes --nodes 2 --gpus-per-node 8 --image registry/train:1 --dry-run train.py
      unitrain submit --to kubernetes --kind PyTorchJob --image registry/train:1 train.py
    """
    request = submission.SubmitRequest(scheduler=scheduler, is_dry_run=is_dry_run, **arguments)  # type: ignore[arg-type]
    try:
        translation = submission.build_submission(request)
    except (LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    print_translation(translation)
    if is_dry_run:
        return
    sys.stdout.flush()
    try:
        if request.is_followed:
            sys.exit(submission.submit_and_follow(scheduler, translation))
        sys.exit(submission.submit(scheduler, translation))
    except LaunchError as error:
        raise click.UsageError(str(error)) from error
    except TimeoutError as error:
        raise click.ClickException(str(error)) from error

"""`unitrain launch`: print the launcher command and execute it."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain import launchers, output
from unitrain.cli import OutputPath
from unitrain.errors import ConfigError
from unitrain.launchers import LaunchError
from unitrain.supervisor.checks import is_config_file
from unitrain.supervisor.launch_plan import LaunchRequest, execute, export_job_key, plan_launch

# Options of other launchers, and the options of this command with the same purpose.
_OPTION_SYNONYMS = {
    **dict.fromkeys(("--nproc-per-node", "--nproc", "--np", "--num-proc", "--ntasks", "--world-size"), "-np"),
    **dict.fromkeys(("--nnodes", "--nodes", "--num-nodes", "--nodelist", "-N"), "-H"),
    **dict.fromkeys(("--gpus", "--gpus-per-node", "--num-gpus"), "--devices"),
    **dict.fromkeys(("--min-np", "--max-np"), "--elastic"),
    **dict.fromkeys(("--master-addr", "--master-port", "--env", "--export"), "-x"),
    "--machinefile": "--hostfile",
}
# Options that scripts rarely have themselves.
_DISTINCTIVE_OPTIONS = ("-np", "--num-processes", "--launcher", "--hostfile", "--max-restarts", "--launcher-args")


class _LaunchCommand(click.Command):
    """The command, with suggestions for options of other launchers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            synonym = _OPTION_SYNONYMS.get(error.option_name.replace("_", "-"))
            if synonym is None:
                raise
            raise click.UsageError(f"No such option: {error.option_name}. Did you mean {synonym!r}?", ctx) from None


@click.command(cls=_LaunchCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--backend",
    metavar="NAME",
    help="ddp, horovod, local, or a plug-in. [default: UNITRAIN_BACKEND, else the launcher's, else ddp]",
)
@click.option("--launcher", metavar="NAME", help="torchrun, horovodrun, mpirun, srun or none. [default: the backend's]")
@click.option(
    "-np", "-n", "--num-processes", type=int, metavar="N", help="Total number of ranks. [default: all slots, else 1]"
)
@click.option(
    "--devices",
    metavar="N|-1|I,J",
    help="Devices of each host, one rank per device: a number, -1 for all GPUs, 0 for the CPU, or GPU indices such as "
    "1,3 or [0], relative to CUDA_VISIBLE_DEVICES. Without GPUs, a number is the number of processes. "
    "[default: determined by -np]",
)
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and their numbers of slots. [default: this host]")
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Hostfile with one "HOST slots=N" line per host.',
)
@click.option(
    "--interface", metavar="NAME", help="Network interface for traffic between hosts. [default: from the routing table]"
)
@click.option("--gloo", "controller", flag_value="gloo", help="horovodrun: use the Gloo controller. [default]")
@click.option("--mpi", "controller", flag_value="mpi", help="horovodrun: use the MPI controller.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Restart a failed job up to N times; a Trainer resumes from its newest checkpoint. "
    "[default: 0, with --elastic 3]",
)
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    help="Run MIN to MAX ranks, one per slot of the reachable hosts, and restart the job when the hosts change.",
)
@click.option(
    "--host-discovery-script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --elastic: program that prints the current hosts as HOST:SLOTS lines. It is run periodically.",
)
@click.option(
    "--elastic-timeout",
    "elastic_timeout_seconds",
    type=click.FloatRange(min=0),
    default=600.0,
    metavar="SECONDS",
    help="Timeout for an elastic job to find MIN slots. [default: 600]",
)
@click.option(
    "--standby",
    "uses_standby",
    is_flag=True,
    help="Start the ranks of the next attempt in advance, so that a restart does not wait for imports. This needs "
    "memory for a second process per rank.",
)
@click.option(
    "-x",
    "exports",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Forward or set an environment variable on all ranks. Repeatable.",
)
@click.option(
    "--launcher-args",
    multiple=True,
    metavar="OPTIONS",
    help='Options passed to the launcher, such as --launcher-args "--bind-to core". Repeatable.',
)
@click.option(
    "--log-dir",
    type=OutputPath(file_okay=False),
    metavar="FOLDER",
    help="Also write the output of each rank to FOLDER/rank-N.log, and print the last lines of the failed rank.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve the metrics of a Trainer for Prometheus on this port of rank 0, such as 9400.",
)
@click.option(
    "--metrics-address",
    metavar="ADDRESS",
    help="Address on which --metrics-port listens; the endpoint has no authentication. [default: 127.0.0.1]",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="Run SCRIPT as a module, like python -m.")
@click.option("--untuned", is_flag=True, help="Ignore the settings stored by unitrain tune in unitrain-tuned.json.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Print the launcher command and exit.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(untuned: bool, is_dry_run: bool, **arguments: object) -> None:
    """Run SCRIPT with its ARGS on several ranks. SCRIPT may be a configuration file of `unitrain train`.

    Prints the launcher command and replaces itself with the launcher, which then handles signals and sets the exit
    code. The backend is passed to the script as UNITRAIN_BACKEND. Every backend runs under every launcher. With
    --max-restarts, --elastic or --log-dir, the command supervises the launcher instead.

    \b
      unitrain launch -np 2 train.py --epochs 3
      unitrain launch -np 2 -m package.train --epochs 3
      unitrain launch -np 2 config.yaml --batch_size 64
      unitrain launch --devices 1,3 train.py --epochs 3
      unitrain launch --backend horovod -np 8 -H node1:4,node2:4 train.py
      unitrain launch --backend horovod --launcher torchrun -np 2 train.py
      unitrain launch --launcher mpirun --backend ddp -np 8 -H node1:4,node2:4 -x WANDB_API_KEY train.py
      unitrain launch --backend horovod --elastic 2:8 -H node1:4,node2:4 train.py
    """
    if not is_dry_run:
        output.guard_standard_streams()
        export_job_key()
    request = LaunchRequest(use_tuned_settings=not untuned, is_dry_run=is_dry_run, **arguments)  # type: ignore[arg-type]
    _note_misplaced_options(request)
    try:
        plan = plan_launch(request)
    except (LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    if is_dry_run:
        click.echo(plan.command.shell())
        if missing_program := plan.missing_program_error():
            click.echo(f"Warning: the command cannot run on this host. {missing_program}", err=True)
        return
    try:
        execute(plan)
    except LaunchError as error:
        raise click.ClickException(str(error)) from error


def _note_misplaced_options(request: LaunchRequest) -> None:
    """Print a note if an argument of the script is probably an option of this command. The script still receives it:
    it may have an option of the same name that its own text does not contain."""
    names = [word.partition("=")[0] for word in request.args]
    options = [name for name in names if name in _DISTINCTIVE_OPTIONS or name.replace("_", "-") in _OPTION_SYNONYMS]
    file = launchers.find_module(str(request.script)) if request.is_module else request.script
    try:
        source = "" if file is None or is_config_file(file) else file.read_text(errors="replace")
    except OSError:  # `plan_launch` reports it
        return
    plain_source = source.replace("-", "_")
    name = next((name for name in options if name.lstrip("-").replace("-", "_") not in plain_source), None)
    if name is not None:
        option = _OPTION_SYNONYMS.get(name.replace("_", "-"), name)
        output.print_to_stderr(
            [
                f"unitrain: {name} is after SCRIPT, so it is an argument of '{request.script}'. If it is meant for "
                f"unitrain launch, write it before SCRIPT: unitrain launch {option} ... {request.script}"
            ]
        )

"""`unitrain launch`: from backend, processes and hosts to the launcher's own command, shown and then run."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import click

import launchers
from unitrain import environment
from unitrain.backends import registry
from unitrain.commands.restarts import Restarts
from unitrain.errors import ConfigError, did_you_mean

# The backend that a launcher's users know.
_BACKEND_OF = {launcher: backend for backend, launcher in launchers.LAUNCHER_OF.items()} | {
    "mpirun": "horovod",
    "srun": "ddp",
}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--backend",
    metavar="NAME",
    help="ddp, horovod, local, or a plug-in. [default: UNITRAIN_BACKEND, else the launcher's, else ddp]",
)
@click.option("--launcher", metavar="NAME", help="torchrun, horovodrun, mpirun, srun or none. [default: the backend's]")
@click.option("-np", "-n", "--num-processes", type=int, metavar="N", help="Ranks in all. [default: all slots, else 1]")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Where they run. [default: this host]")
@click.option("--gloo", "controller", flag_value="gloo", help="horovodrun: Gloo brings the ranks together. [default]")
@click.option("--mpi", "controller", flag_value="mpi", help="horovodrun: MPI brings the ranks together.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start the job again when it fails, up to N times; a Trainer goes on from its newest checkpoint. [default: 0]",
)
@click.option(
    "-x", "exports", multiple=True, metavar="NAME[=VALUE]", help="Hand a variable on to all ranks. Repeatable."
)
@click.option(
    "--launcher-args",
    multiple=True,
    metavar="OPTIONS",
    help='Options of the launcher\'s own, as in --launcher-args "--bind-to core". Repeatable.',
)
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    backend: str | None,
    launcher: str | None,
    num_processes: int | None,
    hosts: str | None,
    controller: str | None,
    exports: tuple[str, ...],
    launcher_args: tuple[str, ...],
    max_restarts: int,
    dry_run: bool,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with its ARGS on several ranks.

    Prints the launcher's own command and becomes it, so that signals and exit codes are the launcher's. The backend
    reaches the script as UNITRAIN_BACKEND. Any backend runs under any launcher.

    \b
      unitrain launch -np 2 train.py --epochs 3
      unitrain launch --backend horovod -np 8 -H node1:4,node2:4 train.py
      unitrain launch --backend horovod --launcher torchrun -np 2 train.py
      unitrain launch --launcher mpirun --backend ddp -np 8 -H node1:4,node2:4 -x WANDB_API_KEY train.py
    """
    try:
        job = {environment.JOB: secrets.token_hex(8)} if max_restarts else {}
        command = _command(
            backend, launcher, num_processes, hosts, controller, exports, launcher_args, script, args, job
        )
    except (launchers.LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    click.echo(command.shell(), err=not dry_run)
    if dry_run:
        return
    sys.stdout.flush()
    environ = environment.without_ranks() | dict(command.environment)
    if max_restarts:
        sys.exit(Restarts(max_restarts).run(command.argv, environ))
    os.execvpe(command.argv[0], command.argv, environ)


def _command(
    backend: str | None,
    launcher: str | None,
    num_processes: int | None,
    hosts: str | None,
    controller: str | None,
    exports: tuple[str, ...],
    launcher_args: tuple[str, ...],
    script: Path,
    args: tuple[str, ...],
    variables: Mapping[str, str],
) -> launchers.Command:
    backend = backend or environment.setting("UNITRAIN_BACKEND")
    if backend is not None:
        registry.check_known(backend)
    if launcher is None:
        # --gloo and --mpi are horovodrun's, so they choose it where nothing else does.
        implied = "horovodrun" if controller is not None and backend is None else "torchrun"
        launcher = launchers.LAUNCHER_OF.get(backend or "", implied)
    if backend is None:
        backend = _BACKEND_OF.get(launcher)
    check_script(script)
    check_not_launched(f"Run the script itself: python {script}")
    parsed = launchers.parse_hosts(hosts) if hosts is not None else ()
    if num_processes is None:
        num_processes = sum(host.slots for host in parsed) or launchers.allocated_slots(launcher) or 1
    forwarded, values = launchers.parse_exports(exports)
    if "UNITRAIN_BACKEND" in values:
        raise launchers.LaunchError(
            f"-x UNITRAIN_BACKEND={values['UNITRAIN_BACKEND']} is what --backend sets. "
            f"Use: --backend {values['UNITRAIN_BACKEND']}"
        )
    spec = launchers.LaunchSpec(
        script=str(script),
        args=args,
        num_processes=num_processes,
        hosts=parsed,
        backend=backend,
        controller=controller,
        environment={**values, **variables},
        forwarded=forwarded,
        launcher_args=launchers.parse_options(launcher_args),
    )
    return launchers.build(launcher, spec)


def check_script(script: Path) -> None:
    """Raise LaunchError unless `script` is a file."""
    if not script.is_file():
        near = did_you_mean(script.name, [path.name for path in script.parent.glob("*.py")])
        found = "is not a file" if script.exists() else "does not exist"
        raise launchers.LaunchError(f"Script '{script}' {found}. {near}Options of unitrain go before the script.")


def check_not_launched(fix: str) -> None:
    """Raise LaunchError, with the `fix`, where this process is a launcher's, or in one of several pods of a job."""
    if (pods := environment.pods()) > 1:
        # Each pod would train alone.
        raise launchers.LaunchError(
            f"PET_NNODES={pods} says that this is one of {pods} pods of a job, but ranks would be started in this one "
            "only. Start the script with torchrun, which reads it, as in: torchrun train.py"
        )
    placement = environment.detect(environment.without_pod())
    if placement.launcher in ("torchrun", "horovodrun", "mpirun", "mpirun_rsh", "mpiexec", "jsrun"):
        raise launchers.LaunchError(
            f"{placement.launcher} has started this process already ({', '.join(placement.evidence)}). {fix}"
        )

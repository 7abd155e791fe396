"""`unitrain launch`: from backend, processes and hosts to the launcher's own command, shown and then run."""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from unitrain import launchers
from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import new_key
from unitrain.errors import ConfigError, did_you_mean
from unitrain.supervisor import logs
from unitrain.supervisor.job import Job
from unitrain.supervisor.membership import Membership
from unitrain.supervisor.supervisor import Supervisor
from unitrain.tune.candidates import BUILT_IN, shown
from unitrain.tune.tuned_settings import FILE, Run, tuned_for

# The backend that a launcher's users know.
_BACKEND_OF = {launcher: backend for backend, launcher in launchers.DEFAULT_LAUNCHERS.items()} | {
    "mpirun": "horovod",
    "srun": "ddp",
}
_ELASTIC_RESTARTS = 3
_OVER_SSH = ("torchrun", "horovodrun", "mpirun")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--backend",
    metavar="NAME",
    help="ddp, horovod, local, or a plug-in. [default: UNITRAIN_BACKEND, else the launcher's, else ddp]",
)
@click.option("--launcher", metavar="NAME", help="torchrun, horovodrun, mpirun, srun or none. [default: the backend's]")
@click.option("-np", "-n", "--num-processes", type=int, metavar="N", help="Ranks in all. [default: all slots, else 1]")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Where they run. [default: this host]")
@click.option(
    "--hostfile", type=click.Path(path_type=Path), metavar="FILE", help='The same in a file, "HOST slots=N" on a line.'
)
@click.option("--interface", metavar="NAME", help="The network between hosts. [default: the one that leads there]")
@click.option("--gloo", "controller", flag_value="gloo", help="horovodrun: Gloo brings the ranks together. [default]")
@click.option("--mpi", "controller", flag_value="mpi", help="horovodrun: MPI brings the ranks together.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start the job again when it fails, up to N times; a Trainer goes on from its newest checkpoint. "
    "[default: 0, with --elastic 3]",
)
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    help="Run with so many ranks as the hosts that answer have slots for, and start the job again when they change.",
)
@click.option(
    "--host-discovery-script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask this program, time and again, which hosts there are; it prints HOST:SLOTS lines.",
)
@click.option(
    "--elastic-timeout",
    type=click.FloatRange(min=0),
    default=600.0,
    metavar="SECONDS",
    help="How long an elastic job waits for MIN slots before it ends. [default: 600]",
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
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep what each rank prints in FOLDER/rank-N.log too, and show the last lines of one that fails.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, run as by python -m.")
@click.option("--untuned", is_flag=True, help="Leave out what unitrain tune has found, in unitrain-tuned.json.")
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    backend: str | None,
    launcher: str | None,
    num_processes: int | None,
    hosts: str | None,
    hostfile: Path | None,
    interface: str | None,
    controller: str | None,
    exports: tuple[str, ...],
    launcher_args: tuple[str, ...],
    max_restarts: int | None,
    elastic: str | None,
    host_discovery_script: Path | None,
    elastic_timeout: float,
    log_dir: Path | None,
    module: bool,
    untuned: bool,
    dry_run: bool,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with its ARGS on several ranks.

    Prints the launcher's own command and becomes it, so that signals and exit codes are the launcher's. The backend
    reaches the script as UNITRAIN_BACKEND. Any backend runs under any launcher. With --max-restarts or --elastic it
    stays, and starts the command again; with --log-dir it stays too.

    \b
      unitrain launch -np 2 train.py --epochs 3
      unitrain launch -np 2 -m package.train --epochs 3
      unitrain launch --backend horovod -np 8 -H node1:4,node2:4 train.py
      unitrain launch --backend horovod --launcher torchrun -np 2 train.py
      unitrain launch --launcher mpirun --backend ddp -np 8 -H node1:4,node2:4 -x WANDB_API_KEY train.py
      unitrain launch --backend horovod --elastic 2:8 -H node1:4,node2:4 train.py
    """
    if not dry_run:
        # Launchers hand it on like a variable of the user's, so that no command line and no log shows it.
        environment.export({environment.JOB_KEY: new_key()})
    try:
        launcher, spec = _request(
            backend,
            launcher,
            _hosts(hosts, hostfile),
            interface,
            controller,
            exports,
            launcher_args,
            module,
            script,
            args,
        )
        spec = replace(spec, is_dry_run=dry_run)
        if log_dir is not None:
            spec = replace(spec, wrapper=logs.wrapper(log_dir))
        elsewhere = launcher in _OVER_SSH and not all(map(launchers.is_this_host, spec.hosts))
        if not math.isfinite(elastic_timeout):
            raise launchers.LaunchError(f"--elastic-timeout {elastic_timeout} is no time. Use --elastic-timeout 600")
        if not elsewhere and launcher != "srun":
            _check_interface(interface)
        if log_dir is not None and not dry_run:
            _check_folder(log_dir)
        if elastic is None:
            _check_not_discovered(host_discovery_script)
            slots = sum(host.slots for host in spec.hosts) or launchers.allocated_slots(launcher) or 1
            processes = slots if num_processes is None else num_processes
            if not untuned:
                spec = replace(spec, environment=_tuned(launcher, spec, processes) | dict(spec.environment))
            spec = replace(spec, num_processes=processes, max_restarts=max_restarts or 0)
            if elsewhere and not dry_run:
                mark = {launchers.LAUNCH_ID_VARIABLE: secrets.token_hex(8)}
                spec = replace(spec, port=launchers.check_hosts(spec), environment={**spec.environment, **mark})
            job = Job(launcher, spec)
            membership, command = None, job.command()
        else:
            limits = launchers.parse_elastic(elastic)
            _check_elastic(limits, launcher, num_processes, hosts, host_discovery_script)
            restarts = _ELASTIC_RESTARTS if max_restarts is None else max_restarts
            job = Job(launcher, replace(spec, elastic=limits, max_restarts=restarts))
            listed = _listed(limits, spec, host_discovery_script)
            membership = Membership(limits, listed, elastic_timeout)
            # Not all of them may answer, but what cannot be built on them is told before anything is tried.
            command = job.command(_first_hosts(launcher, limits, listed()))
    except (launchers.LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    if dry_run:
        click.echo(command.shell())
        _warn_of_missing_programs(job)
        return
    sys.stdout.flush()
    if not elsewhere:
        environment.pass_terminal_on()
    if job.is_followed:
        before: dict[str, int] = {}
        supervisor = Supervisor(
            job, membership, None if log_dir is None else lambda: before.update(logs.sizes(log_dir))
        )
        try:
            code = supervisor.run()
        except launchers.LaunchError as error:
            raise click.ClickException(str(error)) from error
        if code and log_dir is not None:
            click.echo("\n".join(logs.last_words(log_dir, supervisor.first_lost, before)), err=True)
        sys.exit(code)
    click.echo(command.shell(), err=True)
    if elsewhere and not command.per_host:
        command = launchers.with_cleanup(command, job.spec)
    os.execvpe(command.argv[0], command.argv, environment.without_ranks() | dict(command.environment))


def _hosts(hosts: str | None, hostfile: Path | None) -> tuple[launchers.Host, ...]:
    if hosts is not None and hostfile is not None:
        raise launchers.LaunchError(
            f"-H {hosts} and --hostfile {hostfile} both say where ranks run. Leave one of them out."
        )
    if hostfile is not None:
        return launchers.read_hostfile(hostfile)
    return launchers.parse_hosts(hosts) if hosts is not None else ()


def _request(
    backend: str | None,
    launcher: str | None,
    hosts: tuple[launchers.Host, ...],
    interface: str | None,
    controller: str | None,
    exports: tuple[str, ...],
    launcher_args: tuple[str, ...],
    module: bool,
    script: Path,
    args: tuple[str, ...],
) -> tuple[str, launchers.LaunchSpec]:
    """Return the launcher, and what is asked of it but for the number of ranks."""
    backend = backend or environment.setting("UNITRAIN_BACKEND")
    if backend is not None:
        registry.check_known(backend)
    if launcher is None:
        # --gloo and --mpi are horovodrun's, so they choose it where nothing else does.
        implied = "horovodrun" if controller is not None and backend is None else "torchrun"
        launcher = launchers.DEFAULT_LAUNCHERS.get(backend or "", implied)
    if backend is None:
        backend = _BACKEND_OF.get(launcher)
    if module:
        check_module(str(script))
    else:
        check_script(script)
    check_not_launched(f"Run the script itself: python {'-m ' if module else ''}{script}")
    options = launchers.parse_launcher_args(launcher_args)
    # Hosts that are named, or a torchrun that is one of several, are meant for each task.
    if not hosts and launcher != "none" and not any(word.startswith("--nnodes") for word in options):
        check_started_once(" To start a job in each task, name its host: -H localhost:N")
    forwarded, values = launchers.parse_exports(exports)
    if "UNITRAIN_BACKEND" in values:
        raise launchers.LaunchError(
            f"-x UNITRAIN_BACKEND={values['UNITRAIN_BACKEND']} is what --backend sets. "
            f"Use: --backend {values['UNITRAIN_BACKEND']}"
        )
    return launcher, launchers.LaunchSpec(
        script=str(script),
        module=module,
        args=args,
        hosts=hosts,
        interface=interface,
        backend=backend,
        controller=controller,
        environment=values,
        forwarded=forwarded,
        launcher_args=options,
    )


def _warn_of_missing_programs(job: Job) -> None:
    """Print a warning if the command of a dry run could not run on this host."""
    try:
        launchers.build(job.launcher, replace(job.spec, is_dry_run=False))
    except launchers.MissingLauncherError as error:
        click.echo(f"Warning: the command cannot run on this host. {error}", err=True)
    except launchers.LaunchError:
        return  # what this host lacks besides, such as a Slurm allocation, is reported when the command runs


def _check_interface(interface: str | None) -> None:
    """Raise LaunchError for an `interface` that this host, the only one of the job, does not have."""
    names = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in names:
        raise launchers.LaunchError(
            f"--interface {interface} is not a network interface of this host. {did_you_mean(interface, names)}"
            f"Use one of: {', '.join(names)}. On one host it can be left out."
        )


def _check_folder(folder: Path) -> None:
    """Make the `folder` of --log-dir. Raises LaunchError where that fails, or it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise launchers.LaunchError(
            f"--log-dir {folder} cannot be written to: {error.strerror}. Use a folder of yours: --log-dir logs"
        ) from None


def _check_not_discovered(script: Path | None) -> None:
    if script is not None:
        raise launchers.LaunchError(
            f"--host-discovery-script '{script}' finds the hosts of an elastic job, which this is not. "
            "Say how many ranks it may have: --elastic 1:8"
        )


def _check_elastic(
    limits: launchers.Elastic, launcher: str, num_processes: int | None, hosts: str | None, script: Path | None
) -> None:
    """Raise LaunchError for what an elastic job cannot have."""
    if launcher in ("none", "srun"):
        why = {
            "none": "one process without a launcher is never more. Use --backend ddp or --backend horovod",
            "srun": "Slurm gives a job its hosts once and for all. Leave --elastic out, and let Slurm start the job "
            "again: sbatch --requeue",
        }[launcher]
        raise launchers.LaunchError(f"--elastic {limits} changes the number of ranks, but {why}")
    if num_processes is not None:
        raise launchers.LaunchError(
            f"-np {num_processes} asks for a fixed number of ranks, and --elastic {limits} for another one now and "
            f"then. Leave -np out, or use --elastic {num_processes}:{num_processes}"
        )
    if hosts is not None and script is not None:
        raise launchers.LaunchError(
            f"-H {hosts} and --host-discovery-script '{script}' both say which hosts there are. Leave one of them out"
        )


def _first_hosts(
    launcher: str, limits: launchers.Elastic, listed: tuple[launchers.Host, ...]
) -> tuple[launchers.Host, ...]:
    """Return the hosts of the command that is shown; under torchrun, where it refuses several, all for its answer."""
    if launcher == "torchrun" and len(listed) > 1:
        return listed
    return limits.select_slots(listed) or (launchers.Host("localhost", limits.least),)


def _listed(
    limits: launchers.Elastic, spec: launchers.LaunchSpec, script: Path | None
) -> Callable[[], tuple[launchers.Host, ...]]:
    """Return what tells the hosts of an elastic job. Raises LaunchError where they can never be enough."""
    if script is not None:
        return partial(launchers.discover_hosts, script)
    hosts = spec.hosts or (launchers.Host("localhost", limits.most),)
    slots = sum(host.slots for host in hosts)
    if slots < limits.least:
        raise launchers.LaunchError(
            f"--elastic {limits} needs slots for {limits.least} ranks, but the hosts have {slots} in all. "
            f"Use --elastic {slots}:{limits.most}, or give the hosts more slots: "
            f"-H {hosts[0].name}:{hosts[0].slots + limits.least - slots}"
        )
    return lambda: hosts


def _tuned(launcher: str, spec: launchers.LaunchSpec, num_processes: int) -> dict[str, str]:
    """Return what `unitrain tune` has found for this run, but for what the user has set, and print a line about it.

    Settings that were found with other arguments, hosts, machines or another torch are not used, which is printed too.
    Raises ConfigError for a file that sets any other variable: it may come with somebody else's script, and a variable
    such as LD_PRELOAD runs code.
    """
    if spec.module or not FILE.exists():  # unitrain tune takes files only
        return {}
    backend = spec.backend or "ddp"
    hosts = spec.hosts or launchers.allocated_hosts(launcher)
    nodes = len(launchers.processes_per_host(num_processes, hosts)) if hosts else 1
    tuned, differences = tuned_for(Run.here(spec.script, spec.args, backend, num_processes, nodes))
    if differences:
        click.echo(
            f"unitrain: The settings in {FILE} are not used: {'; '.join(differences)}. Find new ones with: "
            f"unitrain tune, or delete the file",
            err=True,
        )
    if tuned is None:
        return {}
    own: set[str] = set()
    if backend not in launchers.DEFAULT_LAUNCHERS:
        own = {tunable.variable for tunable in registry.load(backend).tunables}
    for name in tuned.variables:
        if name not in BUILT_IN | own:
            raise ConfigError(
                f"{FILE} sets {name}, which is not a setting that unitrain tune changes for backend {backend!r}. "
                f"Delete the file unless you trust it, and set the variable yourself: export {name}=..."
            )
    used = {
        name: value
        for name, value in tuned.variables.items()
        if environment.setting(name) is None and name not in spec.environment
    }
    if used:
        click.echo(
            f"unitrain: {FILE} sets {shown(used)}: without, a step took {tuned.gain:.2f} times as long. "
            "Leave it out with: --untuned",
            err=True,
        )
    return used


def check_script(script: Path) -> None:
    """Raise LaunchError unless `script` is a file."""
    if not script.is_file():
        if re.fullmatch(r"python[\d.]*", script.name):
            raise launchers.LaunchError(
                f"'{script}' is the interpreter, which unitrain starts itself. Leave {script.name!r} out: "
                "unitrain launch -np 2 train.py"
            )
        near = did_you_mean(script.name, [path.name for path in script.parent.glob("*.py")])
        found = "is not a file" if script.exists() else "does not exist"
        raise launchers.LaunchError(f"Script '{script}' {found}. {near}Options of unitrain go before the script.")


def check_module(name: str) -> None:
    """Raise LaunchError unless `python -m name` finds a file."""
    if name.endswith(".py"):
        raise launchers.LaunchError(f"-m takes the name of a module, got the file {name!r}. Leave -m out to run a file")
    if launchers.find_module(name) is None:
        raise launchers.LaunchError(
            f"Module {name!r} is not found from {Path.cwd()}. Start from the folder that contains its package, or "
            "install it: pip install -e ."
        )


def check_not_launched(fix: str) -> None:
    """Raise LaunchError, with the `fix`, where this process is a launcher's, or in one of several pods of a job."""
    if (pods := environment.pods()) > 1:
        # Each pod would train alone.
        raise launchers.LaunchError(
            f"PET_NNODES={pods} says that this is one of {pods} pods of a job, but ranks would be started in this one "
            "only. Start the script with torchrun, which reads it, as in: torchrun train.py"
        )
    rank_info = environment.detect(environment.without_pod())
    if rank_info.launcher in ("torchrun", "horovodrun", "mpirun", "mpirun_rsh", "mpiexec", "jsrun"):
        raise launchers.LaunchError(
            f"{rank_info.launcher} has started this process already ({', '.join(rank_info.evidence)}). {fix}"
        )


def check_started_once(hint: str = "") -> None:
    """Raise LaunchError, with the `hint`, if srun has started this command in each of several tasks."""
    if launchers.is_one_of_several_tasks():
        raise launchers.LaunchError(
            f"srun has started this command in each of {environment.detect().size} tasks, and each would start ranks "
            f"of its own. Start it once: leave srun out, or use: srun --nodes=1 --ntasks=1.{hint}"
        )

"""Implementation of `unitrain launch`: validate, plan and execute a launch request.

plan = plan_launch(LaunchRequest(script=Path("train.py"), num_processes=2))
execute(plan)  # replaces this process with the launcher, or supervises the launcher and exits
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from unitrain import launchers
from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import new_key
from unitrain.bootstrap.network import LOOPBACK, check_can_listen
from unitrain.errors import ConfigError, did_you_mean
from unitrain.launchers import Command, ElasticRange, Host, LaunchError, LaunchSpec, SelectedDevices
from unitrain.launchers.hosts import add_slots, format_hosts
from unitrain.output import protect_programs_from_broken_pipes
from unitrain.supervisor import rank_logs
from unitrain.supervisor.attempt import SupervisedJob
from unitrain.supervisor.checks import (
    check_config_options,
    check_metrics_package,
    check_module,
    check_not_launched,
    check_script,
    check_started_once,
    is_config_file,
)
from unitrain.supervisor.membership import Membership
from unitrain.supervisor.supervisor import Supervisor
from unitrain.tune.tuned_settings import BUILT_IN_VARIABLES, TUNED_FILE, TunedRun, find_tuned, format_settings

# Default backend per launcher.
_DEFAULT_BACKENDS = {launcher: backend for backend, launcher in launchers.DEFAULT_LAUNCHERS.items()} | {
    "mpirun": "horovod",
    "srun": "ddp",
}
_LOOPBACK_TIMEOUT_SECONDS = 5.0
_STANDBY_LAUNCHERS = ("torchrun", "horovodrun", "mpirun")
# mpirun and srun end if the reader of their output exits. torchrun and horovodrun guard their output themselves.
_PIPE_SENSITIVE_LAUNCHERS = ("mpirun", "srun")
_MULTI_HOST_LAUNCHERS = ("torchrun", "horovodrun", "mpirun")  # not srun: Slurm selects its hosts


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The arguments of `unitrain launch`. None selects the default, which is documented in the option's help."""

    script: Path
    args: tuple[str, ...] = ()
    is_module: bool = False
    backend: str | None = None
    launcher: str | None = None
    num_processes: int | None = None
    devices: str | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    interface: str | None = None
    controller: str | None = None
    exports: tuple[str, ...] = ()
    launcher_args: tuple[str, ...] = ()
    max_restarts: int | None = None
    elastic: str | None = None
    host_discovery_script: Path | None = None
    elastic_timeout_seconds: float = 600.0
    log_dir: Path | None = None
    uses_standby: bool = False
    metrics_port: int | None = None
    metrics_address: str | None = None
    use_tuned_settings: bool = True
    is_dry_run: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """A validated launch: the job, the command of its first attempt, and the membership of an elastic job."""

    job: SupervisedJob
    command: Command
    membership: Membership | None
    names_other_hosts: bool
    log_dir: Path | None

    def missing_program_error(self) -> str | None:
        """Return an error message if this host lacks the launcher, a Slurm allocation that the launcher needs or, for a
        job on other hosts, ssh; otherwise None.

        Planning a dry run does not check this.
        """
        try:
            launchers.build(self.job.launcher, replace(self.job.spec, is_dry_run=False))
        except LaunchError as error:
            return str(error)
        return launchers.SSH_MISSING if self.names_other_hosts and shutil.which("ssh") is None else None


def plan_launch(request: LaunchRequest) -> LaunchPlan:
    """Validate a request and return its plan. Starts no ranks.

    Except in a dry run, it creates the folder of --log-dir and, for a job with a fixed number of ranks on other hosts,
    probes all hosts. For an elastic job, it runs the host discovery script, also in a dry run. Raises LaunchError and
    ConfigError.
    """
    launcher, spec = _build_spec(request)
    if request.log_dir is not None:
        spec = replace(spec, wrapper=rank_logs.wrapper_arguments(request.log_dir))
    names_other_hosts = launcher in _MULTI_HOST_LAUNCHERS and not all(map(launchers.is_this_host, spec.hosts))
    if not math.isfinite(request.elastic_timeout_seconds):
        raise LaunchError(
            f"--elastic-timeout takes a number of seconds, got {request.elastic_timeout_seconds}. "
            "Use --elastic-timeout 600"
        )
    if request.interface is not None and not (names_other_hosts or _may_use_unnamed_hosts(request, launcher, spec)):
        _check_interface(request.interface)
    if not (request.is_dry_run or names_other_hosts or launcher in ("none", "srun")):
        _check_loopback()
    if request.log_dir is not None and not request.is_dry_run:
        _create_log_folder(request.log_dir)
    spec = replace(spec, environment={**spec.environment, **_metrics_variables(request)})
    if request.uses_standby:
        _check_standby(request, launcher, spec)
    membership: Membership | None = None
    if request.elastic is None:
        job = _plan_fixed_job(request, launcher, spec, names_other_hosts)
        command = job.build_command()
    else:
        job, command, membership = _plan_elastic_job(request, launcher, spec, launchers.parse_elastic(request.elastic))
    job = replace(job, uses_standby=request.uses_standby)
    if request.metrics_port is not None and not request.is_dry_run and job.runs_rank_zero_on_this_host():
        check_metrics_package(request.metrics_port)
        _check_metrics_port(request.metrics_port, request.metrics_address or LOOPBACK)
    return LaunchPlan(job, command, membership, names_other_hosts, request.log_dir)


def execute(plan: LaunchPlan) -> NoReturn:
    """Replace this process with the launcher, or supervise the launcher (restarts, an elastic job, --log-dir) and exit
    with its exit code.

    Raises LaunchError if an attempt of a supervised job cannot be launched.
    """
    sys.stdout.flush()
    if not plan.names_other_hosts:
        environment.export_terminal()
    if plan.job.launcher in _PIPE_SENSITIVE_LAUNCHERS or plan.job.spec.controller == "mpi":
        protect_programs_from_broken_pipes()
    if plan.job.needs_supervisor:
        sizes_before: dict[str, int] = {}
        log_dir = plan.log_dir
        before_attempt = None if log_dir is None else lambda: sizes_before.update(rank_logs.log_sizes(log_dir))
        supervisor = Supervisor(plan.job, plan.membership, before_attempt)
        code = supervisor.run()
        if code and log_dir is not None:
            click.echo(
                "\n".join(rank_logs.last_lines_of_failed_rank(log_dir, supervisor.first_crashed_rank, sizes_before)),
                err=True,
            )
        sys.exit(code)
    command = plan.command
    click.echo(command.shell(), err=True)
    if plan.names_other_hosts and not command.per_host:
        command = launchers.add_cleanup(command, plan.job.launcher, plan.job.spec)
    os.execvpe(command.argv[0], command.argv, environment.without_rank_variables() | dict(command.environment))


def export_job_key() -> None:
    """Export a new job key, which the launcher forwards to the ranks. Ranks use it to authenticate each other."""
    environment.export({environment.JOB_KEY_VARIABLE: new_key()})


def _build_spec(request: LaunchRequest) -> tuple[str, LaunchSpec]:
    """Return the launcher and a spec. The number of ranks and the fields that depend on it are not set yet."""
    hosts = launchers.parse_host_options(request.hosts, request.hostfile)
    backend = request.backend or environment.get_variable("UNITRAIN_BACKEND")
    if backend is not None:
        registry.check_backend_name(backend)
    launcher = request.launcher
    if launcher is None:
        # --gloo and --mpi are options of horovodrun, so they select it unless --launcher or --backend is given.
        implied = "horovodrun" if request.controller is not None and backend is None else "torchrun"
        launcher = launchers.DEFAULT_LAUNCHERS.get(backend or "", implied)
    if backend is None:
        backend = _DEFAULT_BACKENDS.get(launcher)
    if request.is_module:
        check_module(str(request.script))
    else:
        check_script(request.script, runs_here=not request.is_dry_run)
    runs_config = not request.is_module and is_config_file(request.script)
    if runs_config:
        check_config_options(request.script, request.args)
    program = "unitrain train" if runs_config else f"python{' -m' if request.is_module else ''}"
    check_not_launched(f"In the command of that launcher, replace unitrain launch with: {program} {request.script}")
    options = launchers.parse_launcher_args(request.launcher_args)
    # With explicit hosts or torchrun --nnodes, starting the command in each task is intended.
    if not hosts and launcher != "none" and not any(word.startswith("--nnodes") for word in options):
        check_started_once(" To start a job in each task, name its host: -H localhost:N")
    forwarded, values = launchers.parse_exports(request.exports)
    launchers.check_no_backend(values)
    return launcher, LaunchSpec(
        script="unitrain" if runs_config else str(request.script),
        module=request.is_module or runs_config,
        args=("train", str(request.script), *request.args) if runs_config else request.args,
        hosts=hosts,
        interface=request.interface,
        backend=backend,
        controller=request.controller,
        environment=values,
        forwarded=forwarded,
        launcher_args=options,
        is_dry_run=request.is_dry_run,
    )


def _plan_fixed_job(request: LaunchRequest, launcher: str, spec: LaunchSpec, names_other_hosts: bool) -> SupervisedJob:
    """Return a job with a fixed number of ranks. Runs the preflight checks on other hosts, except in a dry run."""
    if request.host_discovery_script is not None:
        raise LaunchError(
            f"--host-discovery-script '{request.host_discovery_script}' is for elastic jobs, and --elastic is missing. "
            "Add the allowed number of ranks: --elastic 1:8"
        )
    num_processes = request.num_processes
    if request.devices is not None:
        selected = _select_devices(request.devices, launcher, spec, num_processes)
        num_processes = selected.num_processes
        spec = replace(spec, hosts=selected.hosts, environment={**spec.environment, **selected.variables})
    if num_processes is None:
        num_processes = sum(host.slots for host in spec.hosts) or launchers.allocated_slots(launcher) or 1
    if request.use_tuned_settings:
        # unitrain tune does not support modules.
        tuned = {} if request.is_module else _tuned_variables(launcher, request, spec, num_processes)
        spec = replace(spec, environment=tuned | dict(spec.environment))
    spec = replace(spec, num_processes=num_processes, max_restarts=request.max_restarts or 0)
    if names_other_hosts and not request.is_dry_run:
        launch_id_variables = {launchers.LAUNCH_ID_VARIABLE: secrets.token_hex(8)}
        spec = replace(spec, port=launchers.check_hosts(spec), environment={**spec.environment, **launch_id_variables})
    return SupervisedJob(launcher, spec)


def _plan_elastic_job(
    request: LaunchRequest, launcher: str, spec: LaunchSpec, limits: ElasticRange
) -> tuple[SupervisedJob, Command, Membership]:
    """Return an elastic job, the command of its first attempt, and its membership.

    The command assumes that all hosts are reachable.
    """
    _check_elastic(request, launcher, limits)
    restarts = launchers.DEFAULT_ELASTIC_RESTARTS if request.max_restarts is None else request.max_restarts
    job = SupervisedJob(launcher, replace(spec, elastic=limits, max_restarts=restarts))
    list_hosts = _host_source(request, spec, limits)
    membership = Membership(limits, list_hosts, request.elastic_timeout_seconds)
    try:
        available_hosts = list_hosts()
    except launchers.HostDiscoveryError as error:
        if request.is_dry_run:
            raise
        # The supervisor runs the script again until --elastic-timeout expires.
        click.echo(f"unitrain: {error} The script is run again until --elastic-timeout expires.", err=True)
        available_hosts = ()
    # Build the command for all listed hosts, to reject invalid requests before any process starts. The supervisor
    # rebuilds it in each attempt, for the reachable hosts.
    if launcher == "torchrun" and len(available_hosts) > 1:
        hosts = available_hosts  # `job.build_command` then raises an error with instructions per host
    else:
        hosts = limits.select_hosts(available_hosts) or (Host("localhost", limits.min_ranks),)
    return job, job.build_command(hosts), membership


def _select_devices(text: str, launcher: str, spec: LaunchSpec, num_processes: int | None) -> SelectedDevices:
    """Return the ranks, hosts and variables for `--devices`. Raises LaunchError."""
    variable = "CUDA_VISIBLE_DEVICES"
    devices = launchers.parse_devices(text)
    if variable in spec.environment or variable in spec.forwarded:
        raise LaunchError(f"{devices} and -x {variable} both select the GPUs. Leave one of them out.")
    selected = launchers.select_devices(devices, launcher, num_processes, spec.hosts)
    if spec.backend == "local" and (selected.num_processes or 1) > 1:
        raise LaunchError(
            f"{devices} starts {selected.num_processes} ranks, but backend 'local' runs one process. Use --backend ddp "
            "or --backend horovod, or select one device: --devices 1"
        )
    return selected


def _may_use_unnamed_hosts(request: LaunchRequest, launcher: str, spec: LaunchSpec) -> bool:
    """Return whether ranks may run on hosts of a Slurm allocation, or on hosts that a script discovers."""
    if spec.hosts:
        return False
    if launcher == "srun" or request.host_discovery_script is not None:
        return True
    # An elastic job without a script runs on this host.
    return request.elastic is None and not all(map(launchers.is_this_host, launchers.allocated_hosts(launcher)))


def _check_interface(interface: str) -> None:
    """Raise LaunchError if this host lacks the network interface `interface`. For jobs that run on this host only."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise LaunchError(
            f"--interface {interface} is not a network interface of this host. {did_you_mean(interface, names)}"
            f"Use one of: {', '.join(names)}. On one host it can be left out."
        )


def _check_loopback() -> None:
    """Raise LaunchError if this host lacks the IPv4 loopback address, which the ranks of one host use. A host with only
    IPv6 addresses, or a network namespace whose loopback interface is down, lacks it."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), _LOOPBACK_TIMEOUT_SECONDS),
        ):
            pass
    except OSError as error:
        raise LaunchError(
            f"Ranks on one host connect through {LOOPBACK}, which this host does not have ({error.strerror}). Add it: "
            f"sudo ip link set lo up && sudo ip address add {LOOPBACK}/8 dev lo"
        ) from None


def _create_log_folder(folder: Path) -> None:
    """Create the `folder` of --log-dir. Raises LaunchError if it cannot be created or is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LaunchError(
            f"--log-dir {folder} is not writable: {error.strerror}. Use another folder: --log-dir logs"
        ) from None


def _metrics_variables(request: LaunchRequest) -> dict[str, str]:
    """Return the variables for --metrics-port. Raises LaunchError for --metrics-address without it."""
    if request.metrics_port is None:
        if request.metrics_address is not None:
            raise LaunchError(
                f"--metrics-address {request.metrics_address} is the address of --metrics-port, which is missing. Add "
                "the port: --metrics-port 9400"
            )
        return {}
    address = {} if request.metrics_address is None else {environment.METRICS_ADDRESS_VARIABLE: request.metrics_address}
    return {environment.METRICS_PORT_VARIABLE: str(request.metrics_port), **address}


def _check_metrics_port(port: int, address: str) -> None:
    """Raise LaunchError if rank 0, which runs on this host, cannot listen on the port of --metrics-port."""
    try:
        check_can_listen(address, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        other_port = max(1024, port + 1) if port < 65535 else port - 1  # only root can listen on a port below 1024
        fix = (
            f"Use another port: --metrics-port {other_port}"
            if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
            else "Use an address of this host: --metrics-address 127.0.0.1"
        )
        raise LaunchError(
            f"--metrics-port {port} is not available on {address}: {getattr(error, 'strerror', None) or error}. {fix}"
        ) from None


def _check_elastic(request: LaunchRequest, launcher: str, limits: ElasticRange) -> None:
    """Raise LaunchError for options that are not supported with --elastic."""
    if launcher == "none":
        raise LaunchError(
            f"--elastic {limits} changes the number of ranks, but without a launcher there is always exactly one rank. "
            "Use --backend ddp or --backend horovod"
        )
    if launcher == "srun":
        raise LaunchError(
            f"--elastic {limits} changes the number of ranks, but the hosts of a Slurm job are fixed. Leave --elastic "
            "out, and let Slurm start the job again: sbatch --requeue"
        )
    if request.num_processes is not None:
        raise LaunchError(
            f"-np {request.num_processes} requests a fixed number of ranks, but --elastic {limits} requests a variable "
            f"number. Leave -np out, or use --elastic {request.num_processes}:{request.num_processes}"
        )
    if request.devices is not None:
        devices = launchers.parse_devices(request.devices)
        raise LaunchError(
            f"{devices} starts one rank per device, but --elastic {limits} requests a variable number of ranks. Leave "
            "--devices out, and select the GPUs with: -x CUDA_VISIBLE_DEVICES=1,3 -H node1:2,node2:2"
        )
    if request.hosts is not None and request.host_discovery_script is not None:
        raise LaunchError(
            f"-H {request.hosts} and --host-discovery-script '{request.host_discovery_script}' both name the hosts. "
            "Leave one of them out"
        )


def _check_standby(request: LaunchRequest, launcher: str, spec: LaunchSpec) -> None:
    """Raise LaunchError for options that contradict --standby, which requires restarts and rank 0 on this host."""
    if launcher not in _STANDBY_LAUNCHERS:
        raise LaunchError(
            f"--standby starts the ranks of the next attempt in advance, which is not supported with --launcher "
            f"{launcher}. Leave --standby out, or use one of: {', '.join(_STANDBY_LAUNCHERS)}"
        )
    if not request.max_restarts and (request.elastic is None or request.max_restarts == 0):
        raise LaunchError(
            "--standby starts the ranks of the next attempt in advance, but this job has only one attempt. Add the "
            "number of restarts: --max-restarts 3"
        )
    allocated = () if spec.hosts else launchers.allocated_hosts(launcher)
    if other_hosts := [host.name for host in allocated if not launchers.is_this_host(host)]:
        raise LaunchError(
            f"--standby does not support Slurm allocations of several hosts, and this one also has {other_hosts[0]}. "
            "Leave --standby out"
        )
    if all(map(launchers.is_this_host, spec.hosts)):
        return
    if not launchers.is_this_host(spec.hosts[0]):
        raise LaunchError(
            f"With --standby, rank 0 runs on the host of this command, but the first host is {spec.hosts[0].name}. "
            "Name this host first, or leave --standby out"
        )
    port = spec.environment.get("MASTER_PORT") or environment.get_variable("MASTER_PORT")
    if port:
        raise LaunchError(
            f"MASTER_PORT is {port}, but with --standby on several hosts, two attempts need different ports. To let "
            f"unitrain choose free ports, {launchers.master_port_fix(spec.environment)}"
        )


def _host_source(request: LaunchRequest, spec: LaunchSpec, limits: ElasticRange) -> Callable[[], tuple[Host, ...]]:
    """Return a function that lists the hosts of an elastic job. Raises LaunchError if they have too few slots."""
    if request.host_discovery_script is not None:
        return partial(launchers.discover_hosts, request.host_discovery_script)
    hosts = spec.hosts or (Host("localhost", limits.max_ranks),)
    slots = sum(host.slots for host in hosts)
    if slots < limits.min_ranks:
        raise LaunchError(
            f"--elastic {limits} needs slots for {limits.min_ranks} ranks, but the hosts have {slots} in all. "
            f"Use --elastic {slots}:{limits.max_ranks}, or give the hosts more slots: "
            f"-H {format_hosts(add_slots(hosts, limits.min_ranks - slots))}"
        )
    return lambda: hosts


def _tuned_variables(launcher: str, request: LaunchRequest, spec: LaunchSpec, num_processes: int) -> dict[str, str]:
    """Return and print the variables that `unitrain tune` stored for this run. Variables set by the user take
    precedence.

    Settings tuned with different arguments, hosts, machines or torch versions are ignored, with a message. Raises
    ConfigError if the file sets any other variable: the file may be distributed with an untrusted script, and a
    variable such as LD_PRELOAD executes code.
    """
    if not TUNED_FILE.exists():
        return {}
    backend = spec.backend or "ddp"
    hosts = spec.hosts or launchers.allocated_hosts(launcher)
    nodes = len(launchers.processes_per_host(num_processes, hosts)) if hosts else 1
    tuned, differences = find_tuned(
        TunedRun.on_this_machine(str(request.script), request.args, backend, num_processes, nodes)
    )
    if differences:
        click.echo(
            f"unitrain: The settings in {TUNED_FILE} are not used: {'; '.join(differences)}. Find new ones with: "
            f"unitrain tune, or delete the file",
            err=True,
        )
    if tuned is None:
        return {}
    plugin_variables: set[str] = set()
    if backend not in launchers.DEFAULT_LAUNCHERS:
        plugin_variables = {tunable.variable for tunable in registry.load(backend).tunables}
    for name in tuned.variables:
        if name not in BUILT_IN_VARIABLES | plugin_variables:
            raise ConfigError(
                f"{TUNED_FILE} sets {name}, which is not a setting that unitrain tune changes for backend {backend!r}. "
                f"Delete the file unless you trust it, and set the variable yourself: export {name}=..."
            )
    used = {
        name: value
        for name, value in tuned.variables.items()
        if environment.get_variable(name) is None and name not in spec.environment
    }
    if used:
        click.echo(
            f"unitrain: {TUNED_FILE} sets {format_settings(used)}: without these settings a step took "
            f"{tuned.gain:.2f} times as long. "
            "Ignore the file with: --untuned",
            err=True,
        )
    return used

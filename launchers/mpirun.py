"""Open MPI's mpirun: starts ranks on all hosts over ssh, or through the scheduler inside an allocation."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

from unitrain.launchers import slurm
from unitrain.launchers.arguments import merge_options, names_forwarded_by_default
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, check_distinct, format_hosts, is_this_host
from unitrain.launchers.rendezvous import DEFAULT_PORT, rendezvous_variables
from unitrain.launchers.spec import Command, LaunchSpec, find_program

DEFAULT_OPTIONS = (
    # By default, Open MPI binds all threads of a rank to one core or socket.
    ("--bind-to", "none"),
    # Fill the first host first, as the other launchers do.
    ("--map-by", "slot"),
    # After mpirun receives SIGTERM, it waits for this number of seconds, sends SIGTERM to the ranks, waits for the same
    # time, and sends SIGKILL. The default of 1 s is too short to write a checkpoint. mpirun waits for both periods even
    # if no ranks are left, and a failed job should end within ten seconds.
    ("-mca", "odls_base_sigkill_timeout", "4"),
)
# Accepts the key of a new host without a prompt. A changed key is still rejected.
SSH_OPTION = ("-mca", "plm_rsh_args", "-o StrictHostKeyChecking=accept-new")
# If mpirun ends while the network is interrupted, its daemons on other hosts find out with the first TCP keepalive
# probe afterwards. Open MPI sends the first probe after 300 s by default.
KEEPALIVE_OPTION = ("-mca", "oob_tcp_keepalive_time", "10")


def build(spec: LaunchSpec) -> Command:
    """Return the command. It runs on one host and starts the ranks on all hosts.

    Without hosts, the ranks run on this host, or on the hosts of the current Slurm allocation. Variables are forwarded
    by name, so that the command line shows no values. If all ranks run on this host, the rendezvous uses a free port;
    backend horovod then needs no rendezvous. On several hosts, the rendezvous is on the first host. Its port is the
    spec's port or 29500, or `slurm.Allocation.port` in a Slurm allocation. MASTER_ADDR and MASTER_PORT take precedence.
    """
    spec.check_no_controller("mpirun")
    fix = "It is part of Open MPI: sudo apt-get install openmpi-bin"
    program = find_program("mpirun", spec.python, fix, is_dry_run=spec.is_dry_run)
    if program != "mpirun":  # the bare name in a dry run on a host without mpirun
        _check_is_open_mpi(program)
    check_distinct(spec.hosts)
    job = None if spec.hosts else slurm.read_allocation()
    if job is not None:
        job.check_slots(spec.num_processes)
        spec = replace(spec, hosts=job.hosts)
    elif not spec.hosts:
        spec = replace(spec, hosts=(Host("localhost", spec.num_processes),))
    uses_other_hosts = len(spec.hosts) > 1 or not is_this_host(spec.hosts[0])
    variables = spec.variables
    # On one host, Horovod connects its ranks itself. On several hosts, it would have to guess the address of rank 0,
    # which fails if the cluster has no default route.
    if uses_other_hosts or spec.backend != "horovod":
        port = (job.port if job is not None else spec.port or DEFAULT_PORT) if uses_other_hosts else None
        variables |= rendezvous_variables(spec.hosts, port, variables)
    inherited = [name for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    names = dict.fromkeys([*variables, *inherited, *spec.forwarded])
    options = ["-np", str(spec.num_processes)]
    defaults = list(DEFAULT_OPTIONS)
    if job is None:  # inside an allocation mpirun asks Slurm for the hosts
        options += ["-H", format_hosts(spec.hosts)]
    variables |= slurm.mpirun_variables(spec.hosts, job)
    if uses_other_hosts:
        if job is None:
            defaults.append(SSH_OPTION)
        defaults.append(KEEPALIVE_OPTION)
        names |= dict.fromkeys(names_forwarded_by_default())  # mpirun forwards only named variables to other hosts
        if spec.interface is not None:
            defaults += [("-mca", f"{part}_tcp_if_include", spec.interface) for part in ("btl", "oob")]
    for name in names:
        options += ["-x", name]
    options += merge_options(defaults, spec.launcher_args)
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Command((program, *options, spec.python, *spec.program), variables)


def _check_is_open_mpi(program: str) -> None:
    """Raise LaunchError for the mpirun of another MPI implementation, whose options differ."""
    try:
        process = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"'{program} --version' failed: {error}. Fix it, or choose another launcher.") from None
    if "Open MPI" not in process.stdout and "OpenRTE" not in process.stdout:
        lines = (process.stdout or process.stderr).strip().splitlines() or ["nothing"]
        raise LaunchError(
            f"'{program}' is not Open MPI's mpirun: its --version prints {lines[0].strip()!r}. Put Open MPI's mpirun "
            "first on PATH, or start the script with this program: mpiexec -genv MASTER_ADDR <host of rank 0> -genv "
            "MASTER_PORT 29500 ..."
        )

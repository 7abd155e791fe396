"""Open MPI's mpirun: starts ranks on all hosts over ssh, or through the scheduler whose allocation it is typed in."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

from unitrain.launchers import slurm
from unitrain.launchers.addresses import DEFAULT_PORT, meeting_place
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.exports import handed_on
from unitrain.launchers.hosts import Host, check_spellings, is_here
from unitrain.launchers.options import with_defaults
from unitrain.launchers.programs import find_program
from unitrain.launchers.spec import Command, LaunchSpec

DEFAULTS = (
    # Open MPI would bind each rank to one core or one socket, with all its threads.
    ("--bind-to", "none"),
    # The first host is filled first, as by the other launchers.
    ("--map-by", "slot"),
    # Seconds from mpirun's SIGTERM until the ranks get theirs, and again until SIGKILL: with its own 1 s no
    # checkpoint is written. It waits both also where no rank is left, and a failed job is to end within ten.
    ("-mca", "odls_base_sigkill_timeout", "4"),
)
# A new host's key would be asked about, where nobody answers. A key that has changed is still refused.
SSH = ("-mca", "plm_rsh_args", "-o StrictHostKeyChecking=accept-new")


def build(spec: LaunchSpec) -> Command:
    """Return the command; it is typed on one host and reaches the others itself.

    Without hosts the ranks are on this one, or on those of the Slurm allocation that it is typed in. Variables are
    handed on by name, so that no command line shows a value. They are told to meet at a free port of this host, but for
    Horovod's, which need none there, or at port 29500 of the first of several (in a Slurm allocation see
    `slurm.Allocation`), unless MASTER_ADDR and MASTER_PORT are set.
    """
    spec.check_no_controller("mpirun")
    remedy = "Open MPI has it: sudo apt-get install openmpi-bin"
    program = find_program("mpirun", spec.python, remedy, planned=spec.planned)
    if program != "mpirun":  # the bare name of a planned launch
        _check_is_open_mpi(program)
    check_spellings(spec.hosts)
    job = None if spec.hosts else slurm.allocation()
    if job is not None:
        job.check_slots(spec.num_processes)
        spec = replace(spec, hosts=job.hosts)
    elif not spec.hosts:
        spec = replace(spec, hosts=(Host("localhost", spec.num_processes),))
    elsewhere = len(spec.hosts) > 1 or not is_here(spec.hosts[0])
    variables = spec.variables
    # On one host Horovod lets its ranks find each other. Between hosts it would have to guess an address of rank 0's,
    # which it cannot where no route leads out of the cluster.
    if elsewhere or spec.backend != "horovod":
        port = (job.port if job is not None else spec.port or DEFAULT_PORT) if elsewhere else None
        variables |= meeting_place(spec.hosts, port, variables)
    users = [name for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    names = dict.fromkeys([*variables, *users, *spec.forwarded])
    options = ["-np", str(spec.num_processes)]
    defaults = list(DEFAULTS)
    if job is None:  # mpirun knows the hosts of its allocation
        options += ["-H", ",".join(map(str, spec.hosts))]
    variables |= slurm.mpirun_variables(spec.hosts, job)
    if elsewhere:
        if job is None:
            defaults.append(SSH)
        names |= dict.fromkeys(handed_on())  # on another host a rank has only what is named to it
        if spec.interface is not None:
            defaults += [("-mca", f"{part}_tcp_if_include", spec.interface) for part in ("btl", "oob")]
    for name in names:
        options += ["-x", name]
    options += with_defaults(defaults, spec.launcher_args)
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Command((program, *options, spec.python, *spec.program), variables)


def _check_is_open_mpi(program: str) -> None:
    """Raise LaunchError for the mpirun of another MPI, which has other options."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"'{program} --version' does not answer: {error}. Mend it, or choose another launcher."
        ) from None
    if "Open MPI" not in done.stdout and "OpenRTE" not in done.stdout:
        told = (done.stdout or done.stderr).strip().splitlines() or ["nothing"]
        raise LaunchError(
            f"'{program}' is not Open MPI's: its --version says {told[0].strip()!r}. Put Open MPI's first on PATH, or "
            "start the script with this one: mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ..."
        )

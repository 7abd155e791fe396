"""horovodrun: starts ranks on all hosts, over ssh (Gloo controller) or through mpirun (MPI controller)."""

from __future__ import annotations

import os
from dataclasses import replace

from unitrain.launchers import slurm
from unitrain.launchers.devices import CUDA_VISIBLE_DEVICES
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import check_distinct, format_hosts, is_this_host
from unitrain.launchers.spec import Command, LaunchSpec, after_options, find_program, launcher_module_command

# After a signal, mpirun kills the ranks after this number of seconds. The default, 1 s, is too short to write a
# checkpoint. `unitrain.launchers.mpirun` sets the same limit by an option.
_SIGKILL_TIMEOUT_VARIABLE = "OMPI_MCA_odls_base_sigkill_timeout"


def build(spec: LaunchSpec) -> Command:
    """Return the command. It runs on one host and starts the ranks on all hosts."""
    if not spec.hosts and (job := slurm.read_multi_host_allocation()) is not None:
        job.check_slots(spec.num_processes)
        spec = replace(spec, hosts=job.hosts)
    check_distinct(spec.hosts)
    fix = "Build Horovod for this torch with: unitrain horovod build"
    module = "unitrain.backends.horovod.horovodrun"
    start = launcher_module_command(module, "horovod", spec.python, fix, is_dry_run=spec.is_dry_run)
    options = ["-np", str(spec.num_processes)]
    if spec.hosts:
        options += ["-H", format_hosts(spec.hosts)]
    variables = spec.variables
    # The controller is always explicit, because horovodrun's default depends on how Horovod was built.
    controller = spec.controller or "gloo"
    if controller == "mpi" and spec.backend == "ddp":
        raise LaunchError(
            "Backend 'ddp' needs a rendezvous address, which horovodrun --mpi does not provide. "
            "Omit --mpi, or use --backend horovod, or --launcher mpirun."
        )
    if controller == "mpi":
        fix = "Install Open MPI (sudo apt-get install openmpi-bin), or omit --mpi"
        find_program("mpirun", spec.python, fix, is_dry_run=spec.is_dry_run)
        variables |= slurm.mpirun_variables(spec.hosts)
        if _SIGKILL_TIMEOUT_VARIABLE not in os.environ:
            variables.setdefault(_SIGKILL_TIMEOUT_VARIABLE, "4")
    options.append(f"--{controller}")
    if spec.interface is not None:
        options += ["--network-interfaces", spec.interface]
    if len(spec.hosts) > 1:
        options.append("--disable-cache")  # otherwise, horovodrun caches for an hour which hosts are reachable
    if controller == "mpi" and os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    program = after_options((*_device_assignment(spec), spec.python, *spec.program))
    return Command((*start, *options, *spec.launcher_args, *program), variables)


def _device_assignment(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the prefix of the rank's command that sets CUDA_VISIBLE_DEVICES, which horovodrun does not send to other
    hosts. It is empty if the spec neither sets nor forwards the variable, or if all ranks run on this host."""
    settings = {**{name: os.environ.get(name, "") for name in spec.forwarded}, **spec.environment}
    if CUDA_VISIBLE_DEVICES not in settings or all(map(is_this_host, spec.hosts)):
        return ()
    return ("env", f"{CUDA_VISIBLE_DEVICES}={settings[CUDA_VISIBLE_DEVICES]}")

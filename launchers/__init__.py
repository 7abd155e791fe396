"""Launchers: functions that convert a launch spec to the command that starts the ranks.

    from unitrain.launchers import LaunchSpec, build, parse_hosts

    command = build("horovodrun", LaunchSpec(script="train.py", num_processes=4, hosts=parse_hosts("a:2,b:2")))
    print(command.shell())

`build` does not start ranks. It only queries this machine, for example for the hosts of a Slurm allocation or for a
free port. The package imports neither torch nor the rest of unitrain, so a command can be displayed quickly on any
machine. Other packages can add launchers through the entry-point group `unitrain.launchers` (name -> build function).

- `spec`: `LaunchSpec` (the request), `Command` (the result), and lookup of programs and modules
- `errors`: `LaunchError` and suggestions for misspelled names
- `registry`: launcher names, `build` and `build_local`
- `torchrun`, `horovodrun`, `mpirun`, `srun`: one launcher each
- `devices`: selection of GPUs, or of the number of processes on CPUs
- `hosts`: hosts and slots, hostfiles, process placement
- `elastic`: the allowed range of ranks, host discovery, reachability
- `arguments`: `--launcher-args` and `-x`
- `rendezvous`: MASTER_ADDR and MASTER_PORT
- `slurm`: the hosts and tasks of the current allocation
- `preflight`, `host_probe`: checks of all hosts before a launch
- `agents`, `host_agent`: start, monitor and clean up processes on several hosts
- `translation`: convert the command line of one launcher to another launcher
"""

from unitrain.launchers.agents import LAUNCH_ID_VARIABLE, add_cleanup
from unitrain.launchers.arguments import check_no_backend, parse_exports, parse_launcher_args
from unitrain.launchers.devices import Devices, SelectedDevices, parse_devices, select_devices
from unitrain.launchers.elastic import (
    DEFAULT_ELASTIC_RESTARTS,
    SSH_MISSING,
    ElasticRange,
    HostDiscoveryError,
    discover_hosts,
    find_reachable_hosts,
    parse_elastic,
)
from unitrain.launchers.errors import LaunchError, MissingLauncherError
from unitrain.launchers.hosts import (
    Host,
    is_this_host,
    parse_host_options,
    parse_hosts,
    processes_per_host,
    read_hostfile,
)
from unitrain.launchers.preflight import check_hosts
from unitrain.launchers.registry import DEFAULT_LAUNCHERS, available, build, build_local
from unitrain.launchers.rendezvous import master_port_fix
from unitrain.launchers.slurm import allocated_hosts, allocated_slots, is_one_of_several_tasks
from unitrain.launchers.spec import Command, LaunchSpec, count_usable_cores, find_module

__all__ = [
    "DEFAULT_ELASTIC_RESTARTS",
    "DEFAULT_LAUNCHERS",
    "LAUNCH_ID_VARIABLE",
    "SSH_MISSING",
    "Command",
    "Devices",
    "ElasticRange",
    "Host",
    "HostDiscoveryError",
    "LaunchError",
    "LaunchSpec",
    "MissingLauncherError",
    "SelectedDevices",
    "add_cleanup",
    "allocated_hosts",
    "allocated_slots",
    "available",
    "build",
    "build_local",
    "check_hosts",
    "check_no_backend",
    "count_usable_cores",
    "discover_hosts",
    "find_module",
    "find_reachable_hosts",
    "is_one_of_several_tasks",
    "is_this_host",
    "master_port_fix",
    "parse_devices",
    "parse_elastic",
    "parse_exports",
    "parse_host_options",
    "parse_hosts",
    "parse_launcher_args",
    "processes_per_host",
    "read_hostfile",
    "select_devices",
]

"""What starts the processes: each launcher is one function from what the user asked to the command that does it.

    from launchers import LaunchSpec, build

    command = build("horovodrun", LaunchSpec(script="train.py", num_processes=4, hosts=parse_hosts("a:2,b:2")))
    print(command.shell())

`unitrain.launchers.translation` reads and writes the lines of launchers, also for other machines than this one.

torchrun, horovodrun, Open MPI's mpirun and Slurm's srun are built in, and "none". A command is data and starts nothing;
what it needs of the machine it asks there, as for the hosts of an allocation or a free port. This package imports
neither torch nor unitrain, so that a command can be shown at once, on any machine. A package adds a launcher through
the entry-point group `unitrain.launchers`, name -> build function.
"""

from unitrain.launchers.agents import MARK, guarded
from unitrain.launchers.discovery import answering, discover
from unitrain.launchers.elastic import Elastic, parse_elastic
from unitrain.launchers.errors import LaunchError, MissingLauncherError
from unitrain.launchers.exports import parse_exports
from unitrain.launchers.hosts import Host, is_here, parse_hosts, read_hostfile, shares
from unitrain.launchers.options import parse_options
from unitrain.launchers.preflight import check_hosts
from unitrain.launchers.programs import find_module
from unitrain.launchers.registry import LAUNCHER_OF, available, build
from unitrain.launchers.slurm import allocated_hosts, allocated_slots, is_one_of_several_tasks
from unitrain.launchers.spec import Command, LaunchSpec, cores

__all__ = [
    "LAUNCHER_OF",
    "MARK",
    "Command",
    "Elastic",
    "Host",
    "LaunchError",
    "LaunchSpec",
    "MissingLauncherError",
    "allocated_hosts",
    "allocated_slots",
    "answering",
    "available",
    "build",
    "check_hosts",
    "cores",
    "discover",
    "find_module",
    "guarded",
    "is_here",
    "is_one_of_several_tasks",
    "parse_elastic",
    "parse_exports",
    "parse_hosts",
    "parse_options",
    "read_hostfile",
    "shares",
]

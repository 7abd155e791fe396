"""What starts the processes: each launcher is one pure function from what the user asked to the command that does it.

    from launchers import LaunchSpec, build

    command = build("horovodrun", LaunchSpec(script="train.py", num_processes=4, hosts=parse_hosts("a:2,b:2")))
    print(command.shell())

This package imports neither torch nor unitrain, so that a command can be shown at once, on any machine. A package adds
a launcher through the entry-point group `unitrain.launchers`, name -> build function.
"""

from launchers.errors import LaunchError
from launchers.hosts import Host, parse_hosts
from launchers.registry import available, build
from launchers.spec import Command, LaunchSpec

__all__ = ["Command", "Host", "LaunchError", "LaunchSpec", "available", "build", "parse_hosts"]

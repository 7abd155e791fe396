"""What the user asked for, and the command that does it: plain data both."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from unitrain.launchers.elastic import Elastic
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, shares


def cores() -> int:
    """Return how many cores this process may use, which a scheduler or a container may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A launch: run `python script args...` as `num_processes` ranks on `hosts`, or on this one when there are none.

    `backend` reaches the script as UNITRAIN_BACKEND. `controller` is horovodrun's, "gloo" or "mpi". Every rank gets the
    variables of `environment` and those whose names are in `forwarded`. `launcher_args` are options of the launcher
    itself, which go before those made from this spec where both say the same. `elastic` and `max_restarts` are for a
    launcher that is started on every host, and starts the job again by itself: torchrun on several hosts.
    Ranks on several hosts talk over the network `interface`, and meet on the first host at `port`, where these are not
    None. With `module`, `script` is the name of a module, run as by `python -m`. `wrapper` is a script with arguments
    that every rank runs instead, followed by the script and its own.
    A `planned` launch is shown, not run, so its programs need not be installed on this host.
    Raises LaunchError for fewer than one process, or more than there are slots.
    """

    script: str
    module: bool = False
    args: tuple[str, ...] = ()
    num_processes: int = 1
    hosts: tuple[Host, ...] = ()
    backend: str | None = None
    controller: str | None = None
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    forwarded: tuple[str, ...] = ()
    launcher_args: tuple[str, ...] = ()
    elastic: Elastic | None = None
    max_restarts: int = 0
    interface: str | None = None
    port: int | None = None
    wrapper: tuple[str, ...] = ()
    planned: bool = False

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise LaunchError(f"A run needs at least 1 process, got -np {self.num_processes}. Use: -np 1")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.num_processes > slots:
            raise LaunchError(
                f"{self.num_processes} processes were asked for, but the hosts have {slots} "
                f"{'slot' if slots == 1 else 'slots'}. Use -np {slots}, or give the hosts more slots: "
                f"-H {self.hosts[0].name}:{self.hosts[0].slots + self.num_processes - slots}"
            )

    @property
    def program(self) -> tuple[str, ...]:
        """The arguments of Python on every rank: a script, or -m and a module, and its arguments."""
        return (*self.wrapper, *(("-m",) if self.module else ()), self.script, *self.args)

    def check_no_controller(self, launcher: str) -> None:
        """Raise LaunchError where a controller was chosen, which `launcher` has not."""
        if self.controller is not None:
            raise LaunchError(
                f"--{self.controller} chooses horovodrun's controller, but the launcher is {launcher}. "
                "Leave it out, or use: --backend horovod --launcher horovodrun"
            )

    @property
    def most_per_host(self) -> int:
        """The number of processes on the fullest host; hosts are filled in order."""
        return max(shares(self.num_processes, self.hosts or (Host("localhost", self.num_processes),)))

    @property
    def variables(self) -> dict[str, str]:
        """What every launcher adds to the environment, unless the user has set it."""
        added = dict(self.environment)
        if self.backend is not None:
            added["UNITRAIN_BACKEND"] = self.backend
        if self.interface is not None:
            added |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), self.interface)
        # torchrun gives each rank one thread and horovodrun gives each all cores: the same share under both.
        if "OMP_NUM_THREADS" not in os.environ:
            added.setdefault("OMP_NUM_THREADS", str(max(1, cores() // self.most_per_host)))
        return added


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the variables to add to the environment it inherits.

    Where a program has to be started on each host, `per_host` says by which command, and `argv` does it.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    per_host: tuple[tuple[str, Command], ...] = ()

    def shell(self) -> str:
        """Return the command as a line that a shell takes, or one for each host."""
        if self.per_host:
            return "\n".join(f"on {host}: {command.shell()}" for host, command in self.per_host)
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])

"""`Job`: a job independent of any launcher. Every command line is parsed into a `Job` and built from a `Job`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.translation.words import as_typed

_PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class LauncherOption:
    """An option of a launcher that is not part of the job.

    Attributes:
        launcher: The launcher of the original command line.
        words: The option as it was typed.
        topic: The topic of the option, a key of the advice in `writing`.
        equivalents: The words with the same effect under other launchers.
        variables: The environment variables with the same effect under any launcher.
        is_nested: Whether the job contains the content of this option as further options and variables.
    """

    launcher: str
    words: tuple[str, ...]
    topic: str
    equivalents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    is_nested: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program that runs on one or several hosts.

    Attributes:
        ranks_per_host: The number of ranks on each host, in rank order.
        hosts: The names of the hosts; empty if the command line does not contain them.
        environment: Variables to set on every rank.
        public_names: Variables in `environment` whose values may be shown, because they come from other options. All
            other values may be secret.
        forwarded: Names of variables to forward to every rank.
        address: The address of the rendezvous; None for the first host.
        port: The port of the rendezvous; None for 29500.
        max_restarts: The maximum number of restarts after a failure; None for the launcher's default.
        directory: The folder in which the command is started; None for the current folder.
        discovery_script: A program that lists the hosts while the job runs. `hosts` is then empty.
        launcher_options: The options that are not part of the job.
        remarks: Messages for the user from parsing the command line.
    """

    program: tuple[str, ...]
    ranks_per_host: tuple[int, ...] = (1,)
    hosts: tuple[str, ...] = ()
    backend: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    public_names: frozenset[str] = frozenset()
    forwarded: tuple[str, ...] = ()
    address: str | None = None
    port: int | None = None
    max_restarts: int | None = None
    directory: str | None = None
    discovery_script: str | None = None
    launcher_options: tuple[LauncherOption, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The total number of processes."""
        return sum(self.ranks_per_host)

    @property
    def private_values(self) -> dict[str, str]:
        """The variables in `environment` that are passed out of band and not shown."""
        return {name: value for name, value in self.environment.items() if name not in self.public_names}

    @property
    def named_hosts(self) -> tuple[Host, ...]:
        """The named hosts, each with its number of ranks as slots."""
        return tuple(Host(name, count) for name, count in zip(self.hosts, self.ranks_per_host, strict=False))

    @property
    def python(self) -> str | None:
        """The Python interpreter that runs the program, or None if the program is not a Python script."""
        return self.program[0] if _PYTHON.fullmatch(self.program[0].rpartition("/")[2]) else None

    @property
    def rendezvous_variables(self) -> dict[str, str]:
        """MASTER_ADDR and MASTER_PORT; empty if there are several hosts and the name of the first is unknown."""
        address = self.address or (
            self.hosts[0] if self.hosts else "127.0.0.1" if len(self.ranks_per_host) == 1 else None
        )
        if address is None:
            return {}
        return {"MASTER_ADDR": address.strip("[]"), "MASTER_PORT": str(self.port or DEFAULT_PORT)}

    def check_hosts_named(self, launcher: str) -> None:
        """Raise LaunchError if `launcher` requires host names and the names of several hosts are unknown."""
        if len(self.ranks_per_host) > 1 and not self.hosts:
            known_hosts = f"only {self.address!r}" if self.address else "none"
            names = [self.address or "node1", *(f"node{number}" for number in range(2, len(self.ranks_per_host) + 1))]
            slots = ",".join(f"{name}:{count}" for name, count in zip(names, self.ranks_per_host, strict=True))
            raise LaunchError(
                f"{launcher} needs the names of all {len(self.ranks_per_host)} hosts, but the command names "
                f"{known_hosts}. Name them, as in: --hosts {slots}"
            )

    def check_equal_ranks_per_host(self, launcher: str) -> int:
        """Return the number of ranks on each host. Raise LaunchError if the hosts have different numbers of ranks."""
        most_ranks = max(self.ranks_per_host)
        if len(set(self.ranks_per_host)) > 1:
            raise LaunchError(
                f"{launcher} starts the same number of processes on each host, but the hosts of this job have "
                f"{', '.join(map(str, self.ranks_per_host))}. Use equal slots, as in: "
                f"-np {len(self.ranks_per_host) * most_ranks} with {most_ranks} slots per host"
            )
        return self.ranks_per_host[0]


def parse_number(option: str, text: str, minimum: int = 1) -> int:
    """Return the whole number in the value of `option`. Raise LaunchError for other text, and for a number below
    `minimum`."""
    if not (text.isascii() and text.isdecimal()) or int(text) < minimum:
        raise LaunchError(
            f"{option} must be a whole number of at least {minimum}, got {as_typed(text)!r}. Write a number, as in: "
            f"{option} {max(minimum, 2)}"
        )
    return int(text)

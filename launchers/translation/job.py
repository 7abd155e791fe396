"""A job as no launcher in particular has it: what every command line is read into, and written from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.translation.words import shown

_PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class Other:
    """An option that is not a part of the job: `words` of `launcher`, as they were typed, about some `topic`.

    `passes` has the words that say the same to other launchers, `variables` what says it to the ranks themselves.
    """

    launcher: str
    words: tuple[str, ...]
    topic: str
    passes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """`program` on several hosts, `counts` processes on each in the order of their ranks.

    `hosts` are the names of those hosts, or empty where a scheduler chooses them, or where it is one that need not be
    named. The ranks meet at `address` and `port`, None standing for the first host and 29500. `environment` is set for
    every rank, and the variables named in `forwarded` are handed on. `discovery` is a program that prints the hosts
    while the job runs; then `hosts` is empty. `remarks` are what reading has found.
    """

    program: tuple[str, ...]
    counts: tuple[int, ...] = (1,)
    hosts: tuple[str, ...] = ()
    backend: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    forwarded: tuple[str, ...] = ()
    address: str | None = None
    port: int | None = None
    max_restarts: int = 0
    directory: str | None = None
    discovery: str | None = None
    others: tuple[Other, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(self.counts)

    @property
    def slots(self) -> tuple[Host, ...]:
        """The hosts with their processes, for those whose names are known."""
        return tuple(Host(name, count) for name, count in zip(self.hosts, self.counts, strict=False))

    @property
    def python(self) -> str | None:
        """The Python that runs the program, or None where it is another program."""
        return self.program[0] if _PYTHON.fullmatch(self.program[0].rpartition("/")[2]) else None

    @property
    def rendezvous(self) -> dict[str, str]:
        """MASTER_ADDR and MASTER_PORT, where the first host is known by name or is the only one."""
        address = self.address or (self.hosts[0] if self.hosts else "127.0.0.1" if len(self.counts) == 1 else None)
        if address is None:
            return {}
        return {"MASTER_ADDR": address.strip("[]"), "MASTER_PORT": str(self.port or DEFAULT_PORT)}

    def check_hosts_named(self, launcher: str) -> None:
        """Raise LaunchError where `launcher` needs the names of several hosts, and they are not known."""
        if len(self.counts) > 1 and not self.hosts:
            first = f"none but {self.address!r}" if self.address else "none"
            names = [self.address or "node1", *(f"node{number}" for number in range(2, len(self.counts) + 1))]
            slots = ",".join(f"{name}:{count}" for name, count in zip(names, self.counts, strict=True))
            raise LaunchError(
                f"{launcher} needs the names of all {len(self.counts)} hosts, and the line has {first}. "
                f"Name them, as in: --hosts {slots}"
            )

    def check_even(self, launcher: str) -> int:
        """Return how many processes each host gets; raise LaunchError where it is not the same number for all."""
        if len(set(self.counts)) > 1:
            raise LaunchError(
                f"{launcher} starts equally many processes on each host, and these get "
                f"{', '.join(map(str, self.counts))}. Use as many slots on each, as in: "
                f"-np {len(self.counts) * max(self.counts)} with {max(self.counts)} slots a host"
            )
        return self.counts[0]


def number(option: str, text: str, least: int = 1) -> int:
    """Return the whole number that `option` was given; raise LaunchError for anything else."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise LaunchError(
            f"{option} must be a whole number from {least}, got {shown(text)!r}. Write the number itself, as in: "
            f"{option} {max(least, 2)}"
        )
    return int(text)

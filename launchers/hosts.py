"""Hosts and their slots, as Horovod and MPI write them: `a:4,b:4`."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unitrain.launchers.errors import LaunchError

_MOST_CHARACTERS = 2**24
_HOST = re.compile(r"(?P<name>(?!-)[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::(?P<slots>[^:]*))?")


@dataclass(frozen=True)
class Host:
    """A host by name or address, and how many processes it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in `text`, "name:slots,..." with one slot where none is given. Raises LaunchError."""
    hosts = tuple(_parse_host(part.strip(), text) for part in text.split(","))
    for number, host in enumerate(hosts):
        for earlier in hosts[:number]:
            if earlier.name == host.name:
                raise LaunchError(
                    f"Host {host.name!r} is named twice in {text!r}. Add the slots up: "
                    f"-H {host.name}:{earlier.slots + host.slots}"
                )
    return hosts


def read_lines(path: Path) -> list[str]:
    """Return the lines of a list of hosts. Raises OSError, also for more than 16 MiB, and UnicodeDecodeError."""
    with path.open(encoding="utf-8") as file:
        text = file.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:  # a device such as /dev/zero never ends
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return text.splitlines()


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts in a file, one on a line: "name slots=4" as Open MPI and Horovod write it, or "name:4". A host
    that has several lines, as in a scheduler's list of slots, gets their sum. Raises LaunchError."""
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"--hostfile {path} cannot be read: {error}. Write one host on a line, as in: a slots=4"
        ) from None
    slots: dict[str, int] = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        text = ":".join([words[0], *(word.removeprefix("slots=") for word in words[1:] if word.startswith("slots="))])
        if len(words) > 1 and not words[1].startswith(("slots=", "max_slots=", "max-slots=")):
            raise LaunchError(f"Line {line.strip()!r} of {path} cannot be read. Write: {words[0]} slots=4")
        host = _parse_host(text, str(path))
        slots[host.name] = slots.get(host.name, 0) + host.slots
    if not slots:
        raise LaunchError(f"--hostfile {path} names no host. Write one on a line, as in: a slots=4")
    return tuple(Host(name, count) for name, count in slots.items())


def check_spellings(hosts: tuple[Host, ...], resolve: Callable[[str], str] = socket.gethostbyname) -> None:
    """Raise LaunchError when one host is named under two spellings, which would give two ranks the same local_rank."""
    seen: dict[str, str] = {}
    for host in hosts:
        try:
            address = resolve(host.name)
        except OSError:
            continue  # known to ssh alone, perhaps
        if address in seen:
            raise LaunchError(
                f"Hosts {seen[address]!r} and {host.name!r} are the same machine, {address}: both would count from "
                f"local_rank 0 and share GPUs. Name it once, with all its slots: -H {seen[address]}:N"
            )
        seen[address] = host.name


def is_here(host: Host) -> bool:
    """Return whether `host` is this machine."""
    name = host.name.strip("[]")
    if name in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # which only an address of this machine lets
    except OSError:
        return False
    return True


def check_is_here(host: Host, launcher: str) -> None:
    """Raise LaunchError when `host` is another machine, which a launcher that starts ranks here would ignore."""
    if not is_here(host):
        raise LaunchError(
            f"{launcher} starts ranks on this host only, but -H names {host.name!r}. "
            "Type it there, or use --launcher horovodrun."
        )


def shares(processes: int, hosts: tuple[Host, ...]) -> list[int]:
    """Return how many processes the hosts get: they are filled in order, as horovodrun does, until none is left."""
    counts: list[int] = []
    for host in hosts:
        if not processes:
            break
        counts.append(min(processes, host.slots))
        processes -= counts[-1]
    return counts


def _parse_host(part: str, text: str) -> Host:
    match = _HOST.fullmatch(part)
    if match is None:
        raise LaunchError(f"Host {part!r} in {text!r} cannot be read. Write name:slots, as in -H node1:4,node2:4")
    slots = "1" if match["slots"] is None else match["slots"]
    if not slots.isdecimal() or int(slots) < 1:
        raise LaunchError(
            f"Host {part!r} must have a whole number of slots from 1, got {slots!r}. Use: -H {match['name']}:1"
        )
    return Host(match["name"], int(slots))

"""Hosts and their slots, in the notation of Horovod and MPI, `a:4,b:4`."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from unitrain.launchers.errors import LaunchError

_MAX_HOSTFILE_CHARACTERS = 2**24
_MAX_SLOT_DIGITS = 9  # Python converts at most 4,300 digits
_MAX_SHOWN_CHARACTERS = 500  # of a list of hosts in an error message
_HOST = re.compile(r"(?P<name>(?!-)[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::(?P<slots>[^:]*))?")


@dataclass(frozen=True)
class Host:
    """A host (name or address) and its slots: the maximum number of processes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse "name:slots,...". A host without a number has one slot. Raises LaunchError, also for repeated hosts."""
    hosts = tuple(_parse_host(part.strip(), text) for part in text.split(","))
    merged = merge_repeated_hosts(hosts)
    if len(merged) < len(hosts):
        repeated = next(name for name, count in Counter(host.name for host in hosts).items() if count > 1)
        raise LaunchError(
            f"Host {repeated!r} is named twice in {_shorten(text)!r}. Add up its slots: "
            f"-H {_shorten(format_hosts(merged))}"
        )
    return hosts


def merge_repeated_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return each host once, with the sum of its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def format_hosts(hosts: Iterable[Host]) -> str:
    """Format hosts as "a:4,b:4"."""
    return ",".join(map(str, hosts))


def add_slots(hosts: tuple[Host, ...], num_missing: int) -> tuple[Host, ...]:
    """Return `hosts` with `num_missing` more slots on the first host."""
    return Host(hosts[0].name, hosts[0].slots + num_missing), *hosts[1:]


def check_slots(num_processes: int, hosts: tuple[Host, ...]) -> None:
    """Raise LaunchError if `hosts` have fewer slots in total than `num_processes`."""
    slots = sum(host.slots for host in hosts)
    if num_processes > slots:
        raise LaunchError(
            f"-np requests {num_processes} processes, but the hosts have {slots} {'slot' if slots == 1 else 'slots'}. "
            f"Use -np {slots}, or give the hosts more slots: -H {format_hosts(add_slots(hosts, num_processes - slots))}"
        )


def read_hostfile_lines(path: Path) -> list[str]:
    """Return the lines of a hostfile. Raises UnicodeDecodeError, and OSError (also for more than 2**24 characters)."""
    with path.open(encoding="utf-8") as file:
        text = file.read(_MAX_HOSTFILE_CHARACTERS + 1)
    if len(text) > _MAX_HOSTFILE_CHARACTERS:  # a device such as /dev/zero never ends
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return text.splitlines()


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a hostfile with one host per line: "name slots=4" as for Open MPI and Horovod, or "name:4".

    A host without a number has one slot; max_slots is ignored. If a host has several lines, their slots are added,
    because schedulers list a host once per slot. Raises LaunchError.
    """
    try:
        lines = read_hostfile_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"--hostfile {path} cannot be read: {error}. Write one host per line, as in: a slots=4"
        ) from None
    hosts: list[Host] = []
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        text = ":".join([words[0], *(word.removeprefix("slots=") for word in words[1:] if word.startswith("slots="))])
        if len(words) > 1 and not words[1].startswith(("slots=", "max_slots=", "max-slots=")):
            raise LaunchError(f"Line {line.strip()!r} of {path} is not valid. Write: {words[0]} slots=4")
        hosts.append(_parse_host(text, str(path)))
    if not hosts:
        raise LaunchError(f"--hostfile {path} does not name a host. Write one host per line, as in: a slots=4")
    return merge_repeated_hosts(hosts)


def parse_host_options(hosts: str | None, hostfile: Path | None) -> tuple[Host, ...]:
    """Return the hosts in the values of -H and --hostfile. Raises LaunchError, also if both name hosts."""
    if hosts is not None and hostfile is not None:
        raise LaunchError(f"-H {hosts} and --hostfile {hostfile} both name the hosts. Leave one of them out.")
    if hostfile is not None:
        return read_hostfile(hostfile)
    return parse_hosts(hosts) if hosts is not None else ()


def check_distinct(hosts: tuple[Host, ...], resolve: Callable[[str], str] = socket.gethostbyname) -> None:
    """Raise LaunchError if two names refer to the same machine: two ranks would then have the same local_rank."""
    names: dict[str, str] = {}
    for host in hosts:
        try:
            address = resolve(host.name)
        except (OSError, UnicodeError):  # UnicodeError: a part of the name is longer than 63 characters
            continue  # possibly an alias in ~/.ssh/config
        if address in names:
            raise LaunchError(
                f"Hosts {names[address]!r} and {host.name!r} are the same machine, {address}. Ranks of both "
                "would have the same local_rank and GPU. Name the machine once, with all its slots: -H "
                f"{names[address]}:N"
            )
        names[address] = host.name


def is_this_host(host: Host) -> bool:
    """Return whether `host` is this machine."""
    name = host.name.strip("[]")
    if name in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # succeeds only for an address of this machine
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is longer than 63 characters
        return False
    return True


def check_is_this_host(host: Host, launcher: str) -> None:
    """Raise LaunchError if `host` is not this machine. For launchers that start ranks on this host only."""
    if not is_this_host(host):
        raise LaunchError(
            f"{launcher} starts ranks on this host only, but -H names {host.name!r}. "
            "Run the command there, or use --launcher horovodrun."
        )


def processes_per_host(num_processes: int, hosts: tuple[Host, ...]) -> list[int]:
    """Return the number of processes per host. Hosts are filled in order, as by horovodrun; unused hosts are
    omitted."""
    counts: list[int] = []
    for host in hosts:
        if not num_processes:
            break
        counts.append(min(num_processes, host.slots))
        num_processes -= counts[-1]
    return counts


def _parse_host(entry: str, source: str) -> Host:
    """Parse `entry`, one host in `source`: the list of hosts, or the path of the hostfile. Raises LaunchError."""
    match = _HOST.fullmatch(entry)
    if match is None:
        raise LaunchError(
            f"Host {_shorten(entry)!r} in {_shorten(source)!r} is not valid. Write name:slots, as in -H node1:4,node2:4"
        )
    slots = "1" if match["slots"] is None else match["slots"]
    if not slots.isdecimal() or len(slots) > _MAX_SLOT_DIGITS or int(slots) < 1:
        raise LaunchError(
            f"Host {_shorten(entry)!r} must have a positive whole number of slots, got {_shorten(slots)!r}. "
            f"Use: -H {_shorten(match['name'])}:1"
        )
    return Host(match["name"], int(slots))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."

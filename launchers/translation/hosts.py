"""Hosts in command lines and hostfiles, and the placement of processes on them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import (
    Host,
    check_slots,
    merge_repeated_hosts,
    parse_hosts,
    processes_per_host,
    read_hostfile_lines,
)

_SLOTS_KEY = re.compile(r"(slots|max_slots|max-slots)\s*=\s*")
_RANGE = re.compile(
    r"(?P<before>[^\[\]]*)\[(?P<ranges>[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)\](?P<after>[^\[\]]*)"
)


class Placement(NamedTuple):
    """The number of ranks on each host, the names of the hosts (empty if they are unknown), and remarks for the
    user."""

    ranks_per_host: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def read_hosts(text: str | None, file: str | None, option: str) -> tuple[Host, ...]:
    """Return the hosts in the value of a host option, or in a hostfile if `text` is None. Repeated hosts are merged.

    The result is empty if `text` and `file` are None. `option` is the name of the hostfile option, for messages. Raises
    LaunchError.
    """
    if text is not None:
        return merge_repeated_hosts(parse_hosts(part)[0] for part in text.split(","))
    if file is None:
        return ()
    return merge_repeated_hosts(Host(name, slots or 1) for name, slots in read_host_entries(file, option))


def read_host_entries(file: str, option: str) -> list[tuple[str, int | None]]:
    """Return the name and the number of slots of the host in each line of a hostfile; the number is None if it is
    missing.

    The notation is "name slots=4" (Open MPI, Horovod) or "name:4" (MPICH). max_slots is used instead if only max_slots
    is given. Raises LaunchError.
    """
    path = Path(file).expanduser()
    try:
        lines = read_hostfile_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise LaunchError(
            f"{option} {file} cannot be read: {reason}. Check the path, or pass the hosts: --hosts node1:4,node2:4"
        ) from error
    return [entry for line in lines if (entry := _parse_hostfile_line(line)) is not None]


def place_processes(size: int, hosts: tuple[Host, ...]) -> Placement:
    """Return the placement of `size` processes on hosts that are filled in order.

    Raises LaunchError if there are more processes than slots.
    """
    if not hosts:
        return Placement((size,))
    check_slots(size, hosts)
    counts = tuple(processes_per_host(size, hosts))
    unused = [host.name for host in hosts[len(counts) :]]
    verb = "it is" if len(unused) == 1 else "they are"
    remarks = (f"{', '.join(unused)} would not get a process, so {verb} omitted from the host list.",)
    return Placement(counts, tuple(host.name for host in hosts[: len(counts)]), remarks if unused else ())


def place_by_node(size: int, hosts: tuple[Host, ...]) -> tuple[int, ...]:
    """Return the number of processes on each host if Open MPI maps `size` processes by node.

    Open MPI distributes them in rounds. Each round assigns the same number to all hosts with free slots, limited by the
    free slots; the first hosts receive the remainder.
    """
    counts = [0] * len(hosts)
    unplaced = min(size, sum(host.slots for host in hosts))
    while unplaced:
        free = [index for index, host in enumerate(hosts) if counts[index] < host.slots]
        per_host, num_extra = divmod(unplaced, len(free))
        for index_among_free, index in enumerate(free):
            num_added = min(per_host + (index_among_free < num_extra), hosts[index].slots - counts[index])
            counts[index] += num_added
            unplaced -= num_added
    return tuple(counts)


def place_oversubscribed(size: int, hosts: tuple[Host, ...]) -> tuple[int, ...]:
    """Return the number of processes on each host if Open MPI maps `size` processes, more than the slots, by slot.

    Open MPI fills the slots, and distributes the remaining processes evenly; the first hosts receive the remainder.
    """
    per_host, num_extra = divmod(size - sum(host.slots for host in hosts), len(hosts))
    return tuple(host.slots + per_host + (index < num_extra) for index, host in enumerate(hosts))


def divide_evenly(size: int, num_hosts: int) -> tuple[int, ...]:
    """Divide `size` processes evenly among `num_hosts` hosts. Return the number per host; unused hosts are omitted."""
    return tuple(size // num_hosts + (index < size % num_hosts) for index in range(min(num_hosts, size)))


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Return the names in a Slurm nodelist: "n[1-3,5],login" is n1, n2, n3, n5, login. Raises LaunchError."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        match = _RANGE.fullmatch(part)
        if match is None:
            if set("[]") & set(part):
                raise LaunchError(
                    f"--nodelist {nodelist!r} cannot be parsed. List the host names, as in: --nodelist n1,n2"
                )
            names.append(part)
            continue
        for number_range in match["ranges"].split(","):
            first, _, last = number_range.partition("-")
            host_numbers = range(int(first), int(last or first) + 1)
            if not host_numbers:
                raise LaunchError(
                    f"--nodelist {nodelist!r} contains the descending range {number_range}. Write: {last}-{first}"
                )
            names += [f"{match['before']}{host_number:0{len(first)}}{match['after']}" for host_number in host_numbers]
    return tuple(names)


def _parse_hostfile_line(line: str) -> tuple[str, int | None] | None:
    words = _SLOTS_KEY.sub(r"\1=", line.partition("#")[0]).split()
    if not words:
        return None
    address, *settings = words
    counts = {name.replace("_", "-"): count for name, _, count in (setting.partition("=") for setting in settings)}
    count = counts.get("slots", counts.get("max-slots"))
    host = parse_hosts(address if count is None else f"{address}:{count}")[0]
    has_slots = count is not None or ":" in address.rpartition("]")[2]  # not a colon in an IPv6 address
    return host.name, host.slots if has_slots else None

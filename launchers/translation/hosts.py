"""Hosts as launchers name them on their lines and in files, and how many processes each gets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, parse_hosts, processes_per_host, read_lines

_COUNT = re.compile(r"(slots|max_slots|max-slots)\s*=\s*")
_RANGE = re.compile(r"(?P<before>[^\[\]]*)\[(?P<ranges>[0-9,-]+)\](?P<after>[^\[\]]*)")


def listed(hosts: Iterable[Host]) -> str:
    """Return hosts as "a:4,b:4"."""
    return ",".join(map(str, hosts))


def named(text: str | None, file: str | None, option: str) -> tuple[Host, ...]:
    """Return the hosts that a line names itself, or in a file, which is read; of a host named again the slots add up.

    Raises LaunchError.
    """
    if text is not None:
        return _added(parse_hosts(part)[0] for part in text.split(","))
    if file is None:
        return ()
    return _added(Host(name, slots or 1) for name, slots in entries(file, option))


def entries(file: str, option: str) -> list[tuple[str, int | None]]:
    """Return the hosts that a file names, line by line, with their slots or None where a line does not say how many.

    Open MPI and Horovod write "name slots=4", MPICH "name:4"; where a line has max_slots=8 alone, that is meant.
    Raises LaunchError.
    """
    path = Path(file).expanduser()
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(
            f"{option} {file} cannot be read: {reason}. Go to its folder, or name the hosts: --hosts node1:4,node2:4"
        ) from error
    return [found for line in lines if (found := _of_line(line)) is not None]


def fill(size: int, hosts: tuple[Host, ...]) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
    """Return how many of `size` processes the hosts get that are filled in order, their names, and what is to be said.

    Raises LaunchError for more processes than slots.
    """
    if not hosts:
        return (size,), (), ()
    slots = sum(host.slots for host in hosts)
    if size > slots:
        raise LaunchError(
            f"{size} processes were asked for, but the hosts have {slots} {'slot' if slots == 1 else 'slots'}. "
            f"Use -np {slots}, or give them more: -H {hosts[0].name}:{hosts[0].slots + size - slots}"
        )
    counts = tuple(processes_per_host(size, hosts))
    left = [host.name for host in hosts[len(counts) :]]
    said = (f"{', '.join(left)} of the hosts would get no process, and {'is' if len(left) == 1 else 'are'} left out.",)
    return counts, tuple(host.name for host in hosts[: len(counts)]), said if left else ()


def dealt(size: int, hosts: tuple[Host, ...]) -> tuple[int, ...]:
    """Return how many of `size` processes each host gets where Open MPI deals them out by node.

    It takes several rounds. In each one all hosts with free slots get equally many, the first ones one more, and never
    more than their slots.
    """
    counts = [0] * len(hosts)
    left = min(size, sum(host.slots for host in hosts))
    while left:
        free = [place for place, host in enumerate(hosts) if counts[place] < host.slots]
        each, extra = divmod(left, len(free))
        for number, place in enumerate(free):
            more = min(each + (number < extra), hosts[place].slots - counts[place])
            counts[place] += more
            left -= more
    return tuple(counts)


def spread(size: int, hosts: int) -> tuple[int, ...]:
    """Return how many of `size` processes each of several hosts gets where they are dealt out evenly."""
    return tuple(size // hosts + (place < size % hosts) for place in range(min(hosts, size)))


def expanded(nodelist: str) -> tuple[str, ...]:
    """Return the names in a list as Slurm writes it: "n[1-3,5],login" is n1, n2, n3, n5, login. Raises LaunchError."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        match = _RANGE.fullmatch(part)
        if match is None:
            if set("[]") & set(part):
                raise LaunchError(f"--nodelist {nodelist!r} cannot be read. Name the hosts, as in: --nodelist n1,n2")
            names.append(part)
            continue
        for one in match["ranges"].split(","):
            first, _, last = one.partition("-")
            places = range(int(first), int(last or first) + 1)
            names += [f"{match['before']}{place:0{len(first)}}{match['after']}" for place in places]
    return tuple(names)


def _added(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _of_line(line: str) -> tuple[str, int | None] | None:
    words = _COUNT.sub(r"\1=", line.partition("#")[0]).split()
    if not words:
        return None
    counts = {name.replace("_", "-"): count for name, equals, count in (word.partition("=") for word in words[1:])}
    count = counts.get("slots", counts.get("max-slots"))
    host = parse_hosts(words[0] if count is None else f"{words[0]}:{count}")[0]
    return host.name, None if count is None and ":" not in words[0].rpartition("]")[2] else host.slots

"""How many ranks an elastic job may have, as `2:8`, and how many hosts that is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, shares

_RANGE = re.compile(r"([0-9]+):([0-9]+)")


@dataclass(frozen=True)
class Elastic:
    """An elastic job runs with `least` to `most` ranks in all: as many as the hosts that answer have slots for."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"

    def fit(self, hosts: Iterable[Host]) -> tuple[Host, ...]:
        """Return these hosts, filled in order, with the slots that are used; none where they have fewer than `least`
        slots."""
        offered = tuple(hosts)
        used = shares(self.most, offered)
        if sum(used) < self.least:
            return ()
        return tuple(Host(host.name, count) for host, count in zip(offered, used, strict=False))

    def nodes(self, hosts: tuple[Host, ...]) -> tuple[int, int]:
        """Return the least and the most hosts, for a launcher that counts those. Raises LaunchError for uneven hosts,
        of which no number of ranks is a number of hosts, and where not even `least` ranks are whole hosts."""
        slots = hosts[0].slots
        uneven = next((host for host in hosts if host.slots != slots), None)
        if uneven is not None:
            raise LaunchError(
                f"torchrun counts hosts, and {str(self)!r} counts ranks: hosts need equal slots, but -H has "
                f"{hosts[0]} and {uneven}. Use -H {hosts[0].name}:{uneven.slots}, or --launcher horovodrun."
            )
        least, most = -(-self.least // slots), self.most // slots
        if most < least:
            raise LaunchError(
                f"--elastic {self} is no whole number of hosts with {slots} slots each. "
                f"Use --elastic {least * slots}:{least * slots}"
            )
        return least, most


def parse_elastic(text: str) -> Elastic:
    """Return the numbers in "MIN:MAX". Raises LaunchError."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise LaunchError(f"--elastic takes MIN:MAX ranks, got {text!r}. Write two whole numbers, as in --elastic 2:8")
    least, most = int(match[1]), int(match[2])
    if least < 1 or most < least:
        raise LaunchError(
            f"--elastic takes MIN:MAX ranks with MIN from 1 and MAX from MIN, got {text!r}. "
            f"Use --elastic {max(1, min(least, most))}:{max(1, least, most)}"
        )
    return Elastic(least, most)

"""Elastic jobs: the allowed number of ranks, host discovery, and detection of reachable hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, is_this_host, parse_hosts, processes_per_host

SSH_MISSING = (
    "ssh, which is needed to reach other hosts, is not installed. Install it: sudo apt-get install openssh-client"
)

DEFAULT_ELASTIC_RESTARTS = 3

_RANGE = re.compile(r"([0-9]+):([0-9]+)")
_SCRIPT_TIMEOUT_SECONDS = 30
# Maximum length of the standard output of a host discovery script, and of its standard error in a message.
_MAX_OUTPUT_CHARACTERS, _MAX_SHOWN_CHARACTERS = 2**18, 2000
_SSH_TIMEOUT_SECONDS = 5


class HostDiscoveryError(LaunchError):
    """The host discovery script failed or timed out. A retry may succeed."""


@dataclass(frozen=True)
class ElasticRange:
    """The allowed number of ranks of an elastic job. One rank runs on each slot of the reachable hosts, up to
    `max_ranks`."""

    min_ranks: int
    max_ranks: int

    def __str__(self) -> str:
        return f"{self.min_ranks}:{self.max_ranks}"

    def select_hosts(self, hosts: Iterable[Host]) -> tuple[Host, ...]:
        """Return the hosts to use, filled in order, with the number of slots used per host.

        The result is empty if the hosts have fewer than `min_ranks` slots in total.
        """
        available_hosts = tuple(hosts)
        used = processes_per_host(self.max_ranks, available_hosts)
        if sum(used) < self.min_ranks:
            return ()
        return tuple(Host(host.name, count) for host, count in zip(available_hosts, used, strict=False))

    def node_range(self, hosts: tuple[Host, ...]) -> tuple[int, int]:
        """Return the minimum and maximum number of hosts, for a launcher that counts hosts instead of ranks.

        Raises LaunchError if the hosts have different numbers of slots, or if no multiple of this number is in the
        range.
        """
        slots = hosts[0].slots
        uneven = next((host for host in hosts if host.slots != slots), None)
        if uneven is not None:
            equal = ",".join(f"{host.name}:{min(other_host.slots for other_host in hosts)}" for host in hosts)
            raise LaunchError(
                f"torchrun --nnodes MIN:MAX counts hosts, but --elastic {self} counts ranks, so all hosts need the "
                f"same number of slots; -H gives {hosts[0]} and {uneven}. Use -H {equal}, or --launcher horovodrun."
            )
        min_nodes, max_nodes = -(-self.min_ranks // slots), self.max_ranks // slots
        if max_nodes < min_nodes:
            raise LaunchError(
                f"--elastic {self} contains no multiple of {slots}, the number of slots of each host. "
                f"Use --elastic {min_nodes * slots}:{min_nodes * slots}"
            )
        return min_nodes, max_nodes


def parse_elastic(text: str) -> ElasticRange:
    """Parse "MIN:MAX". Raises LaunchError."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise LaunchError(f"--elastic takes MIN:MAX ranks, got {text!r}. Write two whole numbers, as in --elastic 2:8")
    min_ranks, max_ranks = int(match[1]), int(match[2])
    if min_ranks < 1 or max_ranks < min_ranks:
        raise LaunchError(
            f"--elastic takes MIN:MAX ranks with 1 <= MIN <= MAX, got {text!r}. "
            f"Use --elastic {max(1, min(min_ranks, max_ranks))}:{max(1, min_ranks, max_ranks)}"
        )
    return ElasticRange(min_ranks, max_ranks)


def discover_hosts(script: Path) -> tuple[Host, ...]:
    """Run a host discovery script and parse its output: one "name:slots" line per host, as for horovodrun.

    The result may be empty. Raises HostDiscoveryError if the script fails or takes longer than 30 s, and LaunchError if
    it cannot be run, or if its output is too long or cannot be parsed.
    """
    try:
        process = subprocess.run(
            [str(script.absolute())],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SCRIPT_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HostDiscoveryError(
            f"--host-discovery-script '{script}' did not end within {_SCRIPT_TIMEOUT_SECONDS} s. "
            "The script must print the current hosts and exit."
        ) from None
    except OSError as error:
        raise LaunchError(
            f"--host-discovery-script '{script}' cannot be run: {error.strerror}. "
            f"Add a shebang such as #!/bin/sh and make it executable: chmod +x {script}"
        ) from error
    if process.returncode:
        raise HostDiscoveryError(
            f"--host-discovery-script '{script}' ended with exit code {process.returncode}: "
            f"{process.stderr.strip()[-_MAX_SHOWN_CHARACTERS:] or 'it printed no error message'}. "
            "The script must print name:slots lines and exit with 0."
        )
    if len(process.stdout) > _MAX_OUTPUT_CHARACTERS:
        raise LaunchError(
            f"--host-discovery-script '{script}' printed {len(process.stdout)} characters; the limit is "
            f"{_MAX_OUTPUT_CHARACTERS}. The script must print one name:slots line per host, and nothing else."
        )
    lines = [line.strip() for line in process.stdout.splitlines() if line.strip()]
    return parse_hosts(",".join(lines)) if lines else ()


def find_reachable_hosts(hosts: Iterable[Host]) -> set[str]:
    """Return the names of the hosts that respond to ssh within a few seconds. This host is always reachable.

    Raises LaunchError if no host is reachable because ssh is not installed.
    """
    candidates = tuple(hosts)
    if not candidates:
        return set()
    with ThreadPoolExecutor(min(32, len(candidates))) as pool:
        reachable = zip(candidates, pool.map(_probe_host, candidates), strict=True)
        reachable_names = {host.name for host, is_reachable in reachable if is_reachable}
    if not reachable_names and shutil.which("ssh") is None:
        raise LaunchError(SSH_MISSING)
    return reachable_names


def _probe_host(host: Host) -> bool:
    """Return whether `host` is this host, or responds to ssh within a few seconds."""
    if is_this_host(host):
        return True
    options = ["BatchMode=yes", f"ConnectTimeout={_SSH_TIMEOUT_SECONDS}", "StrictHostKeyChecking=accept-new"]
    command = ["ssh", *(word for option in options for word in ("-o", option)), "--", host.name.strip("[]"), "true"]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * _SSH_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0

"""The rendezvous address of the ranks: MASTER_ADDR and MASTER_PORT, for launchers that do not set them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host

DEFAULT_PORT = 29500  # torch's default


def rendezvous_variables(hosts: tuple[Host, ...], port: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT.

    Values that the user set, in `environment` or in the environment of this process, take precedence. The default is
    `port` on the first host, which runs rank 0. If `port` is None, all ranks run on this host, and a free port is
    chosen. Raises LaunchError for an invalid MASTER_PORT, and if the first of several hosts is named localhost or
    127.*, which refers to a different machine on each host, unless MASTER_ADDR is set.
    """
    settings = {**os.environ, **environment}
    user_port = parse_master_port(environment)
    if port is None:
        address = "127.0.0.1"
    else:
        address = hosts[0].name.strip("[]")
        if not settings.get("MASTER_ADDR"):
            check_address_of_first_host(address, len(hosts), hosts[0].slots)
    return {
        "MASTER_ADDR": settings.get("MASTER_ADDR") or address,
        "MASTER_PORT": str(user_port or (_find_free_port() if port is None else port)),
    }


def check_address_of_first_host(address: str, num_hosts: int, slots: int) -> None:
    """Raise LaunchError if `address` of the first of several hosts refers to a different machine on each host. `slots`
    is the number of slots of the first host."""
    name = address.strip("[]")
    if num_hosts > 1 and (name in ("localhost", "::1") or name.startswith("127.")):
        raise LaunchError(
            f"Ranks on {num_hosts} hosts connect to the first host, but on each host {name!r} refers to that host "
            "itself. Use a name by which the other hosts can reach the first host, as in: -H "
            f"{socket.gethostname()}:{slots}"
        )


def master_port_fix(environment: Mapping[str, str]) -> str:
    """Return an instruction to clear MASTER_PORT, for the end of a sentence. `environment` contains the -x values."""
    if environment.get("MASTER_PORT"):
        return "leave -x MASTER_PORT out"
    return "clear the variable: unset MASTER_PORT"


def parse_master_port(environment: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT from `environment`, else from the environment of this process, else None.

    Raises LaunchError for a value that is not a port number.
    """
    text = environment.get("MASTER_PORT") or os.environ.get("MASTER_PORT")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 1 << 16:
        raise LaunchError(
            f"MASTER_PORT must be a port from 1 to 65535, got {text!r}. To let unitrain choose a port, "
            f"{master_port_fix(environment)}"
        )
    return int(text)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

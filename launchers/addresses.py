"""Where ranks meet: the MASTER_ADDR and MASTER_PORT of launchers that give their ranks none."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host

DEFAULT_PORT = 29500  # torch's own


def meeting_place(hosts: tuple[Host, ...], port: int | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, each the user's where `given` or the environment has it.

    The ranks meet on the first host, which has rank 0, at `port`; with port None they are all on this host and a free
    port is taken. Raises LaunchError where the first of several hosts has a name that means another one on each, and
    for a MASTER_PORT that is not a port.
    """
    own = {**os.environ, **given}
    chosen = master_port(given)
    if port is None:
        address = "127.0.0.1"
    else:
        address = hosts[0].name.strip("[]")
        if len(hosts) > 1 and not own.get("MASTER_ADDR") and (address == "localhost" or address.startswith("127.")):
            raise LaunchError(
                f"Ranks on {len(hosts)} hosts meet on the first, but {address!r} is another host on each. "
                f"Name it as the others reach it, as in: -H {socket.gethostname()}:{hosts[0].slots}"
            )
    return {
        "MASTER_ADDR": own.get("MASTER_ADDR") or address,
        "MASTER_PORT": str(chosen or (_free_port() if port is None else port)),
    }


def master_port(given: Mapping[str, str]) -> int | None:
    """Return the MASTER_PORT of `given` or, if it has none, of the environment; None if neither has one.

    Raises LaunchError for a value that is not a port.
    """
    text = given.get("MASTER_PORT") or os.environ.get("MASTER_PORT")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise LaunchError(
            f"MASTER_PORT must be a port from 1 to 65535, got {text!r}. Clear it, and a port is chosen: "
            "unset MASTER_PORT"
        )
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

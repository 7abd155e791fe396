"""Probe of one host before a launch. The source code of this module is sent to the host, which needs only Python.

The sender appends a call of `probe_host` (see `preflight.py`).
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path


def probe_host(script: str, folder: str, packages: list[str], port: int) -> None:
    """Print a line with a prefix and a JSON object: whether `folder` and the file `script` in it exist, the versions of
    Python and `packages`, the network interfaces, and a port.

    The printed port is `port`, or null if `port` is not free. If `port` is 0, a free port is chosen.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            free_port = probe.getsockname()[1]
        except OSError:
            free_port = None
    facts = {
        "folder": Path(folder).is_dir(),
        "script": (Path(folder) / script).is_file(),
        "versions": versions,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "port": free_port,
    }
    sys.stdout.write(f"unitrain host probe: {json.dumps(facts)}\n")

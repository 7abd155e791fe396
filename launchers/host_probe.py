"""What is asked of each host before a launch: sent there as text, it needs nothing but Python, and prints JSON.

Its standard input ends with `look(...)`, see `preflight.py`.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path


def look(script: str, folder: str, packages: list[str], port: int) -> None:
    """Print what this host has: the script and its folder, versions, interfaces, and whether `port` is free; with port
    0, one that is."""
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
            found = probe.getsockname()[1]
        except OSError:
            found = None
    told = {
        "folder": Path(folder).is_dir(),
        "script": (Path(folder) / script).is_file(),
        "versions": versions,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "port": found,
    }
    sys.stdout.write(f"unitrain looks: {json.dumps(told)}\n")

"""Which hosts there are right now: what a script of the user's says, and which of them answer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, is_here, parse_hosts

NO_SSH = "ssh, by which hosts are reached, is not installed. Install it: sudo apt-get install openssh-client"

_SCRIPT_SECONDS = 30
_SSH_SECONDS = 5


def discover(script: Path) -> tuple[Host, ...]:
    """Return the hosts that `script` prints, "name:slots" a line as for horovodrun; there may be none.

    Raises LaunchError where it cannot be run, fails, takes longer than half a minute, or prints something else.
    """
    try:
        done = subprocess.run(
            [str(script.absolute())],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SCRIPT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"--host-discovery-script '{script}' did not end within {_SCRIPT_SECONDS} s. "
            "Let it print the hosts that it knows of, and end."
        ) from None
    except OSError as error:
        raise LaunchError(
            f"--host-discovery-script '{script}' cannot be run: {error.strerror}. "
            f"Give it a first line such as #!/bin/sh, and: chmod +x {script}"
        ) from error
    if done.returncode:
        raise LaunchError(
            f"--host-discovery-script '{script}' ended with exit code {done.returncode}: "
            f"{done.stderr.strip() or 'it said nothing'}. Let it print name:slots lines, and exit with 0."
        )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return parse_hosts(",".join(lines)) if lines else ()


def answering(hosts: Iterable[Host]) -> set[str]:
    """Return the names of those hosts on which a program can be started over ssh within some seconds, or that are this
    one. Raises LaunchError where none can be asked, because there is no ssh."""
    asked = tuple(hosts)
    if not asked:
        return set()
    with ThreadPoolExecutor(min(32, len(asked))) as pool:
        found = {host.name for host, answers in zip(asked, pool.map(_answers, asked), strict=True) if answers}
    if not found and shutil.which("ssh") is None:
        raise LaunchError(NO_SSH)
    return found


def _answers(host: Host) -> bool:
    if is_here(host):
        return True
    options = ["BatchMode=yes", f"ConnectTimeout={_SSH_SECONDS}", "StrictHostKeyChecking=accept-new"]
    command = ["ssh", *(word for option in options for word in ("-o", option)), "--", host.name.strip("[]"), "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * _SSH_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0

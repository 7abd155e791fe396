"""Where a launcher's program is."""

from __future__ import annotations

import shutil
from pathlib import Path

from launchers.errors import LaunchError


def find_program(name: str, python: str, remedy: str) -> str:
    """Return the path of `name` beside `python` or on PATH; raise LaunchError with the remedy where there is none."""
    found = shutil.which(name, path=str(Path(python).parent)) or shutil.which(name)
    if found is None:
        raise LaunchError(f"Launcher {name!r} is not installed. {remedy}")
    return found

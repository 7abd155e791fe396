"""Find a launcher's program, and the file of a module."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from unitrain.launchers.errors import MissingLauncherError


def find_program(name: str, python: str, remedy: str, *, planned: bool = False) -> str:
    """Return the path of `name` in the folder of `python` or on PATH.

    If there is none, return `name` itself for a launch that is only `planned`, else raise MissingLauncherError with the
    remedy.
    """
    found = shutil.which(name, path=str(Path(python).parent)) or shutil.which(name)
    if found is None and not planned:
        raise MissingLauncherError(f"Launcher {name!r} is not installed. {remedy}")
    return found or name


def find_module(name: str) -> Path | None:
    """Return the file that `python -m name` runs in the current folder, or None. Nothing is imported."""
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    found = None
    for part in [name.rsplit(".", depth)[0] for depth in range(name.count("."), -1, -1)]:
        found = PathFinder.find_spec(part, places)
        if found is None:
            return None
        places = list(found.submodule_search_locations or ())
    if found is not None and found.submodule_search_locations is not None:  # a package, of which __main__ is run
        found = PathFinder.find_spec(f"{name}.__main__", list(found.submodule_search_locations))
    return None if found is None or found.origin is None else Path(found.origin)


def module_command(name: str, package: str, python: str, remedy: str, *, planned: bool = False) -> tuple[str, ...]:
    """Return the command that runs launcher `name`, which `package` provides, with `python` itself.

    A program of this name on PATH may belong to another environment, whose ranks would run another Python. Raises
    MissingLauncherError with the remedy if this Python lacks the package, unless the launch is only `planned`.
    """
    if not planned and python == sys.executable and importlib.util.find_spec(package) is None:
        raise MissingLauncherError(f"Launcher {name!r} is not installed for {python}. {remedy}")
    # -P: without it, a file of the current folder could take the place of a module that the launcher imports.
    return (python, "-P", "-m", f"unitrain.bootstrap.{name}")

"""The settings that `unitrain tune` has found, kept in a small file that `unitrain launch` reads."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unitrain.errors import ConfigError

FILE = Path("unitrain-tuned.json")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What settings are found for: `script` with `args` on so many ranks and hosts, and the torch and machine there.

    `torch` is the version of the installed package, "" without one, and `machine` describes this host (`machine()`).
    """

    script: str
    args: tuple[str, ...]
    backend: str
    num_processes: int
    num_nodes: int
    torch: str
    machine: str

    @classmethod
    def here(cls, script: str, args: tuple[str, ...], backend: str, num_processes: int, num_nodes: int) -> Run:
        """Return such a run with the torch and the machine that this process has."""
        return cls(
            script=script,
            args=args,
            backend=backend,
            num_processes=num_processes,
            num_nodes=num_nodes,
            torch=torch_version(),
            machine=machine(),
        )


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The `variables` under which a run was faster: `gain` is the median ratio of the seconds of a step without them to
    those with them, `spread` its lowest and highest. The other fields are those of `Run`; None in the file of an
    earlier version, which did not record them."""

    script: str
    backend: str
    num_processes: int
    variables: Mapping[str, str]
    gain: float
    spread: tuple[float, float]
    torch: str | None = None
    args: tuple[str, ...] | None = None
    num_nodes: int | None = None
    machine: str | None = None

    def keep(self, file: Path = FILE) -> None:
        """Write it to `file`, instead of what was found for the same run, be it with another torch."""
        others = [one for one in _read(file) if one._identity != self._identity]
        _write([*others, self], file)

    def is_of(self, run: Run) -> bool:
        """Return whether it was found for this script, backend and number of ranks."""
        same_script = Path(self.script).resolve() == Path(run.script).resolve()
        return same_script and (self.backend, self.num_processes) == (run.backend, run.num_processes)

    def differences(self, run: Run) -> list[str]:
        """Return in words how `run` differs from the one that it was found for; nothing where it does not."""
        if None in (self.torch, self.args, self.num_nodes, self.machine):
            return ["an earlier version of unitrain found them, which did not record the arguments and the machine"]
        found: list[str] = []
        if self.args != run.args:
            found.append(f"they were found with {_arguments(self.args or ())}, and this run has {_arguments(run.args)}")
        if self.num_nodes != run.num_nodes:
            found.append(f"they were found on {_hosts(self.num_nodes or 1)}, and this run is on {run.num_nodes}")
        if self.torch != run.torch:
            found.append(f"they were found with torch {self.torch}, and torch {run.torch} is installed")
        if self.machine != run.machine:
            found.append(f"they were found on another machine ({self.machine}), and this is: {run.machine}")
        return found

    @property
    def _identity(self) -> tuple[object, ...]:
        script = Path(self.script).resolve()
        return (script, self.backend, self.num_processes, self.args, self.num_nodes, self.machine)


def tuned_for(run: Run, file: Path = FILE) -> tuple[Tuned | None, list[str]]:
    """Return what `file` has for this run, if anything. If it only has settings for its script, backend and number of
    ranks under other circumstances, return None and how the run differs.

    Raises ConfigError for a file that cannot be read.
    """
    found = [(one.differences(run), one) for one in _read(file) if one.is_of(run)]
    if not found:
        return None, []
    differences, tuned = min(found, key=lambda each: len(each[0]))
    return (None, differences) if differences else (tuned, [])


def forget(run: Run, file: Path = FILE) -> None:
    """Take out of `file` what was found for this run, and what an earlier version found for its script."""
    found = _read(file)

    def is_out(one: Tuned) -> bool:
        unrecorded = None in (one.torch, one.args, one.num_nodes, one.machine)
        same = (one.args, one.num_nodes, one.machine) == (run.args, run.num_nodes, run.machine)
        return one.is_of(run) and (unrecorded or same)

    others = [one for one in found if not is_out(one)]
    if len(others) < len(found):
        _write(others, file)


def torch_version() -> str:
    """Return the version of the installed torch, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def machine() -> str:
    """Return what this host computes with, as "Intel(R) Xeon(R) CPU, 8 cores, 2 x NVIDIA H100": not its name, so that
    equal hosts of a cluster share settings."""
    model = re.search(r"^model name\s*:\s*(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [model[1].strip() if model else platform.machine(), f"{cores} cores"]
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    gpus = [found[1].strip() for file in files if (found := re.search(r"^Model:(.*)$", _text(file), re.MULTILINE))]
    parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join(parts)


def _text(file: str | Path) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""


def _arguments(args: tuple[str, ...]) -> str:
    return f"the arguments {shlex.join(args)!r}" if args else "no arguments"


def _hosts(count: int) -> str:
    return f"{count} host{'s' if count > 1 else ''}"


def _write(entries: list[Tuned], file: Path) -> None:
    file.write_text(json.dumps([asdict(one) for one in entries], indent=2) + "\n")


def _read(file: Path) -> list[Tuned]:
    if not file.exists():
        return []
    try:
        return [_entry(entry) for entry in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}. Delete it, and find new settings: unitrain tune ..."
        ) from error


def _entry(entry: Any) -> Tuned:
    if not isinstance(entry, dict):
        raise TypeError("an entry is not an object")
    for name in ("script", "backend"):
        if not isinstance(entry.get(name), str):
            raise TypeError(f"{name!r} of an entry is not a text")
    if not isinstance(entry.get("variables"), dict) or not isinstance(entry.get("gain"), int | float):
        raise TypeError("'variables' or 'gain' of an entry is missing, or of another type")
    lists = {name: tuple(entry[name]) for name in ("spread", "args") if entry.get(name) is not None}
    return Tuned(**{**entry, **lists})

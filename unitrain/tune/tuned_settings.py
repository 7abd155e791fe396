"""The file of tuned settings: `unitrain tune` writes it, and `unitrain launch` reads it."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unitrain.errors import ConfigError
from unitrain.processes import cpu_model_name, usable_cores
from unitrain.regular_files import read_regular_file, replace_file
from unitrain.validation import is_positive_integer

TUNED_FILE = Path("unitrain-tuned.json")
_MAX_BYTES = 1 << 24
_NUMBERS = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?(,[0-9]{1,15})?")  # for example 0.5, or the bucket sizes 5,25
_PRINTABLE = re.compile(r"[ -~]{0,1000}")  # for the variables of a plug-in
# Variables that `unitrain tune` may set for the built-in backends.
BUILT_IN_VARIABLES = frozenset(
    {
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_FUSION_THRESHOLD",
        "OMP_NUM_THREADS",
        "UNITRAIN_BUCKETS_MB",
        "UNITRAIN_BUCKET_VIEW",
        "UNITRAIN_HIERARCHICAL_ALLREDUCE",
    }
)


@dataclass(frozen=True, kw_only=True)
class TunedRun:
    """The configuration of a run for which settings are tuned.

    `torch` is the version of the installed package ("" if it is missing), and `machine` the hardware of this host (see
    `describe_machine`).
    """

    script: str
    args: tuple[str, ...]
    backend: str
    num_processes: int
    num_nodes: int
    torch: str
    machine: str

    @classmethod
    def on_this_machine(
        cls, script: str, args: tuple[str, ...], backend: str, num_processes: int, num_nodes: int
    ) -> TunedRun:
        """Create a run with the torch version and the machine of this process."""
        return cls(
            script=script,
            args=args,
            backend=backend,
            num_processes=num_processes,
            num_nodes=num_nodes,
            torch=torch_version(),
            machine=describe_machine(),
        )


@dataclass(frozen=True, kw_only=True)
class TunedEntry:
    """An entry of the file: the environment `variables` that reduced the step time of a run.

    `gain` is the median speedup, and `spread` the minimum and maximum speedup. `TunedRun` documents the other fields.
    `torch`, `args`, `num_nodes` and `machine` are None in entries that earlier versions of unitrain wrote.
    """

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

    def save(self, file: Path = TUNED_FILE) -> None:
        """Write the entry to `file`, and remove an entry for the same run, even with a different torch version."""
        other_entries = [entry for entry in _load(file) if entry._identity != self._identity]
        _store([*other_entries, self], file)

    def may_apply_to(self, run: TunedRun) -> bool:
        """Return whether script, backend and number of ranks match `run`."""
        same_script = os.path.realpath(self.script) == os.path.realpath(run.script)
        return same_script and (self.backend, self.num_processes) == (run.backend, run.num_processes)

    def describe_differences(self, run: TunedRun) -> list[str]:
        """Return messages about the differences between `run` and the tuned run. In the messages, "they" are the
        settings."""
        if None in (self.torch, self.args, self.num_nodes, self.machine):
            return [
                "they were found by an earlier version of unitrain, which did not record the arguments and the machine"
            ]
        differences: list[str] = []
        if self.args != run.args:
            differences.append(
                f"they were found with {_format_arguments(self.args or ())}, and this run has "
                f"{_format_arguments(run.args)}"
            )
        if self.num_nodes != run.num_nodes:
            differences.append(
                f"they were found on {_format_hosts(self.num_nodes or 1)}, and this run is on {run.num_nodes}"
            )
        if self.torch != run.torch:
            differences.append(f"they were found with torch {self.torch}, and torch {run.torch} is installed")
        if self.machine != run.machine:
            differences.append(
                f"they were found on another machine ({self.machine}), and this machine is: {run.machine}"
            )
        return differences

    @property
    def _identity(self) -> tuple[object, ...]:
        script = os.path.realpath(self.script)
        return (script, self.backend, self.num_processes, self.args, self.num_nodes, self.machine)


def check_file(file: Path = TUNED_FILE) -> None:
    """Raise ConfigError if `file` cannot be read, or if its folder is not writable."""
    _load(file)
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise _unwritable_error(file, error) from error


def find_tuned(run: TunedRun, file: Path = TUNED_FILE) -> tuple[TunedEntry | None, list[str]]:
    """Return the entry of `file` for this run, or None, and a list of differences.

    If the script, backend and number of ranks of an entry match but the rest of its configuration does not, the list
    contains the differences. Raises ConfigError if the file cannot be read.
    """
    candidates = [(entry.describe_differences(run), entry) for entry in _load(file) if entry.may_apply_to(run)]
    if not candidates:
        return None, []
    differences, tuned = min(candidates, key=lambda pair: len(pair[0]))
    return (None, differences) if differences else (tuned, [])


def remove_tuned(run: TunedRun, file: Path = TUNED_FILE) -> None:
    """Remove the entry for this run from `file`, and entries of earlier versions with the same script, backend and
    number of ranks."""
    entries = _load(file)

    def is_obsolete(entry: TunedEntry) -> bool:
        is_unrecorded = None in (entry.torch, entry.args, entry.num_nodes, entry.machine)
        is_same = (entry.args, entry.num_nodes, entry.machine) == (run.args, run.num_nodes, run.machine)
        return entry.may_apply_to(run) and (is_unrecorded or is_same)

    other_entries = [entry for entry in entries if not is_obsolete(entry)]
    if len(other_entries) < len(entries):
        _store(other_entries, file)


def torch_version() -> str:
    """Return the installed torch version, or "" if torch is missing. torch is not imported."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def format_settings(settings: Mapping[str, str]) -> str:
    """Format settings as shell assignments, or as "the default settings" if there are none."""
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "the default settings"


@functools.cache
def describe_machine() -> str:
    """Return the hardware of this host, such as "Intel(R) Xeon(R) CPU, 8 cores, 2 x NVIDIA H100".

    The host name is excluded, so that identical hosts of a cluster share settings.
    """
    parts = [cpu_model_name(), f"{len(usable_cores())} cores"]
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    gpus = [match[1].strip() for file in files if (match := re.search(r"^Model:(.*)$", _read_text(file), re.MULTILINE))]
    parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join(parts)


def _read_text(file: str | Path) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""


def _format_arguments(args: tuple[str, ...]) -> str:
    return f"the arguments {shlex.join(args)!r}" if args else "no arguments"


def _format_hosts(count: int) -> str:
    return f"{count} host{'s' if count > 1 else ''}"


def _store(entries: list[TunedEntry], file: Path) -> None:
    try:
        replace_file(file, json.dumps([asdict(entry) for entry in entries], indent=2) + "\n")
    except OSError as error:
        raise _unwritable_error(file, error) from error


def _unwritable_error(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{file} cannot be written: {error.strerror}. Run `unitrain tune` in a folder that you can write to."
    )


def _load(file: Path) -> list[TunedEntry]:
    if not file.exists():
        return []
    try:
        return [_parse_entry(entry) for entry in json.loads(read_regular_file(file, _MAX_BYTES))]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Delete it and run `unitrain tune` again.") from error


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _parse_entry(entry: Any) -> TunedEntry:
    if not isinstance(entry, dict):
        raise TypeError("an entry is not an object")
    for name in ("script", "backend"):
        if not isinstance(entry.get(name), str):
            raise TypeError(f"{name!r} of an entry is not a string")
    variables = entry.get("variables")
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise TypeError("'variables' of an entry is not an object with strings")
    for name, value in variables.items():
        if not (_NUMBERS if name in BUILT_IN_VARIABLES else _PRINTABLE).fullmatch(value):
            raise ValueError(f"the value of {name!r} of an entry is {value[:40]!r}, which unitrain tune does not write")
    spread = entry.get("spread")
    if not isinstance(spread, list) or len(spread) != 2 or not all(map(_is_positive, (entry.get("gain"), *spread))):
        raise TypeError("'gain' or 'spread' of an entry is not a positive number")
    for name in ("torch", "machine"):
        if not isinstance(entry.get(name), str | None):
            raise TypeError(f"{name!r} of an entry is not a string")
    if "\0" in entry["script"]:
        raise ValueError("'script' of an entry contains a null character")
    for name in ("num_processes", "num_nodes"):
        if entry.get(name) is not None and not is_positive_integer(entry[name]):
            raise TypeError(f"{name!r} of an entry is not a positive integer")
    if not isinstance(entry.get("args", []), list | None):
        raise TypeError("'args' of an entry is not a list")
    if not all(isinstance(word, str) for word in entry.get("args") or ()):
        raise TypeError("'args' of an entry contains a value that is not a string")
    tuple_fields = {name: tuple(entry[name]) for name in ("spread", "args") if entry.get(name) is not None}
    return TunedEntry(**{**entry, **tuple_fields})

"""The settings that `unitrain tune` has found, kept in a small file that `unitrain launch` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from unitrain.errors import ConfigError

FILE = Path("unitrain-tuned.json")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The `variables` under which `script` was faster on so many ranks of a backend: `gain` is the median ratio of the
    seconds of a step without them to those with them, `spread` its lowest and highest."""

    script: str
    backend: str
    num_processes: int
    variables: Mapping[str, str]
    gain: float
    spread: tuple[float, float]
    torch: str

    def keep(self, file: Path = FILE) -> None:
        """Write it to `file`, instead of what was known of the same run."""
        others = [one for one in _read(file) if not one.is_of(self.script, self.backend, self.num_processes)]
        file.write_text(json.dumps([asdict(one) for one in [*others, self]], indent=2) + "\n")

    def is_of(self, script: str, backend: str | None, num_processes: int) -> bool:
        """Whether it is of this run."""
        same_script = Path(self.script).resolve() == Path(script).resolve()
        return same_script and (self.backend, self.num_processes) == (backend or "ddp", num_processes)


def tuned_for(script: str, backend: str | None, num_processes: int, file: Path = FILE) -> Tuned | None:
    """Return what `file` has for this run, if anything. Raises ConfigError for a file that cannot be read."""
    return next((one for one in _read(file) if one.is_of(script, backend, num_processes)), None)


def forget(script: str, backend: str, num_processes: int, file: Path = FILE) -> None:
    """Take out of `file` what was known of this run."""
    found = _read(file)
    others = [one for one in found if not one.is_of(script, backend, num_processes)]
    if len(others) < len(found):
        file.write_text(json.dumps([asdict(one) for one in others], indent=2) + "\n")


def _read(file: Path) -> list[Tuned]:
    if not file.exists():
        return []
    try:
        return [Tuned(**{**entry, "spread": tuple(entry["spread"])}) for entry in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}. Delete it, and find new settings: unitrain tune ..."
        ) from error

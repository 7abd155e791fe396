"""What a service has of a run: kept in the output folder, so that a resumed run goes on there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


class KeptRun:
    """The id of a run at a service, and the last step that it has of every name.

    A service takes nothing back: what an earlier start has logged for steps that are done again stays as it is, and is
    not logged a second time. Without a `folder` nothing is kept.
    """

    def __init__(self, name: str, folder: Path | None, step: int) -> None:
        self._path = None if folder is None else folder / f".{name}.json"
        self.id: str | None = None
        self._before: dict[str, int] = {}
        if step and self._path is not None and self._path.exists():
            kept = json.loads(self._path.read_text())
            self.id, self._before = kept["id"], kept["steps"]
        self._last = dict(self._before)

    def begin(self, run_id: str) -> None:
        """The run has this id there."""
        self.id = run_id
        self._write()

    def not_there(self, names: Iterable[str], step: int) -> list[str]:
        """Return those of `names` that no earlier start has logged for `step`."""
        return [name for name in names if step > self._before.get(name, -1)]

    def logged(self, names: Iterable[str], step: int) -> None:
        """What is logged for `step` now has these names."""
        self._last.update(dict.fromkeys(names, step))
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            rewritten = self._path.with_name(f"{self._path.name}.unfinished")
            rewritten.write_text(json.dumps({"id": self.id, "steps": self._last}))
            rewritten.rename(self._path)

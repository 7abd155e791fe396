"""Which checkpoints of a run are kept."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unitrain.checkpoint import files

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Retention:
    """Keeps the `last` ones, beside them the one in which result `best` was best, and one every `every` epochs.

    All are kept where `last` is None.
    """

    last: int | None
    every: int | None = None
    best: str | None = None
    mode: Mode = "min"

    def obsolete(self, newest: Path) -> list[Path]:
        """Return the checkpoints beside `newest`, the one just written, that need not be kept, oldest first.

        Damaged ones count as if absent, and so do later ones: the run was resumed before them, as they are not sound.
        """
        if self.last is None:
            return []
        whole = [path for path in files.candidates(newest.parent) if path <= newest and files.read_manifest(path)]
        kept = {*whole[: self.last], *self._milestones(whole), *self._best(whole)}
        return [path for path in reversed(whole) if path not in kept]

    def best_in(self, folder: Path) -> Path | None:
        """Return the checkpoint in `folder` with the best result, the newest of equals; None if none has a finite
        one."""
        return next(iter(self._best([path for path in files.candidates(folder) if not files.damage(path)])), None)

    def apply(self, newest: Path) -> None:
        """Remove what is obsolete; what is half removed is not taken for a checkpoint."""
        for path in self.obsolete(newest):
            removed = path.with_name(f".{path.name}.unfinished")
            shutil.rmtree(removed, ignore_errors=True)
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    def _milestones(self, whole: list[Path]) -> list[Path]:
        if self.every is None:
            return []
        places = [(path, files.read_manifest(path)) for path in whole]
        return [path for path, place in places if not place.get("sample") and self._is_milestone(place.get("epoch", 1))]

    def _is_milestone(self, epoch: Any) -> bool:
        return self.every is not None and isinstance(epoch, int) and epoch % self.every == 0

    def _best(self, whole: list[Path]) -> list[Path]:
        results = {path: files.read_manifest(path).get("results") for path in whole}
        found = {path: kept.get(self.best) for path, kept in results.items() if isinstance(kept, dict)}
        numbers = {path: one for path, one in found.items() if isinstance(one, int | float) and math.isfinite(one)}
        if not numbers:
            return []
        # The first of equals is the newest.
        return [(min if self.mode == "min" else max)(numbers, key=lambda path: numbers[path])]

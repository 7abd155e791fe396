"""The record of a run: `history.jsonl`, one JSON object per epoch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class History:
    """Appends rows to a file; numbers that JSON cannot hold (nan, infinity) become null. Rank 0 only."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "history.jsonl"

    def rewind(self, step: int) -> None:
        """Forget the rows after `step`, which a run that starts or resumes there is going to write again."""
        if not self.path.exists():
            return
        rows = [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]
        kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
        rewritten = self.path.with_suffix(".unfinished")
        rewritten.write_text(kept)
        rewritten.rename(self.path)

    def append(self, row: dict[str, Any]) -> None:
        """Add one row, which has a "step"."""
        finite = {key: value if _fits(value) else None for key, value in row.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(finite) + "\n")


def _fits(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)

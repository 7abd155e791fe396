"""Files of JSON lines, each with a "step", that grow while a run trains and that it takes up again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def append_row(row: dict[str, Any], path: Path) -> None:
    """Add `row` to the file; numbers that JSON cannot hold (nan, infinity) become null."""
    finite = {key: value if _fits(value) else None for key, value in row.items()}
    with path.open("a") as file:
        file.write(json.dumps(finite, default=str) + "\n")


def last_row(path: Path) -> dict[str, Any] | None:
    """Return the last row of a file whose rows are whole, None where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    row: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return row


def drop_rows_after(step: int, path: Path) -> None:
    """Forget the rows of later steps, and a last one that was not written to its end. There may be no such file."""
    if not path.exists():
        return
    text = path.read_text()
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    rewritten = path.with_name(f"{path.name}.unfinished")
    rewritten.write_text(kept)
    rewritten.rename(path)


def _fits(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)

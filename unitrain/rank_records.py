"""JSON files in which each rank of a run started by `unitrain verify` or `unitrain memory` stores its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_rank_record(folder: Path, rank: int, fields: dict[str, Any]) -> None:
    """Write the record of `rank` to `folder`, atomically."""
    path = folder / f"rank-{rank}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(fields))
    unfinished.rename(path)


def read_rank_records(folder: Path) -> list[dict[str, Any]] | None:
    """Read the records of all ranks from `folder`, in rank order. Return None if the record of a rank is missing.

    Each record contains its rank as "rank" and the number of ranks as "size".
    """
    records = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    records.sort(key=lambda fields: fields["rank"])
    return records if records and len(records) == records[0]["size"] else None

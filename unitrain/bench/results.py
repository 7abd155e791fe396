"""The files that measurements are kept in, and what is worked out from a row of one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unitrain.errors import ReportError

KINDS = ("collectives", "train")
# Of a training step, in the order of time.
PARTS = ("data", "forward", "backward", "exposed", "optimizer")


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result of `sweep` or `training` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Return the result in a file. Raises ReportError for a file that holds none, or one of another `kind`."""
    make = f"Make one with: unitrain bench {kind or 'collectives'} --json {path}"
    try:
        result: Any = json.loads(path.read_text())
    except FileNotFoundError:
        raise ReportError(f"There is no file '{path}'. {make}") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"'{path}' cannot be read as JSON: {error}. {make}") from error
    if not isinstance(result, dict) or result.get("kind") not in KINDS or not isinstance(result.get("rows"), list):
        raise ReportError(f"'{path}' is no result of unitrain bench. {make}")
    if kind is not None and result["kind"] != kind:
        raise ReportError(
            f"'{path}' is a result of unitrain bench {result['kind']}, not of unitrain bench {kind}. {make}"
        )
    return result


def name_of(row: dict[str, Any]) -> str:
    """Return who was measured, as "horovod mpi"; a row of training also tells its setting."""
    name = row["backend"] if row["transport"] == "none" else f"{row['backend']} {row['transport']}"
    return f"{name}, {row['setting']}" if row.get("setting") else str(name)


def names(result: dict[str, Any]) -> list[str]:
    """Return everyone who was measured, each once, in order."""
    return list(dict.fromkeys(name_of(row) for row in result["rows"]))


def samples_per_second(row: dict[str, Any]) -> float:
    """Return the speed of all ranks in a row of training."""
    return float(row["samples"] / middle(row["seconds"])[1])


def efficiency(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return what a rank does as a share of what one alone does with the same setting; None where none was measured."""
    alone = [one for one in result["rows"] if one["ranks"] == 1 and one["setting"] == row["setting"]]
    return samples_per_second(row) / row["ranks"] / samples_per_second(alone[0]) if alone else None


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def shown_bytes(size: float) -> str:
    """Return a size in the largest unit in which it has no more than three digits before the point, as 64 MB of
    2^20."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:g} B"


def shown_seconds(seconds: float) -> str:
    """Return a time in the unit that fits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"

"""Read and write the results of measurements, and derive quantities from their rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unitrain.errors import ReportError

KINDS = ("collectives", "train")
OPERATIONS = ("allreduce", "allgather", "reducescatter", "broadcast")
# The parts of a training step, in chronological order.
PARTS = ("data", "forward", "backward", "exposed", "optimizer")


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result of the `rounds` module as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Return the result in a file. Raises ReportError if the file has no result, or one of another `kind`."""
    remedy = f"Create one with: unitrain bench {kind or 'collectives'} --json {path}"
    try:
        result: Any = json.loads(path.read_text())
    except FileNotFoundError:
        raise ReportError(f"There is no file '{path}'. {remedy}") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"'{path}' cannot be read as JSON: {error}. {remedy}") from error
    if not isinstance(result, dict) or result.get("kind") not in KINDS or not isinstance(result.get("rows"), list):
        raise ReportError(f"'{path}' is not a result of unitrain bench. {remedy}")
    if kind is not None and result["kind"] != kind:
        raise ReportError(
            f"'{path}' is a result of unitrain bench {result['kind']}, not of unitrain bench {kind}. {remedy}"
        )
    return result


def name_of(row: dict[str, Any]) -> str:
    """Return the backend and transport of a row, such as "horovod mpi", and the setting of a training row."""
    name = row["backend"] if row["transport"] == "none" else f"{row['backend']} {row['transport']}"
    return f"{name}, {row['setting']}" if row.get("setting") else str(name)


def names(result: dict[str, Any]) -> list[str]:
    """Return the distinct names of the rows, in order."""
    return list(dict.fromkeys(name_of(row) for row in result["rows"]))


def samples_per_second(row: dict[str, Any]) -> float:
    """Return the samples per second of all ranks in a training row."""
    return float(row["samples"] / quartiles(row["seconds"])[1])


def efficiency(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the speed per rank relative to one rank with the same setting, or None if that was not measured."""
    single = [one for one in result["rows"] if one["ranks"] == 1 and one["setting"] == row["setting"]]
    return samples_per_second(row) / row["ranks"] / samples_per_second(single[0]) if single else None


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor between algorithm bandwidth (bytes / seconds) and bus bandwidth.

    Bus bandwidth does not depend on the number of ranks and can be compared with the bandwidth of the hardware. The
    definition, and that of the size of an operation, are those of doc/PERFORMANCE.md in NVIDIA's nccl-tests: the size
    is that of the result of an allgather and of the input of a reducescatter.
    """
    return {
        "allreduce": 2 * (ranks - 1) / ranks,
        "allgather": (ranks - 1) / ranks,
        "reducescatter": (ranks - 1) / ranks,
        "broadcast": 1.0,
    }[operation]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def format_bytes(size: float) -> str:
    """Return a size in the largest unit in which it is at least 1, such as "64 MB" for 64 * 2^20."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:g} B"


def format_seconds(seconds: float) -> str:
    """Return a duration in the largest unit in which it is at least 1."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"

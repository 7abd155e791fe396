"""Read and write benchmark results, and derive metrics from their rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unitrain.errors import ReportError
from unitrain.regular_files import read_regular_file
from unitrain.validation import is_finite_number, is_positive_integer

_MAX_BYTES = 256 << 20
KINDS = ("collectives", "train")
OPERATIONS = ("allreduce", "allgather", "reducescatter", "broadcast")
# The phases of a training step, in chronological order.
PHASES = ("data", "forward", "backward", "exposed", "optimizer")


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result of the `rounds` module, or a prediction, as JSON. Create the folder of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read a result from a file. Raises ReportError if the file contains no valid result, or if its kind differs from
    `kind`, unless `kind` is None."""
    remedy = f"Create one with: unitrain bench {kind or 'train'} --json {path}"
    try:
        result: Any = json.loads(read_regular_file(path, _MAX_BYTES))
    except FileNotFoundError:
        raise ReportError(f"There is no file '{path}'. {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ReportError(f"'{path}' cannot be read as JSON: {reason}. {remedy}") from error
    if not isinstance(result, dict) or result.get("kind") not in KINDS or not isinstance(result.get("rows"), list):
        raise ReportError(f"'{path}' is not a result of unitrain bench. {remedy}")
    if kind is not None and result["kind"] != kind:
        raise ReportError(
            f"'{path}' is a result of unitrain bench {result['kind']}, not of unitrain bench {kind}. {remedy}"
        )
    if result["kind"] == "train":
        is_header_valid, is_row_valid = _is_positive_number(result.get("parameters")), _is_training_row
    else:
        is_header_valid, is_row_valid = is_positive_integer(result.get("ranks")), _is_collective_row
        gradients = result.get("gradients", [])  # results of earlier versions have none
        is_header_valid &= isinstance(gradients, list) and all(map(_is_collective_row, gradients))
    if not is_header_valid or not all(map(is_row_valid, result["rows"])):
        raise ReportError(
            f"'{path}' is not a complete result of unitrain bench {result['kind']}: a measurement is missing or is not "
            f"a positive number. {remedy}"
        )
    return result


def _is_positive_number(value: Any) -> bool:
    return is_finite_number(value) and value > 0


def _is_measurement(row: Any) -> bool:
    """Return whether `row` names its backend, and has one positive number of seconds per round."""
    if not (isinstance(row, dict) and isinstance(row.get("backend"), str) and isinstance(row.get("transport"), str)):
        return False
    seconds = row.get("seconds")
    return isinstance(seconds, list) and bool(seconds) and all(map(_is_positive_number, seconds))


def _is_training_row(row: Any) -> bool:
    if not _is_measurement(row):
        return False
    phases = row.get("phases")
    return (
        is_positive_integer(row.get("ranks"))
        and isinstance(row.get("setting", False), str | None)
        and isinstance(phases, dict)
        and all(
            isinstance(phases.get(phase), list) and phases[phase] and all(map(is_finite_number, phases[phase]))
            for phase in PHASES
        )
    )


def _is_collective_row(row: Any) -> bool:
    return (
        _is_measurement(row)
        and row.get("operation") in OPERATIONS
        and is_positive_integer(row.get("bytes"))
        and is_positive_integer(row.get("max_in_flight", 1))
    )


def row_name(row: dict[str, Any]) -> str:
    """Return the backend and transport of a row, such as "horovod mpi", and the setting of a training row."""
    name = row["backend"] if row["transport"] == "none" else f"{row['backend']} {row['transport']}"
    return f"{name}, {row['setting']}" if row.get("setting") else str(name)


def row_names(result: dict[str, Any]) -> list[str]:
    """Return the distinct names of the rows, in order."""
    return list(dict.fromkeys(row_name(row) for row in result["rows"]))


def samples_per_second(row: dict[str, Any]) -> float:
    """Return the global throughput of a training row, in samples per second."""
    return float(row["samples"] / quartiles(row["seconds"])[1])


def efficiency(result: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the scaling efficiency: throughput per rank relative to one rank with the same setting, or None if
    unknown.
    """
    baseline = [single for single in result["rows"] if single["ranks"] == 1 and single["setting"] == row["setting"]]
    return samples_per_second(row) / row["ranks"] / samples_per_second(baseline[0]) if baseline else None


def bus_factor(operation: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth (bytes / seconds).

    Bus bandwidth does not depend on the number of ranks and is comparable with the hardware bandwidth. The definitions
    of bandwidth and message size follow doc/PERFORMANCE.md in NVIDIA's nccl-tests: the size is the output size of an
    allgather and the input size of a reducescatter.
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
    """Format a size in the largest suitable unit, such as "64 MB" for 64 * 2^20."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:g} B"


def format_seconds(seconds: float) -> str:
    """Format a duration in the largest suitable unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 0.9995:  # smaller values round to at most 999 of the next unit
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"

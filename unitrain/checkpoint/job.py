"""The mark in a run's folder of the job that writes there, where that is one that is started again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unitrain.bootstrap import environment
from unitrain.data.batch_size import ElasticBatchSize
from unitrain.errors import CheckpointError

_MARK = ".job"


def is_own(folder: Path) -> bool:
    """Return whether an earlier attempt of this process's job has begun a run in `folder`."""
    return environment.job_id() is not None and _read(folder).get("job") == environment.job_id()


def mark(folder: Path) -> None:
    """Mark the run in `folder` as this job's, if it is one that is started again."""
    if environment.job_id() is not None and not is_own(folder):
        _write(folder, [])


def kept_batches(folder: Path) -> list[ElasticBatchSize]:
    """Return what earlier attempts of this process's job have kept of the batches of each call of `fit`."""
    kept = _read(folder).get("batches", []) if environment.job_id() is None or is_own(folder) else []
    return [ElasticBatchSize(*batch) for batch in kept]


def keep_batch(folder: Path, fit: int, batch: ElasticBatchSize) -> None:
    """Keep the batch of call number `fit` of `fit`, for attempts that have another number of ranks."""
    mark(folder)
    batches = kept_batches(folder)
    if fit == len(batches):
        _write(folder, [*batches, batch])


def _read(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, str(error)) from None
    batches = read.get("batches", []) if isinstance(read, dict) else None
    if not isinstance(batches, list) or not all(_is_batch(batch) for batch in batches):
        raise _damaged(folder, "it holds something else")
    return dict(read)


def _is_batch(batch: Any) -> bool:
    fields = len(ElasticBatchSize._fields)
    return isinstance(batch, list) and len(batch) == fields and all(isinstance(size, int) for size in batch)


def _damaged(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"'{folder / _MARK}', the mark of the job that writes to this folder, is damaged: {why}. Remove the file, and "
        "go on from the checkpoints with TrainConfig(resume=True)."
    )


def _write(folder: Path, batches: list[ElasticBatchSize]) -> None:
    new = folder / f"{_MARK}.new"
    new.unlink(missing_ok=True)  # of a run that was killed, or a link to another file
    with new.open("x", encoding="utf-8") as file:
        json.dump({"job": environment.job_id(), "batches": batches}, file)
    new.replace(folder / _MARK)

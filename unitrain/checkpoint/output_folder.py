"""File access with errors that all ranks raise, and the file `.job` in the output folder, which records the job that
owns the folder.

`unitrain launch` restarts a failed job with the same job ID. If `.job` contains that ID and another process, an earlier
attempt of the job started the run in the folder, and the new attempt resumes it. If it contains this process, another
Trainer of the same attempt started the run. The file also stores the batch sizes of the first attempt, which an elastic
job keeps when its number of ranks changes.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import raise_on_all_ranks
from unitrain.bootstrap import environment
from unitrain.checkpoint import files, sharded_files
from unitrain.data.batch_size import InitialBatchSizes
from unitrain.errors import CheckpointError
from unitrain.processes import process_start_ticks
from unitrain.regular_files import read_regular_file, replace_file
from unitrain.threads import start_thread

CHECK_WRITABLE = "Check that the folder is writable and has room, or choose another output_dir."
_DAMAGED = "A file in the folder may be damaged: restore or remove it, or choose another output_dir."
_JOB_FILE = ".job"
_MAX_JOB_FILE_BYTES = 1 << 20
# While rank 0 verifies files, it broadcasts this object at intervals, so that the other ranks do not time out.
_IN_PROGRESS = "in progress"
_PROGRESS_INTERVAL_SECONDS = 1.0

_ResultT = TypeVar("_ResultT")


def run_on_rank_zero(
    communicator: Communicator, task_description: str, fix: str, action: Callable[[], _ResultT]
) -> _ResultT | None:
    """Run `action` on rank 0, and return its result on rank 0 and None on other ranks. All ranks must call this
    function.

    Raises CheckpointError on every rank if `action` fails, see `run_on_all_ranks`.
    """
    return run_on_all_ranks(communicator, task_description, fix, lambda: action() if communicator.rank == 0 else None)


def run_on_all_ranks(
    communicator: Communicator, task_description: str, fix: str, action: Callable[[], _ResultT]
) -> _ResultT | None:
    """Run `action` on every rank and return its result. All ranks must call this function.

    Raises CheckpointError on every rank if `action` fails on any rank: the CheckpointError of `action`, or "Cannot
    `task_description`: ... `fix`" for another exception.
    """
    result: _ResultT | None = None
    error: CheckpointError | None = None
    try:
        result = action()
    except CheckpointError as caught:
        error = caught
    except Exception as caught:  # if only this rank raised the exception, the other ranks would hang
        remedy = fix if fix != CHECK_WRITABLE or isinstance(caught, OSError) else _DAMAGED
        error = CheckpointError(f"Cannot {task_description}: {type(caught).__name__}: {caught}. {remedy}")
        error.__cause__ = caught
    raise_on_all_ranks(communicator, error)
    return result


def find_on_rank_zero(
    communicator: Communicator,
    task_description: str,
    fix: str,
    find: Callable[[Callable[[Path], str | None]], _ResultT],
) -> _ResultT:
    """Run `find` on rank 0, and return its result on every rank. All ranks must call this function.

    The argument of `find` is a function that returns the reason why a checkpoint is corrupt, or None. Each rank
    verifies some of the files of a sharded checkpoint. Rank 0 alone verifies other checkpoints; meanwhile, it
    broadcasts at intervals, so that the other ranks do not time out. Raises CheckpointError like `run_on_rank_zero`.
    """

    def check(checkpoint: Path) -> str | None:
        if not sharded_files.is_sharded(checkpoint):
            return _find_corruption_on_rank_zero(checkpoint, communicator)
        communicator.broadcast_object(checkpoint)
        return find_corruption_on_all_ranks(checkpoint, communicator)

    def find_and_end() -> _ResultT:
        try:
            return find(check)
        finally:
            communicator.broadcast_object(None)  # ends the loop of the other ranks

    if communicator.rank != 0:
        while (received := communicator.broadcast_object(None)) is not None:
            if received != _IN_PROGRESS:
                find_corruption_on_all_ranks(received, communicator)
    result: _ResultT = communicator.broadcast_object(
        run_on_rank_zero(communicator, task_description, fix, find_and_end)
    )
    return result


def _find_corruption_on_rank_zero(checkpoint: Path, communicator: Communicator) -> str | None:
    """Return the reason why `checkpoint` is corrupt, or None. Only rank 0 calls it.

    While the files are read, `_IN_PROGRESS` is broadcast at intervals.
    """
    verification = _Verification(checkpoint)
    while verification.is_running_after_wait():
        communicator.broadcast_object(_IN_PROGRESS)
    return verification.result()


def find_corruption_on_all_ranks(checkpoint: Path, communicator: Communicator) -> str | None:
    """Return the reason why `checkpoint` is corrupt, or None, on every rank. All ranks must call this function.

    Each rank verifies some of the files. Until all have finished, they communicate at intervals, so that no rank times
    out.
    """
    verification = _Verification(checkpoint, communicator.rank, communicator.size)
    while any(communicator.allgather_object(verification.is_running_after_wait())):
        pass
    corruption_by_rank = communicator.allgather_object(verification.result())
    return next((reason for reason in corruption_by_rank if reason is not None), None)


class _Verification:
    """Calls `files.find_corruption(*arguments)`, which may read large files, in a thread."""

    def __init__(self, *arguments: Any) -> None:
        self._found: Future[str | None] = Future()

        def find() -> None:
            try:
                self._found.set_result(files.find_corruption(*arguments))
            except BaseException as error:
                self._found.set_exception(error)

        start_thread(find, name="unitrain checkpoint verification")

    def is_running_after_wait(self) -> bool:
        """Wait at most `_PROGRESS_INTERVAL_SECONDS` for the end, and return whether the thread still verifies files."""
        return bool(wait([self._found], _PROGRESS_INTERVAL_SECONDS).not_done)

    def result(self) -> str | None:
        """Return the reason why the checkpoint is corrupt, or None. Raises the exceptions of `find_corruption`."""
        return self._found.result()


def prepare_folder(folder: Path, communicator: Communicator, *, resume: bool) -> tuple[bool, list[InitialBatchSizes]]:
    """Create `folder` and check that it is writable, without changing files that another job may be writing.

    Return whether the run resumes from this folder (with `resume`, or if an earlier attempt of this job started the
    run), and the stored batch sizes (see `stored_batch_sizes`). All ranks must call this function. Raises
    CheckpointError on every rank if the folder is not writable or contains another run.
    """

    def prepare() -> tuple[bool, list[InitialBatchSizes]]:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}.unfinished"
        probe.mkdir(exist_ok=True)  # a killed process with the same ID may have left it
        probe.rmdir()
        checkpoints, continues = files.list_checkpoints(folder), resume or belongs_to_earlier_attempt(folder)
        if checkpoints and not continues:
            raise CheckpointError(
                f"Output folder '{folder}' already holds a run, up to {checkpoints[0].name}. "
                "Use TrainConfig(resume=True) to continue it, or another output_dir."
            )
        return continues, stored_batch_sizes(folder)

    prepared = run_on_rank_zero(communicator, f"write to output folder '{folder}'", CHECK_WRITABLE, prepare)
    result: tuple[bool, list[InitialBatchSizes]] = communicator.broadcast_object(prepared)
    return result


def belongs_to_earlier_attempt(folder: Path) -> bool:
    """Return whether an earlier attempt of this job started the run in `folder`."""
    return _belongs_to_this_job(folder) and _read_job_file(folder).get("process") != _this_process()


def record_job(folder: Path) -> None:
    """Record this job and this process as the owner of the run in `folder` if the job has an ID. A restarted job keeps
    its ID."""
    if environment.job_id() is None:
        return
    recorded = _read_job_file(folder)
    if recorded.get("job") != environment.job_id():
        _write_job_file(folder, [])
    elif recorded.get("process") != _this_process():
        _write_job_file(folder, recorded["batches"])


def _belongs_to_this_job(folder: Path) -> bool:
    return environment.job_id() is not None and _read_job_file(folder).get("job") == environment.job_id()


def _this_process() -> str:
    """Return a text that identifies this process: its host, ID and start time."""
    return f"{socket.gethostname()} {os.getpid()} {process_start_ticks()}"


def stored_batch_sizes(folder: Path) -> list[InitialBatchSizes]:
    """Return the batch sizes stored by earlier attempts of this job, one per call of `fit`.

    If this job has no ID, return the stored batch sizes of any job.
    """
    stored = (
        _read_job_file(folder).get("batches", [])
        if environment.job_id() is None or _belongs_to_this_job(folder)
        else []
    )
    return [InitialBatchSizes(*batch) for batch in stored]


def store_batch_size(folder: Path, fit_index: int, batch_size: InitialBatchSizes) -> None:
    """Store the batch size of the `fit` call with index `fit_index`, for later attempts with different numbers of
    ranks.

    Does nothing if it is already stored.
    """
    record_job(folder)
    batches = stored_batch_sizes(folder)
    if fit_index == len(batches):
        _write_job_file(folder, [*batches, batch_size])


def _read_job_file(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads(read_regular_file(folder / _JOB_FILE, _MAX_JOB_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise _corrupt_file_error(folder, str(error)) from None
    batches = read.get("batches", []) if isinstance(read, dict) else None
    if not isinstance(batches, list) or not all(_is_batch_size(batch) for batch in batches):
        raise _corrupt_file_error(folder, "it has an unexpected format")
    return {**read, "batches": batches}


def _is_batch_size(batch: Any) -> bool:
    num_fields = len(InitialBatchSizes._fields)
    return isinstance(batch, list) and len(batch) == num_fields and all(isinstance(size, int) for size in batch)


def _corrupt_file_error(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"'{folder / _JOB_FILE}', which records the job that writes to this folder, is damaged: {reason}. Remove the "
        "file, and continue from the checkpoints with TrainConfig(resume=True)."
    )


def _write_job_file(folder: Path, batches: list[InitialBatchSizes]) -> None:
    content = {"job": environment.job_id(), "process": _this_process(), "batches": batches}
    replace_file(folder / _JOB_FILE, json.dumps(content), is_durable=True)

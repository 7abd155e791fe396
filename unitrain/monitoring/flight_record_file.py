"""Write the flight recorder of this rank to a file in torch's format.

torch's analyzer compares the files of all ranks: `python -m torch.distributed.flight_recorder.fr_trace FOLDER`. The
files have the format of ProcessGroupNCCL's flight recorder, but describe the collectives of every backend.
"""

from __future__ import annotations

import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from unitrain.bootstrap import environment
from unitrain.monitoring.flight_recorder import CollectiveCall, FlightEntry, FlightRecorder, dtype_name
from unitrain.output import get_logger
from unitrain.threads import start_thread

_log = get_logger(__name__)
# The main thread and the watchdog thread may write the file at the same time.
_lock = threading.Lock()
# Maximum time for which the report of a failure waits for the file system.
_WRITE_SECONDS = 5.0
_late_writers: list[threading.Thread] = []  # threads whose write has exceeded the limit

# Version of the format of torch 2.14.
_FORMAT_VERSION = "2.10"
_FILE_PREFIX = "flight_record_rank_"
# The analyzer accepts only the names of a few libraries, but does not use the name.
_LIBRARY = "gloo"
# Other gradient phases, such as those of pipelines, are written as "all_reduce".
_OPERATIONS = {
    "allreduce": "all_reduce", "allgather": "all_gather_v", "reducescatter": "reduce_scatter_v",
    "broadcast": "broadcast", "barrier": "barrier", "broadcast_object": "broadcast",
    "allgather_object": "all_gather_v", "alltoall": "all_to_all", "backward": "all_reduce",
    "bucket rebuild": "broadcast", "parameter broadcast": "broadcast", "parameter allgather": "all_gather_v",
    "gradient reducescatter": "reduce_scatter_v",
}  # fmt: skip


def write_flight_record(recorder: FlightRecorder, rank: int, size: int) -> None:
    """Write the recorder of `rank` to the folder in UNITRAIN_FLIGHT_RECORD_DIR. Do nothing if the variable is not set.

    An error of the file system is only logged, because the caller reports a more important failure. If the file system
    does not respond, the call returns after 5 s with a warning, and later calls do nothing until the write has ended.
    """
    folder = environment.flight_record_folder()
    if folder is None or any(thread.is_alive() for thread in _late_writers):
        return
    group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(size)))}
    content = {
        "version": _FORMAT_VERSION,
        "entries": flight_record_entries(recorder),
        "pg_config": {"0": group},
        "pg_status": {},
    }
    try:
        writer = start_thread(_write, content, Path(folder), rank, name="unitrain flight record")
    except RuntimeError:  # the process has too many threads
        _write(content, Path(folder), rank)
        return
    writer.join(_WRITE_SECONDS)
    if writer.is_alive():
        _late_writers.append(writer)
        _log.warning(
            "The flight record of rank %d is not complete after %g s: the file system of '%s' does not respond.",
            rank,
            _WRITE_SECONDS,
            folder,
        )


def _write(content: dict[str, Any], folder: Path, rank: int) -> None:
    unfinished = folder / f".{rank}.unfinished"
    try:
        with _lock:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                unfinished.unlink()  # left by a killed process, or a link to another file
            with unfinished.open("xb") as file:
                pickle.dump(content, file)
            unfinished.replace(folder / f"{_FILE_PREFIX}{rank}")
    except OSError as error:
        _log.warning("The flight record of rank %d cannot be written to '%s': %s.", rank, folder, error)


def flight_record_entries(recorder: FlightRecorder) -> list[dict[str, Any]]:
    """Return the entries of `recorder` in torch's format.

    All operations are marked as completed, except an operation that timed out, and the latest operation while the main
    thread waits in it.
    """
    unfinished = {recorder.timed_out_position}
    if recorder.is_main_thread_waiting:
        unfinished.add(recorder.operation_count - 1)
    return [
        _to_torch_entry(entry, "started" if entry.position in unfinished else "completed")
        for entry in recorder.entries()
    ]


def _to_torch_entry(entry: FlightEntry, state: str) -> dict[str, Any]:
    operation = entry.operation
    is_collective = isinstance(operation, CollectiveCall)
    name = operation.operation if isinstance(operation, CollectiveCall) else operation.kind
    sizes: list[list[int]] = [[]]  # unknown
    dtypes = [""]
    # Ranks may pass objects of different sizes to collectives of objects.
    if isinstance(operation, CollectiveCall) and operation.dtype is not None and not name.endswith("_object"):
        # The first dimension of an allgather may differ between ranks.
        shape = operation.shape[1:] if operation.operation == "allgather" else operation.shape
        sizes, dtypes = [list(shape)], [dtype_name(operation.dtype)]
    sequence_number = entry.position + 1
    return {
        "record_id": entry.position,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence_number,
        "p2p_seq_id": 0,
        "op_id": sequence_number,
        "profiling_name": f"{_LIBRARY}:{_OPERATIONS.get(name, 'all_reduce')}",
        "time_created_ns": entry.time_ns,
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": state,
        "time_discovered_started_ns": entry.time_ns,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [{"name": str(operation) if is_collective else name, "filename": entry.file, "line": entry.line}],
    }

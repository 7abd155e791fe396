"""Writing checkpoints beside the training: the loop waits for a copy in host memory, and not for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import raise_on_all_ranks
from unitrain.checkpoint import files
from unitrain.checkpoint.checkpointer import PATIENCE_SECONDS, WRITABLE
from unitrain.checkpoint.retention import Retention
from unitrain.checkpoint.state_copy import host_copy, plain_state
from unitrain.errors import CheckpointError

# The threads that write in this process, by the folder they write to.
_writing: dict[Path, threading.Thread] = {}


def wait_for_earlier_writer(folder: Path, communicator: Communicator) -> None:
    """Wait until no earlier Trainer of rank 0's process writes to `folder`, as after an exception in `fit`. All ranks
    call it."""
    while communicator.broadcast_object(communicator.rank == 0 and _runs(_writing.get(folder.resolve()))):
        pass


def _runs(thread: threading.Thread | None) -> bool:
    """Wait for a while for `thread` to end, and return whether it runs still."""
    if thread is None:
        return False
    thread.join(PATIENCE_SECONDS)
    return thread.is_alive()


class CheckpointWriter:
    """Writes one checkpoint at a time on rank 0, then removes those that need not be kept. All ranks use it alike."""

    def __init__(self, folder: Path, communicator: Communicator, retention: Retention, *, asynchronous: bool) -> None:
        self._folder, self._communicator = folder, communicator
        self._retention, self._asynchronous = retention, asynchronous
        self._busy = False
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(self, step: int, model: nn.Module, training: dict[str, Any], about: dict[str, Any]) -> None:
        """Begin to write the checkpoint of `step`, once the one before is written; rank 0's arguments count.

        All ranks call it. Raises CheckpointError on every rank where that one failed, or where this one does and
        writing is not asynchronous.
        """
        self.wait()
        self._busy = True
        if self._communicator.rank == 0:
            self._begin(files.checkpoint_path(self._folder, step), (model.state_dict(), training), about)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being written. All ranks call it. Raises CheckpointError on all where it failed."""
        if not self._busy:
            return
        # The other ranks hear now and then that rank 0 still writes: a large model takes longer than a collective may.
        while self._communicator.broadcast_object(self._is_writing()):
            pass
        self._busy, error, self._error = False, self._error, None
        raise_on_all_ranks(self._communicator, error)

    def when_written(self, call: Callable[[], None]) -> None:
        """Call `call` once this process writes nothing: now, or in a thread after an exception in training. Any rank
        may call it."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            call()
            return

        def wait() -> None:
            thread.join()
            call()

        threading.Thread(target=wait, name="unitrain checkpoint end", daemon=True).start()

    def _begin(self, target: Path, state: tuple[dict[str, Any], dict[str, Any]], about: dict[str, Any]) -> None:
        self._thread = None
        if self._asynchronous:
            try:
                # Before training goes on: what is refused or converted afterwards could have changed by then.
                state = host_copy((state[0], plain_state(state[1])))
            except CheckpointError as error:
                self._error = error  # raised by `wait`, on every rank
                return
        # No daemon: a program that ends now still finishes what it has begun to write.
        self._thread = threading.Thread(target=self._write, args=(target, *state, about), name="unitrain checkpoint")
        self._thread.start()
        _writing[self._folder.resolve()] = self._thread

    def _is_writing(self) -> bool:
        return _runs(self._thread)

    def _write(self, target: Path, model: dict[str, Any], training: dict[str, Any], about: dict[str, Any]) -> None:
        try:
            files.write(target, model, training, about)
            self._retention.apply(target)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # whatever it is, the other ranks would wait for ever if it were lost in a thread
            self._error = CheckpointError(f"Cannot write checkpoint '{target}': {error}. {WRITABLE}")
            self._error.__cause__ = error

"""The state of a backend in its process: in use, inside `on_rank_zero`, or shut down."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from typing_extensions import Self

from unitrain.errors import CollectiveMismatchError, ConfigError, Preempted
from unitrain.monitoring.stack_inspection import call_site


class Lifecycle(ABC):
    """Methods that every backend inherits: the context manager, `on_rank_zero`, and checks of the backend's state."""

    rank: int
    _is_shut_down = False
    _exit_functions: tuple[Callable[[], object], ...] = ()

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the group. The backend cannot be used afterwards."""

    @contextmanager
    def on_rank_zero(self) -> Iterator[bool]:
        """Yield whether this is rank 0. Use it for code that only one rank executes, such as writing a file.

            with backend.on_rank_zero() as is_rank_zero:
                if is_rank_zero:
                    write_file()

        The other ranks do not wait for the block, so a collective inside the block would hang. Collectives therefore
        raise CollectiveMismatchError there immediately, for every number of ranks. Any rank may enter the block. It
        does not affect other threads.
        """
        depths, thread = self._rank_zero_depths, threading.get_ident()
        depths[thread] = depths.get(thread, 0) + 1
        try:
            yield self.rank == 0
        finally:
            depths[thread] -= 1
            if not depths[thread]:
                del depths[thread]

    @property
    def _rank_zero_depths(self) -> dict[int, int]:
        """The number of nested `on_rank_zero` blocks by thread, for the threads that are inside such a block."""
        depths: dict[int, int] = vars(self).setdefault("_depths_by_thread", {})
        return depths

    @property
    def _is_on_rank_zero(self) -> bool:
        """Whether the calling thread is inside `on_rank_zero`."""
        depths = self._rank_zero_depths
        return bool(depths) and threading.get_ident() in depths

    def check_collective_allowed(self, operation: str) -> None:
        """Raise CollectiveMismatchError inside `on_rank_zero` and ConfigError after `shutdown`. Every collective calls
        this first."""
        self.check_running(operation)
        if self._is_on_rank_zero:
            raise CollectiveMismatchError(
                f"{operation} was called inside on_rank_zero, at {call_site(sys._getframe())}, where the other ranks "
                "do not call it. Move it out of the block, and let every rank call it."
            )

    def check_running(self, operation: str) -> None:
        """Raise ConfigError after `shutdown`."""
        if self._is_shut_down:
            raise ConfigError(
                f"{operation} was called after the backend was shut down. Call it inside the block "
                "`with unitrain.init() as backend:`, or start another backend: backend = unitrain.init()"
            )

    def report_failure(self, error: BaseException) -> None:  # noqa: B027 (backends of one process have no other rank)
        """Report `error` of this rank to the other ranks, which then terminate within seconds. Any rank may call it."""

    def call_before_exit(self, function: Callable[[], object]) -> None:
        """Register `function` to be called at the end of the `with` block, before the shutdown, unless the block raises
        an exception other than SystemExit(0)."""
        self._exit_functions = (*self._exit_functions, function)

    def _call_exit_functions(self) -> None:
        for function in self._exit_functions:
            function()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if is_successful_exit(error):
            try:
                self._call_exit_functions()
            except BaseException as failure:
                self.report_failure(failure)
                raise
        if error is None or is_successful_exit(error) or isinstance(error, Preempted):
            self.shutdown()
        else:
            # A shutdown would close connections, and the launcher would report the wrong rank as failed.
            self.report_failure(error)


def is_successful_exit(error: BaseException | None) -> bool:
    """Return whether a `with` block has succeeded: `error`, the exception that it raised, is None or SystemExit with
    code 0 or None."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))

"""Functions that take turns, so that one runs at a time, and that exchange values at common points."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from unitrain.errors import CollectiveMismatchError

ResultT = TypeVar("ResultT")


class Turns(Generic[ResultT]):
    """Runs several functions in turns: exactly one function runs at a time, until it calls `exchange` or returns.

    The last function runs in the calling thread. Each other function runs in its own thread, which has the same context
    variables, default device, autocast settings, number of intra-op threads and CUDA stream, and ends before `run`
    returns. Other thread-local settings of torch, such as the grad mode, have their defaults in new threads. A single
    function needs no threads.

    `combine` is called in the calling thread, when every function has called `exchange`, with the passed values in the
    order of the functions. `switch` is called in the calling thread with the index of a function before this function
    starts or continues.
    """

    def __init__(
        self, combine: Callable[[list[Any]], Any], switch: Callable[[int], None], device: torch.device
    ) -> None:
        self._combine, self._switch, self._device = combine, switch, device
        self._condition = threading.Condition()
        self._threads: list[_Thread[ResultT]] = []
        self._calling_index = 0  # the index of the function in the calling thread
        self._current_index = 0  # the index of the function whose turn it is
        self._values: list[Any] = []
        self._combined_value: Any = None
        self._is_cancelled = False

    def run(self, functions: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """Run `functions` in turns, and return their results.

        If a function raises an exception, the other functions are cancelled, and the exception is raised. If the
        functions do not call `exchange` equally often, CollectiveMismatchError is raised.
        """
        settings = _ThreadSettings.of_this_thread(self._device)
        self._threads = [_Thread(self, index, function, settings) for index, function in enumerate(functions[:-1])]
        self._calling_index = self._current_index = len(self._threads)
        self._values, self._is_cancelled = [None] * len(functions), False
        try:
            for thread in self._threads:
                thread.start()
            with settings.applied(is_new_thread=False):
                self._run_threads()
                result = functions[-1]()
            self.check_others_have_ended()
            return [*(thread.result for thread in self._threads), result]
        except BaseException as error:
            failure = next((thread.error for thread in self._threads if thread.error is not None), error)
        finally:
            self._end_threads()
        try:
            raise failure  # outside of the handler, so that the exception keeps its own context
        finally:
            del failure

    def exchange(self, value: Any) -> Any:
        """Pass `value`, wait until the other functions have passed theirs, and return the result of `combine`."""
        index = self._current_index  # only the function whose turn it is can call this method
        self._raise_if_cancelled()
        self._values[index] = value
        if index == self._calling_index:
            if any(thread.has_ended for thread in self._threads):
                raise layer_mismatch_error()
            self._combined_value = self._combine(self._values)
            self._run_threads()
        else:
            self._pass_turn(self._calling_index)
            self.await_turn(index)
            self._raise_if_cancelled()
        return self._combined_value

    def check_others_have_ended(self) -> None:
        """Raise CollectiveMismatchError unless all functions but the last have ended. The last function calls it."""
        if not all(thread.has_ended for thread in self._threads):
            raise layer_mismatch_error()

    def await_turn(self, index: int) -> None:
        """Wait until it is the turn of function `index`."""
        with self._condition:
            self._condition.wait_for(lambda: self._current_index == index)

    def end_thread(self, thread: _Thread[ResultT]) -> None:
        """Record that the function of `thread` has ended, and continue the calling thread."""
        thread.has_ended = True
        self._pass_turn(self._calling_index)

    @property
    def is_cancelled(self) -> bool:
        """Whether functions that have not ended must end, because another one has raised an exception."""
        return self._is_cancelled

    def _run_threads(self) -> None:
        """Let each thread run until it exchanges a value or ends. Raises _CancelledError if a function fails."""
        for index, thread in enumerate(self._threads):
            self._switch(index)
            self._pass_turn(index)
            self.await_turn(self._calling_index)
            if thread.error is not None:
                raise _CancelledError
        self._switch(self._calling_index)

    def _end_threads(self) -> None:
        """Cancel the functions of all threads that have not ended, and wait for the threads."""
        self._is_cancelled = True
        for index, thread in enumerate(self._threads):
            if thread.ident is None:  # it could not be started
                continue
            self.await_turn(self._calling_index)  # after a KeyboardInterrupt, a thread may still run
            if not thread.has_ended:
                self._pass_turn(index)
                self.await_turn(self._calling_index)
            thread.join()
        self._threads, self._values, self._combined_value = [], [], None

    def _pass_turn(self, index: int) -> None:
        with self._condition:
            self._current_index = index
            self._condition.notify_all()

    def _raise_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise _CancelledError


class _Thread(threading.Thread, Generic[ResultT]):
    """Runs one function of `turns`."""

    def __init__(
        self, turns: Turns[ResultT], index: int, function: Callable[[], ResultT], settings: _ThreadSettings
    ) -> None:
        super().__init__(name=f"unitrain-turn-{index}", daemon=True)
        self._turns, self._index, self._function, self._settings = turns, index, function, settings
        self._context = copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_ended = False

    def run(self) -> None:
        self._turns.await_turn(self._index)
        try:
            if not self._turns.is_cancelled:
                with self._settings.applied(is_new_thread=True):
                    self.result = self._context.run(self._function)
        except _CancelledError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._turns.end_thread(self)


@dataclass(frozen=True)
class _ThreadSettings:
    """The thread-local settings of torch that new threads copy from the calling thread."""

    device: torch.device
    default_device: torch.device
    autocast: dict[str, tuple[bool, torch.dtype]]  # by device type
    num_threads: int
    stream: Any

    @classmethod
    def of_this_thread(cls, device: torch.device) -> _ThreadSettings:
        """Return the settings of the calling thread. `device` is the device of the functions."""
        return cls(
            device=device,
            default_device=torch.get_default_device(),
            autocast={
                device_type: (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
                for device_type in sorted({"cpu", device.type})
            },
            num_threads=torch.get_num_threads(),
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
        )

    @contextmanager
    def applied(self, *, is_new_thread: bool) -> Iterator[None]:
        """Context manager that applies the settings to the current thread. Inside it, each backward pass runs in its
        calling thread, and autocast does not cache converted weights."""
        # In a new thread, OpenMP would use its default number of threads.
        torch.set_num_threads(self.num_threads)
        with ExitStack() as stack:
            if is_new_thread and self.default_device.type != "cpu":
                stack.enter_context(self.default_device)
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            # All threads share the cache of converted weights, so each function would use and clear cache entries of
            # the other functions.
            for device_type, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False))
            # Without this setting, all backward passes would share one thread per GPU, which the first `exchange` would
            # block.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


class _CancelledError(BaseException):
    """Raised in a function because another function has raised an exception. It is not a subclass of Exception, so that
    `except Exception` in a function does not catch it."""


def layer_mismatch_error() -> CollectiveMismatchError:
    """Return the error for functions that call `exchange` in different layers."""
    return CollectiveMismatchError(
        "The logical ranks of this process call different synchronized BatchNorm layers, or call them in different "
        "orders. Let every logical rank call the same layers in the same order, or leave sync_batch_norm out."
    )

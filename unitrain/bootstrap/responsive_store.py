"""Requests to a torch.distributed store, with a time limit.

torch's TCPStore has no time limit for responses. If the process that serves it is stopped (SIGSTOP, a frozen container)
or its host loses the network connection, a request blocks forever, and cannot be interrupted.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from unitrain.threads import start_thread
from unitrain.torch_compat import open_connection

_ResultT = TypeVar("_ResultT")
_Requests = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class StoreNotRespondingError(dist.DistNetworkError):
    """The process that serves the store is stopped, or its host is unreachable."""


class ResponsiveStore:
    """A connection to a store. A request raises StoreNotRespondingError if there is no response within
    `timeout_seconds`.

    A daemon thread sends the requests, one at a time. After a request has exceeded the limit, further requests also
    raise the error until its late response arrives. `get` must only be called for existing keys, because torch's `get`
    waits for a missing key.
    """

    def __init__(self, store: dist.Store, timeout_seconds: float) -> None:
        self._store, self._timeout_seconds = store, timeout_seconds
        self._requests: _Requests = queue.SimpleQueue()
        self._mutex = threading.Lock()  # one request at a time
        self._timed_out_request: Future[Any] | None = None  # the latest request that exceeded the limit
        start_thread(_process_requests, self._requests, name="unitrain store", restarts=True)
        weakref.finalize(self, self._requests.put, None).atexit = False  # ends the thread

    @property
    def is_responding(self) -> bool:
        """Whether the latest request was answered in time, or its late response has arrived."""
        return self._timed_out_request is None or self._timed_out_request.done()

    def set(self, key: str, value: str) -> None:
        """See torch.distributed.Store."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store."""
        return self._call(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """See torch.distributed.Store."""
        return self._call(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See torch.distributed.Store."""
        return self._call(lambda: self._store.compare_set(key, expected, desired))

    def append(self, key: str, value: str) -> None:
        """See torch.distributed.Store."""
        self._call(lambda: self._store.append(key, value))  # type: ignore[attr-defined]  # missing in torch's stubs

    def add(self, key: str, amount: int) -> int:
        """See torch.distributed.Store."""
        return self._call(lambda: self._store.add(key, amount))

    def open_connection(self) -> dist.Store:
        """See unitrain.torch_compat."""
        return self._call(lambda: open_connection(self._store))

    def _call(self, request: Callable[[], _ResultT]) -> _ResultT:
        with self._mutex:
            if not self.is_responding:
                raise _not_responding_error(self._timeout_seconds)
            result: Future[_ResultT] = Future()
            self._requests.put((request, result))
            try:
                return _wait_for_result(result, self._timeout_seconds)
            except StoreNotRespondingError:
                self._timed_out_request = result
                raise


def call_with_limit(function: Callable[[], _ResultT], timeout_seconds: float) -> _ResultT:
    """Return `function()`, which uses a store. Raises StoreNotRespondingError if it does not return within
    `timeout_seconds`; the call then remains blocked in another thread.
    """
    result: Future[_ResultT] = Future()
    start_thread(_complete_future, result, function, name="unitrain store")
    return _wait_for_result(result, timeout_seconds)


def _process_requests(requests: _Requests) -> None:
    while (request := requests.get()) is not None:
        function, result = request
        _complete_future(result, function)
        del request, function, result


def _complete_future(result: Future[_ResultT], function: Callable[[], _ResultT]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)


def _wait_for_result(result: Future[_ResultT], timeout_seconds: float) -> _ResultT:
    try:
        return result.result(timeout_seconds)
    except TimeoutError:
        if result.done():  # the request itself raised a TimeoutError, or was completed in the meantime
            return result.result()
        raise _not_responding_error(timeout_seconds) from None


def _not_responding_error(timeout_seconds: float) -> StoreNotRespondingError:
    return StoreNotRespondingError(
        f"The rendezvous store has not responded for {timeout_seconds:g} s: the process of rank 0 is stopped, or its "
        "host is unreachable."
    )

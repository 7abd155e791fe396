"""Background threads report unexpected exceptions, and loops continue after them."""

from __future__ import annotations

import socket
import threading
import time
from typing import NoReturn

import pytest

from unitrain import threads
from unitrain.backends.message_exchange import MessageExchange
from unitrain.bootstrap.network import limit_wait
from unitrain.monitoring.deadlines import Deadlines
from unitrain.threads import start_thread, surviving_errors


def fail(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize("error", [ValueError("damaged message"), SystemExit(3), KeyboardInterrupt()])
def test_unexpected_exception_is_reported_with_the_name_of_the_thread(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_reported", set())
    start_thread(fail, error, name="unitrain test").join(30)
    output = capsys.readouterr().err
    assert "unitrain: unexpected error in the thread 'unitrain test':" in output
    assert type(error).__name__ in output
    assert "in fail" in output


def test_loop_is_called_again_after_an_exception(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_RESTART_SECONDS", 0.01)
    monkeypatch.setattr(threads, "_reported", set())
    calls = []

    def run() -> None:
        calls.append(time.monotonic())
        if len(calls) < 5:
            fail(OSError("the service does not respond"))

    start_thread(run, name="unitrain loop", restarts=True).join(30)
    assert len(calls) == 5
    assert capsys.readouterr().err.count("OSError: the service does not respond") == 1  # reported once


def test_exception_without_text_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_reported", set())

    class BrokenError(Exception):
        def __str__(self) -> str:
            raise ValueError

    with surviving_errors():
        raise BrokenError
    assert "BrokenError" in capsys.readouterr().err


def test_work_whose_state_raises_an_exception_counts_as_unfinished() -> None:
    now = [0.0]
    deadlines = Deadlines(10.0, lambda: now[0])
    broken = deadlines.add(lambda: fail(RuntimeError("CUDA error: operation not permitted")), lambda: "backward #0")
    deadlines.add(lambda: False, lambda: "backward #1")
    assert deadlines.find_expired() is None
    now[0] = 11.0
    assert deadlines.find_expired() is broken


@pytest.mark.parametrize("seconds", [300.0, 30 * 24 * 3600.0, 365 * 24 * 3600.0])
def test_timeouts_of_up_to_a_year_are_accepted_by_functions_of_the_system(seconds: float) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname(), timeout=limit_wait(seconds)) as connection:
        accepted, _ = server.accept()
        left, right = (
            MessageExchange(rank, {1 - rank: end}, seconds, 0.0) for rank, end in enumerate((connection, accepted))
        )
        thread = threading.Timer(0.1, right.allgather, (b"b",))
        thread.start()
        assert left.allgather(b"a") == b"ab"
        thread.join(30)
        left.close()
        right.close()

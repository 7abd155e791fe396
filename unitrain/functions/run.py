"""`unitrain.run`: start ranks on this machine, call a function on each of them, and return their results."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from unitrain import launchers, validation
from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import new_key
from unitrain.errors import ConfigError, RankFailedError
from unitrain.functions.call import CallOutcome, FunctionCall
from unitrain.output import stdout
from unitrain.processes import kill_processes, parent_death_signal_setter
from unitrain.threads import start_thread

_MARKER_VARIABLE = "UNITRAIN_RUN"
# Values of `environment.detect().launcher` that do not prove that this process is a rank: the environment variables of
# these launchers may also be set in a shell or a container.
_AMBIGUOUS_LAUNCHERS = ("none", "env", "srun")
_MAX_LAST_LINES = 20
# The time that launchers give the ranks to save a checkpoint and exit.
_GRACE_SECONDS = 35.0
_POLL_SECONDS = 1.0


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    devices: int | str | Sequence[int] | None = None,
    backend: str | None = None,
    launcher: str | None = None,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `np` ranks of this machine and return the results in rank order.

    `devices` selects the GPUs, with one rank per GPU, as in `unitrain launch --devices`: a number of GPUs, -1 for all
    GPUs, a list of indices, or a string such as "1,3". On a machine without GPUs, a number is the number of ranks. 0
    selects the CPU; then `np` is the number of ranks. Either `np` or `devices` is required.

    The backend's default launcher (or `launcher`) starts the ranks as new processes, as in `unitrain launch`.
    `function` uses `unitrain.init()` and `Trainer` as in a script. It may be defined in a notebook, or in `__main__`
    without an `if __name__ == "__main__"` guard. The function, its arguments, all referenced objects and the results
    are transferred by pickling. The output of the ranks is printed line by line.

    Raises RankFailedError if a rank fails. The error contains the traceback of the first failed rank, and its
    `__cause__` is the exception of this rank. If no rank raised an exception, the error contains the last lines of
    output. Raises TimeoutError after `timeout_seconds`, ConfigError for invalid arguments, and FunctionError for a
    function or arguments that cannot be pickled; a result that cannot be pickled is a failure of its rank. The ranks
    and their child processes are terminated when the call returns or is interrupted.
    """
    rank_info = environment.detect()
    if rank_info.launcher not in _AMBIGUOUS_LAUNCHERS:
        raise ConfigError(
            f"unitrain.run starts ranks, but {rank_info.launcher} has already started this process as a rank "
            f"({', '.join(rank_info.evidence)}). Call the function directly, or start the program with python."
        )
    function_fix = "Pass the function and its arguments separately: unitrain.run(train, (0.1,), np=2)"
    validation.check_instance("unitrain.run(function)", function, cast("type", Callable), "a function", function_fix)
    is_text = isinstance(args, str | bytes)  # otherwise each character would be an argument
    validation.check_instance(
        "unitrain.run(args)", None if is_text else args, Sequence, "a tuple or list", function_fix
    )
    fix = "Use kwargs={'learning_rate': 0.1}"
    validation.check_instance("unitrain.run(kwargs)", kwargs, Mapping, "a dictionary", fix, optional=True)
    validation.check_integer("unitrain.run(np=...)", np, 1, "Use np=2 for two ranks", optional=True)
    validation.check_text("unitrain.run(backend=...)", backend, "Use backend='ddp', or leave it out", optional=True)
    validation.check_text(
        "unitrain.run(launcher=...)", launcher, "Use launcher='torchrun', or leave it out", optional=True
    )
    fix = "Use None to wait without a limit"
    validation.check_positive("unitrain.run(timeout_seconds=...)", timeout_seconds, fix, optional=True)
    np, variables = _select_devices(np, devices, launcher)
    backend = backend or environment.get_variable("UNITRAIN_BACKEND") or ("ddp" if np > 1 else "local")
    registry.check_backend_name(backend)
    with tempfile.TemporaryDirectory(prefix="unitrain-run-") as name:
        folder = Path(name)
        FunctionCall(function, tuple(args), dict(kwargs or {})).write(folder)
        if launcher == "srun":
            _check_one_host()
        try:
            script = str(Path(__file__).with_name("rank.py"))
            variables[_MARKER_VARIABLE] = secrets.token_hex(8)
            command = launchers.build_local(launcher, script, np, backend, args=(name,), environment=variables)
        except launchers.LaunchError as error:
            raise ConfigError(str(error)) from error
        code, last_lines = _run_command(command, timeout_seconds)
        outcomes = CallOutcome.load_all(folder, np)
    _check_all_returned(outcomes, np, code, last_lines)
    return [outcomes[rank].result for rank in range(np)]


def _select_devices(
    np: int | None, devices: int | str | Sequence[int] | None, launcher: str | None
) -> tuple[int, dict[str, str]]:
    """Return the number of ranks, and the environment variables that select their GPUs. Raises ConfigError for invalid
    devices, and if neither `np` nor `devices` is set."""
    if devices is None:
        if np is None:
            raise ConfigError(
                "unitrain.run starts np ranks, but neither np nor devices is set. Use np=2 for two ranks, or "
                "devices=-1 for one rank per GPU."
            )
        return np, {}
    try:
        parsed = launchers.parse_devices(devices, from_python=True)
        this_host = (launchers.Host("localhost", sys.maxsize),)  # the user does not limit the ranks per host
        selected = launchers.select_devices(parsed, launcher or "", np, this_host)
    except launchers.LaunchError as error:
        raise ConfigError(str(error)) from error
    return selected.num_processes or 1, dict(selected.variables)


def _run_command(command: launchers.Command, timeout_seconds: float | None) -> tuple[int, list[str]]:
    """Run `command` and print its output. Return its exit code and last lines of output. Raises TimeoutError."""
    process = subprocess.Popen(
        command.argv,
        env=environment.without_launcher_variables()
        | dict(command.environment)
        | {environment.JOB_KEY_VARIABLE: new_key()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=parent_death_signal_setter(signal.SIGTERM),
    )
    marker = f"{_MARKER_VARIABLE}={command.environment[_MARKER_VARIABLE]}".encode()
    read_event, timeout_event, killed_event = threading.Event(), threading.Event(), threading.Event()

    def wait_and_kill_ranks() -> None:
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            timeout_event.set()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        else:
            if process.returncode < 0:  # the launcher was killed: the ranks save a checkpoint and exit
                read_event.wait(_GRACE_SECONDS)
        finally:
            try:
                kill_processes(process, marker)
            finally:
                killed_event.set()

    start_thread(wait_and_kill_ranks, name="unitrain.run")
    last_lines: deque[str] = deque(maxlen=_MAX_LAST_LINES)
    output = process.stdout
    assert output is not None
    try:
        for line in _read_lines(output.fileno(), killed_event):
            text = line.decode(errors="replace")
            last_lines.append(text)
            stdout.write(text)
            stdout.flush()
        code = _wait(process, killed_event)
    except KeyboardInterrupt:
        # As on Ctrl-C in a terminal, the ranks may save a checkpoint.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_SECONDS)
        raise
    finally:
        read_event.set()
        kill_processes(process, marker)
        output.close()
    if timeout_event.is_set():
        raise TimeoutError(
            f"The ranks did not return within {timeout_seconds:g} s and were killed. "
            "Raise the limit with timeout_seconds."
        )
    return code, list(last_lines)


def _wait(process: subprocess.Popen[bytes], killed_event: threading.Event) -> int:
    """Wait for `process` and return its exit code, or -SIGKILL if it does not terminate after `killed_event` is set."""
    while True:
        were_killed = killed_event.is_set()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        if were_killed:
            return -signal.SIGKILL


def _read_lines(descriptor: int, killed_event: threading.Event) -> Iterator[bytes]:
    """Yield the lines of an output pipe until it is closed or, after `killed_event` is set, until it is empty.

    Child processes that changed their environment are not killed, and may keep the pipe open.
    """
    incomplete_line = b""
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        while True:
            were_killed = killed_event.is_set()
            if ready.select(0.1):
                received = os.read(descriptor, 1 << 16)
                if not received:
                    break
                *lines, incomplete_line = (incomplete_line + received).split(b"\n")
                yield from (line + b"\n" for line in lines)
            elif were_killed:
                break
    if incomplete_line:
        yield incomplete_line


def _check_one_host() -> None:
    """Raise ConfigError if srun would start ranks on other hosts, which cannot read the stored call."""
    hosts = launchers.allocated_hosts("srun")
    if len(hosts) > 1:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(
            f"unitrain.run starts ranks on this machine only, but srun starts them on {names}. "
            "Leave launcher='srun' out, or write a script and start it with: unitrain launch --launcher srun train.py"
        )


def _check_all_returned(outcomes: Mapping[int, CallOutcome], size: int, code: int, last_lines: Sequence[str]) -> None:
    """Raise RankFailedError unless every rank returned a result."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    if failed:
        rank = min(failed, key=lambda rank: failed[rank].time)
        text = f"Rank {rank} of {size} failed first:\n\n{failed[rank].traceback}"
        raise RankFailedError(text, rank) from failed[rank].error
    missing_ranks = [rank for rank in range(size) if rank not in outcomes]
    if missing_ranks or code != 0:
        event = (
            f"Ranks {missing_ranks} of {size} ended without a result"
            if missing_ranks
            else "A rank failed after the function had returned"
        )
        raise RankFailedError(
            f"{event}. The launcher ended with exit code {code}. Last lines:\n\n{''.join(last_lines)}"
        )

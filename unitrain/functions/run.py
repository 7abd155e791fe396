"""`unitrain.run`: a function on several ranks of this machine, from a notebook or a script."""

from __future__ import annotations

import contextlib
import ctypes
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
from unitrain.functions.call import Call, Outcome
from unitrain.processes import kill_processes

_MARK = "UNITRAIN_RUN"
# Of what `environment.detect` names, what does not say that this process is one of several: a shell, a container.
_START_NO_RANKS = ("none", "env", "srun")
_LAST_LINES = 20
# As long as a launcher gives its ranks to save and end.
_GRACE_SECONDS = 35.0
_PR_SET_PDEATHSIG = 1


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    backend: str | None = None,
    launcher: str | None = None,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `np` ranks of this machine and return their results in rank order.

    The ranks are processes of their own, started by the backend's usual launcher (or `launcher`) as `unitrain launch`
    starts a script: inside of `function`, `unitrain.init()` and `Trainer` are what they are there. It may be defined in
    a notebook or in the program itself, and needs no `if __name__ == "__main__"`; what it refers to is copied to the
    ranks, and results are copied back. What the ranks print appears here, line by line.

    Raises RankFailedError with the traceback of the rank that failed first, whose exception is the cause;
    TimeoutError after `timeout_seconds`; FunctionError for what cannot be copied. No process outlives the call, also
    where it is interrupted: processes that ranks have started and left behind are ended with the ranks.
    """
    rank_info = environment.detect()
    if rank_info.launcher not in _START_NO_RANKS:
        raise ConfigError(
            f"unitrain.run starts ranks itself, but {rank_info.launcher} has started this process already "
            f"({', '.join(rank_info.evidence)}). Call the function as it is, or start the program with python."
        )
    function_fix = "Pass the function and its arguments apart: unitrain.run(train, (0.1,), np=2)"
    validation.instance("unitrain.run(function)", function, cast("type", Callable), "a function", function_fix)
    is_text = isinstance(args, str | bytes)  # would be taken apart into characters
    validation.instance("unitrain.run(args)", None if is_text else args, Sequence, "a tuple or list", function_fix)
    fix = "Use kwargs={'learning_rate': 0.1}"
    validation.instance("unitrain.run(kwargs)", kwargs, Mapping, "a dictionary", fix, optional=True)
    validation.whole_number("unitrain.run(np=...)", np, 1, "Use np=2 for two ranks")
    validation.text("unitrain.run(backend=...)", backend, "Use backend='ddp', or leave it out", optional=True)
    validation.text("unitrain.run(launcher=...)", launcher, "Use launcher='torchrun', or leave it out", optional=True)
    fix = "Use None to wait without a limit"
    validation.positive("unitrain.run(timeout_seconds=...)", timeout_seconds, fix, optional=True)
    backend = backend or environment.setting("UNITRAIN_BACKEND") or ("ddp" if np > 1 else "local")
    registry.check_known(backend)
    with tempfile.TemporaryDirectory(prefix="unitrain-run-") as name:
        folder = Path(name)
        Call(function, tuple(args), dict(kwargs or {})).write(folder)
        launcher = launcher or launchers.DEFAULT_LAUNCHERS.get(backend, "torchrun")
        if launcher == "srun":
            _check_one_host()
        try:
            command = launchers.build(
                launcher,
                launchers.LaunchSpec(
                    script=str(Path(__file__).with_name("rank.py")),
                    args=(name,),
                    num_processes=np,
                    # Named, because launchers would otherwise take the hosts of a Slurm allocation.
                    hosts=() if launcher == "srun" else (launchers.Host("localhost", np),),
                    backend=backend,
                    environment={_MARK: secrets.token_hex(8)},
                ),
            )
        except launchers.LaunchError as error:
            raise ConfigError(str(error)) from error
        code, last_lines = _follow(command, timeout_seconds)
        outcomes = Outcome.load_all(folder, np)
    _check(outcomes, np, code, last_lines)
    return [outcomes[rank].result for rank in range(np)]


def _follow(command: launchers.Command, timeout_seconds: float | None) -> tuple[int, list[str]]:
    """Run `command`, show what it prints, and return its exit code and its last lines."""
    process = subprocess.Popen(
        command.argv,
        env=environment.without_launcher_variables() | dict(command.environment) | {environment.JOB_KEY: new_key()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent(),
    )
    tag = f"{_MARK}={command.environment[_MARK]}".encode()
    done, late, over = threading.Event(), threading.Event(), threading.Event()

    def limit() -> None:
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            late.set()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        else:
            if process.returncode < 0:  # then the ranks of a launcher that was killed save and end by themselves
                done.wait(_GRACE_SECONDS)
        kill_processes(process, tag)
        over.set()

    threading.Thread(target=limit, name="unitrain.run", daemon=True).start()
    last_lines: deque[str] = deque(maxlen=_LAST_LINES)
    output = process.stdout
    assert output is not None
    try:
        for line in _lines(output.fileno(), over):
            text = line.decode(errors="replace")
            last_lines.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
        code = process.wait()
    except KeyboardInterrupt:
        # As after a Ctrl-C in a terminal: the ranks may save what they have.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_SECONDS)
        raise
    finally:
        done.set()
        kill_processes(process, tag)
        output.close()
    if late.is_set():
        raise TimeoutError(
            f"The ranks were not done after {timeout_seconds:g} s, and were ended. Allow more with timeout_seconds."
        )
    return code, list(last_lines)


def _lines(output: int, over: threading.Event) -> Iterator[bytes]:
    """Yield the lines that are read from `output` until it is closed, or nothing more is there once `over` is set.

    A process that a rank has left behind, with an environment of its own, may keep it open for ever.
    """
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(output, selectors.EVENT_READ)
        while True:
            ended = over.is_set()
            if ready.select(0.1):
                received = os.read(output, 1 << 16)
                if not received:
                    break
                *lines, rest = (rest + received).split(b"\n")
                yield from (line + b"\n" for line in lines)
            elif ended:
                break
    if rest:
        yield rest


def _check_one_host() -> None:
    """Raise ConfigError if srun would start ranks on other hosts, which have no copy of the function."""
    hosts = launchers.allocated_hosts("srun")
    if len(hosts) > 1:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(
            f"unitrain.run starts ranks on this machine only, but srun starts them on {names}. "
            "Leave launcher='srun' out, or write a script and start it with: unitrain launch --launcher srun train.py"
        )


def _end_with_parent() -> Callable[[], Any] | None:
    """Return what lets a new process hear of the end of this one, also where a notebook's kernel is killed."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork nothing may be imported
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _check(outcomes: Mapping[int, Outcome], size: int, code: int, last_lines: Sequence[str]) -> None:
    """Raise RankFailedError unless every rank has returned."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    if failed:
        rank = min(failed, key=lambda one: failed[one].time)
        raise RankFailedError(f"Rank {rank} of {size} failed first:\n\n{failed[rank].trace}", rank) from failed[
            rank
        ].error
    missing = [rank for rank in range(size) if rank not in outcomes]
    if missing or code != 0:
        who = f"Ranks {missing} of {size} ended without a word" if missing else "A rank failed after it had returned"
        shown = "".join(last_lines)
        raise RankFailedError(f"{who}, and the launcher with exit code {code}. Its last lines:\n\n{shown}")

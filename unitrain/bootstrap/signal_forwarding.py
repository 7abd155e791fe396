"""Forwarding of a scheduler's warning signals, and of SIGHUP, from a launcher to its ranks on this host.

Schedulers send SIGUSR1 or SIGUSR2 some time before they terminate a job, for example Slurm with `--signal=USR1@120`. By
default, these signals terminate torchrun and horovodrun, and thus the ranks, before a checkpoint can be saved. A
launcher that calls `forward_warning_signals` forwards the signals to its ranks and continues to wait for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def forward_warning_signals(variable: str) -> None:
    """Forward SIGUSR1 and SIGUSR2 from this process to its ranks on this host.

    A rank is a descendant with the environment variable `variable` whose parent lacks this variable. If this host has
    no ranks, a message on stderr reports the signal instead. Processes started by this process have the default actions
    for both signals. Only the main thread may call this function.
    """

    def forward(signum: int, frame: FrameType | None) -> None:
        ranks = list(_find_descendants_with_variable(os.getpid(), f"{variable}=".encode()))
        if not ranks:
            text = f"unitrain: {signal.Signals(signum).name} was not forwarded: no rank runs on this host\n"
            with contextlib.suppress(OSError):  # the reader of the output has exited
                os.write(2, text.encode())  # unbuffered, because the signal may interrupt a write to sys.stderr
        for rank in ranks:
            with contextlib.suppress(OSError):  # the rank has just exited
                os.kill(rank, signum)

    for signum in WARNING_SIGNALS:
        signal.signal(signum, forward)


def terminate_on_hangup() -> None:
    """Make SIGHUP, which reports that the terminal was closed, have the effect of SIGTERM: ranks save a checkpoint.

    An ignored SIGHUP stays ignored, as under nohup. Only the main thread may call this function.
    """
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def install_no_op_warning_handlers() -> None:
    """Install no-op handlers for SIGUSR1 and SIGUSR2 in an intermediate process between a launcher and a rank.

    Slurm sends these signals to every process of a job step. Unlike ignored signals, handled signals are reset to their
    default actions in programs that this process starts.
    """
    for signum in WARNING_SIGNALS:
        signal.signal(signum, lambda *_: None)


@contextlib.contextmanager
def ignore_warning_signals() -> Iterator[None]:
    """Ignore SIGUSR1 and SIGUSR2 in this context, and in processes that are started in it.

    Only the main thread may use it.
    """
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in WARNING_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _find_descendants_with_variable(pid: int, prefix: bytes) -> Iterator[int]:
    """Yield the nearest descendants of process `pid` that have an environment variable with `prefix`."""
    children = _children_by_parent()
    to_visit = [pid]
    while to_visit:
        for child in children.get(to_visit.pop(), []):
            try:
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except PermissionError:  # a process of another user, such as a setuid program, whose child may be a rank
                variables = []
            except OSError:  # the process has just exited
                continue
            if any(variable.startswith(prefix) for variable in variables):
                yield child
            else:
                to_visit.append(child)


def _children_by_parent() -> dict[int, list[int]]:
    """Return the child processes of each process on this machine; empty if the system has no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    return children

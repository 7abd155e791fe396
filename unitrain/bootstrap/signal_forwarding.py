"""Forwarding of a scheduler's warning from a launcher to the ranks that it has started on this host.

Schedulers warn a job with SIGUSR1 or SIGUSR2 some time before they end it, as Slurm does with `--signal=USR1@120`.
These signals end torchrun and horovodrun, and with them the ranks before they have written a checkpoint. A launcher
that calls `forward_warnings` sends the signal to its ranks and waits for them as before.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
# The exit code of a rank that was warned and has saved: EX_TEMPFAIL of sysexits.h, as `errors.Preempted` has it.
PREEMPTED = 75


def forward_warnings(variable: str) -> None:
    """Forward SIGUSR1 and SIGUSR2 from this process to its ranks on this host from now on.

    A rank is a descendant that has the environment variable named `variable`, while its own parent has not. Only the
    main thread may call it. A process that this one starts has the default actions of both signals. If there is no
    rank, as on a host that only starts ranks on others, the handler prints that.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        ranks = list(_with_variable(os.getpid(), f"{variable}=".encode()))
        if not ranks:  # a buffered stream may be in use at this moment
            os.write(2, f"unitrain: {signal.Signals(number).name} reaches no rank: none runs on this host\n".encode())
        for rank in ranks:
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(rank, number)

    for number in WARNINGS:
        signal.signal(number, forward)


def survive_warnings() -> None:
    """Let SIGUSR1 and SIGUSR2 have no effect on this process, which stands between a launcher and a rank.

    Slurm sends them to every process of a job step. Unlike ignored signals, these keep their default actions in a
    program that this process starts.
    """
    for number in WARNINGS:
        signal.signal(number, lambda *_: None)


@contextlib.contextmanager
def warnings_ignored() -> Iterator[None]:
    """Ignore SIGUSR1 and SIGUSR2 inside the context, and in the processes that are started there. The main thread
    calls it."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in WARNINGS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _with_variable(process: int, prefix: bytes) -> Iterator[int]:
    """Yield the nearest descendants of `process` with a variable that begins with `prefix` in their environment."""
    children = _children()
    waiting = [process]
    while waiting:
        for child in children.get(waiting.pop(), []):
            with contextlib.suppress(OSError):  # it has just ended
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                if any(one.startswith(prefix) for one in variables):
                    yield child
                else:
                    waiting.append(child)


def _children() -> dict[int, list[int]]:
    """Return the children of each process of this machine that has any; none if there is no /proc."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(folder.name))
    return found

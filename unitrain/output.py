"""Output that reports on a job and never ends it: guarded standard streams, messages on standard error, and loggers.

The reader of a pipe may exit, a disk may be full, a terminal may be closed, and a program may replace or close its
streams. The processes that run a job (the ranks, `unitrain launch`, torchrun and horovodrun) therefore call
`guard_standard_streams`, so that no `print`, warning or log message raises an error.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

# In Python 3.10, the class does not accept a type argument at run time.
if TYPE_CHECKING:
    from rich.console import Console

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

_COPY_BYTES = 2**16


class GuardedStream:
    """Stream that writes to the current result of `get_stream`, and discards what this stream cannot write.

    Characters that the encoding does not contain are written as escape sequences. All other attributes are those of the
    stream. TypeError, for bytes instead of text, is raised, because it is an error of the caller.
    """

    def __init__(self, get_stream: Callable[[], Any]) -> None:
        self._get_stream = get_stream

    def write(self, text: Any) -> int:
        """Write the text, or discard it. Return its length."""
        stream = self._get_stream()
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError as error:
                stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except TypeError:
            raise
        except Exception:  # OSError, or any error of a stream that the program has installed
            pass
        return len(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write the lines, or discard them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream if it can be flushed."""
        with suppress(Exception):
            self._get_stream().flush()

    @property
    def buffer(self) -> GuardedStream:
        """The binary stream under a text stream."""
        return guard_stream(self._get_stream().buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get_stream(), name)

    def __iter__(self) -> Any:
        return iter(self._get_stream())


def guard_stream(stream: Any) -> GuardedStream:
    """Return a guarded stream that writes to `stream`."""
    return GuardedStream(lambda: stream)


# Standard error and standard output at the time of a call, even if the program has replaced the stream.
stderr = GuardedStream(lambda: sys.stderr)
stdout = GuardedStream(lambda: sys.stdout)


def guard_standard_streams() -> None:
    """Replace sys.stdout and sys.stderr by guarded streams until this process exits, and open closed descriptors.

    They stay guarded until the exit because Python exits with code 120 if it cannot flush them. A closed standard
    descriptor is connected to the null device: otherwise, the next file or socket would receive its number, and
    libraries would write their messages into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # receives the lowest free number
    sys.stdout, sys.stderr = _guard(sys.stdout, 1), _guard(sys.stderr, 2)


def _guard(stream: Any, descriptor: int) -> Any:
    if isinstance(stream, GuardedStream):
        return stream
    if stream is None or stream.closed:  # Python sets the stream of a closed descriptor to None
        stream = open(descriptor, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    return guard_stream(stream)


def protect_programs_from_broken_pipes() -> None:
    """Redirect standard output and standard error, if they are pipes, to a new process that copies them to these pipes.

    Call it before this process starts or becomes a program that does not survive the end of the reader, such as mpirun.
    The new process discards what it cannot write. It exits when the last process closes the output, and ignores the
    signals that terminate a job. Only a process with a single thread may call this function.
    """
    targets: dict[int, int] = {}  # by the reading end of the new pipe
    writers: dict[tuple[int, int], int] = {}  # by the identity of the pipe, which both streams may share
    for descriptor in (1, 2):
        status = os.fstat(descriptor)
        if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
            continue
        identity = (status.st_dev, status.st_ino)
        if identity not in writers:
            reader, writers[identity] = os.pipe()
            targets[reader] = os.dup(descriptor)
        os.dup2(writers[identity], descriptor)
    for writer in writers.values():
        os.close(writer)
    if targets and (child := os.fork()) == 0:
        if os.fork() == 0:  # a grandchild, because the launcher might wait for its children
            for descriptor in (1, 2):
                os.dup2(next(iter(targets.values())), descriptor)
            _copy(targets)
        os._exit(0)
    elif targets:
        os.waitpid(child, 0)
    for descriptor in (*targets, *targets.values()):
        os.close(descriptor)


def _copy(targets: dict[int, int]) -> None:
    """Copy all data from each key of `targets` to its value, both descriptors, until the ends of the data."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    while targets:
        for reader in select.select(list(targets), [], [])[0]:
            content = os.read(reader, _COPY_BYTES)
            with suppress(OSError):
                os.write(targets[reader], content)
            if not content:
                del targets[reader]


def plain_console(**options: Any) -> Console:
    """Return a rich console that prints text as given. Names of metrics and messages may contain brackets and colons,
    which rich interprets as markup and emoji by default. Use `rich.text.Text` or `style` for styled text."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


def replace_unprintable(text: str) -> str:
    """Return `text`, such as a file name that is not UTF-8, with escape sequences for characters that UTF-8 lacks."""
    return text.encode("utf-8", "backslashreplace").decode()


def print_to_stderr(lines: Sequence[str]) -> None:
    """Print `lines`, if there are any, to standard error, also in a process without guarded streams."""
    if lines:
        stderr.write("\n".join(lines) + "\n")
        stderr.flush()


class ReportLogger(_Adapter):
    """Logger whose messages never raise an error, even if a handler that the program has installed does.

    SystemExit is included, because rich raises it if the reader of a pipe has exited.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, like `logging.Logger.log`."""
        with suppress(Exception, SystemExit):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})


def get_logger(name: str) -> ReportLogger:
    """Return the logger of the module `name`."""
    return ReportLogger(logging.getLogger(name), {})

"""Small files at predictable paths, where another user or program may have created a FIFO, a device or a link."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


def read_regular_file(path: Path, max_bytes: int) -> str:
    """Return the text of file `path`. Raises OSError if it is a FIFO or a device (which could block), a folder, or
    larger than `max_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"'{path}' is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"'{path}' is larger than {max_bytes} bytes")
        return file.read(status.st_size).decode()  # not max_bytes, because `read` allocates as many bytes as requested


def replace_file(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Atomically replace file `path` with a file that contains `text`. If `path` is a link, the link is replaced, and
    its target does not change. Raises OSError.

    If the write fails or is interrupted, the previous file remains. With `is_durable`, the file is also complete after
    a power loss.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with suppress(FileNotFoundError):
            new.unlink()  # left by a killed process, or a link to another file
        with new.open("x", encoding="utf-8") as file:
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
        if is_durable:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise

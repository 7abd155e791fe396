"""Output that cannot be written is discarded, and never raises an error."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from rich.console import Console
from rich.logging import RichHandler
from torch import nn
from torch.utils.data import TensorDataset

from unitrain import output
from unitrain.backends.local import LocalBackend
from unitrain.config import TrainConfig
from unitrain.trainer import Trainer


class FailingStream(io.StringIO):
    """Stream of a program that raises `error` in every call."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


def broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def full_disk() -> io.TextIOWrapper:
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "create",
    [
        broken_pipe,
        closed_stream,
        full_disk,
        lambda: FailingStream(OSError("the connection was lost")),
        lambda: FailingStream(RuntimeError("reentrant call")),
        lambda: None,
    ],
    ids=["broken pipe", "closed", "full disk", "OSError", "RuntimeError", "None"],
)
def test_text_is_discarded_if_the_stream_is_unusable(create: Callable[[], object]) -> None:
    stream = create()
    guarded = output.GuardedStream(lambda: stream)
    print("text", file=guarded, flush=True)  # type: ignore[call-overload]
    guarded.writelines(["a\n", "b\n"])
    if isinstance(stream, io.TextIOWrapper):
        guarded.buffer.write(b"bytes\n")
        guarded.buffer.flush()
        with contextlib.suppress(OSError):
            stream.close()


def test_characters_outside_the_encoding_are_escaped() -> None:
    file = io.BytesIO()
    stream = io.TextIOWrapper(file, encoding="ascii", write_through=True)
    output.GuardedStream(lambda: stream).write("loss → \udcff\n")
    assert file.getvalue() == b"loss \\u2192 \\udcff\n"


def test_bytes_in_a_text_stream_are_an_error() -> None:
    with pytest.raises(TypeError):
        output.GuardedStream(lambda: io.StringIO()).write(b"bytes")


def test_attributes_are_those_of_the_stream() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert output.GuardedStream(lambda: stream).encoding == "latin-1"
    with pytest.raises(AttributeError):
        _ = output.GuardedStream(lambda: stream).missing


def raise_in_handler(error: BaseException) -> logging.Handler:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise error

    return Failing()


@pytest.mark.parametrize("name", ["handler of the program", "rich"])
def test_log_message_does_not_raise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.dup2", lambda *_: None)  # rich redirects standard output of this process
    pipe = broken_pipe()
    handler = (
        RichHandler(console=Console(file=pipe))  # rich raises SystemExit
        if name == "rich"
        else raise_in_handler(OSError("the log server does not respond"))
    )
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        output.get_logger("unitrain.test").warning("%s message", "one")
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):
            pipe.close()


def test_log_message_names_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    output.get_logger("unitrain.test").warning("%d of %d", 1, 2)
    (record,) = caplog.records
    assert (record.name, record.funcName, record.message) == (
        "unitrain.test",
        "test_log_message_names_its_caller",
        "1 of 2",
    )


@pytest.mark.parametrize("style", ["auto", "lines", "bar"])
@pytest.mark.parametrize("create", [broken_pipe, full_disk, closed_stream, lambda: FailingStream(OSError())])
def test_training_continues_if_standard_error_is_unusable(
    style: Any, create: Callable[[], TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = create()
    monkeypatch.setattr(sys, "stderr", stream)
    model = nn.Linear(2, 1)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.MSELoss(),
        backend=LocalBackend(torch.device("cpu")),
        config=TrainConfig(max_epochs=2, batch_size=4, progress=style),
        metrics={"[/bold] → $x_{": lambda output, target: (output - target).mean()},
    )
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    trainer.fit(data, data)
    assert trainer.progress.step == 4
    with contextlib.suppress(OSError):
        stream.close()


PRINTING = """
import logging, os, sys, warnings
from unitrain import output

output.guard_standard_streams()
if sys.argv[1:]:
    output.protect_programs_from_broken_pipes()
for number in range(20_000):
    print("standard output", number)
    print("standard error", number, file=sys.stderr)
sys.stdout.buffer.write(b"\\xff\\n")
warnings.warn("a warning")
logging.getLogger("program").warning("a message")
sys.stdout.flush()
os.write(1, b"the last line\\n") if sys.argv[1:] else None
assert os.open("/dev/null", os.O_RDONLY) > 2  # no file receives the number of a standard stream
open(os.environ["RESULT"], "w").write("finished")
"""


PIPES = ["2>&1 | head -1", "2>/dev/null | head -1"]


@pytest.mark.parametrize(
    ("redirection", "arguments"),
    [(text, "") for text in (*PIPES, ">/dev/full 2>&1", ">&- 2>&-", "<&- >&- 2>&-")]
    + [(text, "with-copy") for text in PIPES],
)
def test_program_continues_and_succeeds(redirection: str, arguments: str, tmp_path: Path) -> None:
    script = f'{sys.executable} -c "$PROGRAM" {arguments} {redirection}; exit ${{PIPESTATUS[0]}}'
    result = tmp_path / "result"
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PROGRAM": PRINTING, "RESULT": str(result)}, timeout=60, check=False
    )
    assert done.returncode == 0
    assert result.read_text() == "finished"


def test_copy_of_the_output_is_complete() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTING, "with-copy"],
        env=os.environ | {"RESULT": os.devnull},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-3:] == [b"standard output 19999", b"\xff", b"the last line"]
    assert len(done.stderr.splitlines()) > 20_000

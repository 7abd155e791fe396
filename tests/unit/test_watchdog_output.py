"""The watchdog terminates the process even if its report cannot be printed."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from unitrain import output
from unitrain.monitoring import watchdog


@pytest.mark.parametrize("stderr_state", ["none", "closed", "broken pipe"])
def test_report_is_discarded_if_stderr_is_unusable(stderr_state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.fdopen(writer, "w")
    if stderr_state != "broken pipe":
        stderr.close()
    monkeypatch.setattr(sys, "stderr", None if stderr_state == "none" else stderr)
    output.print_to_stderr(["unitrain: rank 1 failed first"])
    monkeypatch.undo()
    with contextlib.suppress(BrokenPipeError):
        stderr.close()


def test_error_without_text_is_described_by_its_class() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert watchdog._first_line(UnprintableError()) == "UnprintableError"

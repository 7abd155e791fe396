"""Fake cluster programs for tests of the commands that unitrain builds."""

from __future__ import annotations

from pathlib import Path


def write_program(folder: Path, name: str, lines: str) -> None:
    """Write an executable shell script with the given lines to `folder`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)

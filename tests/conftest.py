"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hosts import Host, hosts


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Undo changes of the environment: commands that run in the test process export variables for their launcher."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts of the test's own (`hosts.py`), and an end to all that runs there when the test does.

    A test that asks for them is marked with `parts.needs_hosts`.
    """
    with hosts(2, tmp_path_factory.mktemp("hosts")) as both:
        yield both

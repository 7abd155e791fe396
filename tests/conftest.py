"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, hosts

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder; the contract suite is in `unitrain.testing`."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else "contract")


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

    A test that asks for them is marked with `requirements.needs_hosts`.
    """
    with hosts(2, tmp_path_factory.mktemp("hosts")) as both:
        yield both

"""The program and the settings on the page about low-communication training are valid on each backend."""

from __future__ import annotations

import os
from typing import Any

import pytest
from preload import preloaded
from test_docs import PYTHON_BLOCKS

import unitrain

BLOCKS = [block.text for block in PYTHON_BLOCKS if block.place.startswith("docs/guides/low_communication.md:")]
PROGRAMS = [text for text in BLOCKS if "unitrain.run(" in text]


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_program_trains_with_equal_results_on_all_ranks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PROGRAMS) == 1
    for name, value in preloaded(os.environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UNITRAIN_BACKEND", backend)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PROGRAMS[0], names)  # the program asserts that the loss decreases
    assert names["first"] == names["second"]


def test_settings_of_the_page_are_valid() -> None:
    for text in BLOCKS:
        if text not in PROGRAMS:
            exec(text, {"unitrain": unitrain})

"""The measured figures in README.md and docs/ are those of the result files."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from test_docs import PAGES, ROOT

# Not through sys.path: modules of benchmarks/ have the names of modules of tests/support.
_spec: Any = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
figures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(figures)

# A ratio of a measurement, such as "1.28 (`ddp`) and 1.27 (`horovod`) times as long".
RATIO = re.compile(r"\d\.\d+( \(`?\w+`?\))?( \[[\d.]+(, | to )[\d.]+\])? times (as (fast|long)|that |the )")
WITHOUT_RESULT_FILE = {
    "docs/guides/data_resume.md": ["1.00 times the "],  # `benchmarks/data_resume.py` prints its result
    "docs/guides/low_communication.md": ["1.3 times as long"],  # advice
    # Measured on a GPU with torch 2.11; computed from the algorithm.
    "docs/benchmarks.md": ["0.929 [0.927 to 0.941] times that ", "1.5 times the "],
}


def test_measured_figures_in_pages_are_those_of_the_result_files() -> None:
    outdated = [path.name for path, old, new in figures.updated_pages() if old != new]
    assert not outdated, "Run `python benchmarks/figures.py`, and check the sentences around the figures."


def test_an_outdated_figure_is_replaced() -> None:
    text = "before 84% to\n95.1% of the steps after"
    assert figures.replaced(text, "{}% to {}% of", ["86", "95"]) == "before 86% to\n95% of the steps after"
    with pytest.raises(LookupError, match="of the runs"):
        figures.replaced(text, "{}% of the runs", ["1"])


def test_every_measured_ratio_is_computed_from_a_result_file() -> None:
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for _, template, values in (entry for entry in figures.FIGURES if entry[0] == name):
            text = figures.replaced(text, template, ["FIGURE"] * len(values()))
        found = [match[0] for match in RATIO.finditer(" ".join(text.split()))]
        assert found == WITHOUT_RESULT_FILE.get(name, []), name

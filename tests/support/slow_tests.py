"""Reads `tests/slow_tests.txt`, which moves tests from `make test` to CI or to `make test-all`, and checks it.

    python -m pytest --junit-xml results.xml ...
    python -m tests.support.slow_tests results.xml

The second command lists the slow tests in the results that are not in the file, and the lines that match no test. Use
the results of `make test` to find tests to add, and the results of `make test-all` to find lines to remove.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
TIERS = ("ci", "nightly")
SLOW_SECONDS = 5.0


def read() -> dict[str, tuple[str, ...]]:
    """Return the prefixes of the test IDs of each tier, relative to `tests/`."""
    lines = (TESTS / "slow_tests.txt").read_text().splitlines()
    entries = [line.split(maxsplit=1) for line in lines if not line.startswith("#")]
    return {tier: tuple(test for marker, test in entries if marker == tier) for tier in TIERS}


def main() -> None:
    """Compare the file with the durations in the JUnit files that pytest wrote."""
    listed = [test for tests in read().values() for test in tests]
    seconds: dict[str, float] = {}
    for path in sys.argv[1:]:
        for case in ElementTree.parse(path).iter("testcase"):
            name = case.get("classname", "").removeprefix("tests.").replace(".", "/")
            seconds[f"{name}.py::{case.get('name')}"] = float(case.get("time", 0))
    for test in sorted(seconds, key=lambda test: -seconds[test]):
        if seconds[test] >= SLOW_SECONDS and not test.startswith(tuple(listed)):
            print(f"not listed: {seconds[test]:.0f} s {test}")
    for prefix in listed:
        if not any(test.startswith(prefix) for test in seconds):
            print(f"matches no test: {prefix}")


if __name__ == "__main__":
    main()

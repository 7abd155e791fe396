"""Repeats a few failed tests once, as CI does.

    python -m pytest ... || python -m tests.support.repeat_failed $? LIMIT

On a busy machine, a test of several processes can fail randomly. If pytest has run all tests and at most LIMIT tests
failed, these tests run again, one at a time. The exit code is that of the second run, or of the first run if there is
no second run. The names of tests that passed in the second run are printed, because these tests must be fixed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(exit_code: int, limit: int) -> int:
    """Repeat the tests that failed in the last pytest run in this folder. `exit_code` is the exit code of this run."""
    if exit_code != pytest.ExitCode.TESTS_FAILED:
        return exit_code
    failed = list(json.loads(FAILED.read_text()))
    if len(failed) > limit:
        print(f"More than {limit} tests failed. They are not repeated.")
        return exit_code
    print(f"Repeating the {len(failed)} failed tests, one at a time.", flush=True)
    repeated = pytest.main(["-m", "", *failed])
    if repeated == pytest.ExitCode.OK:
        print("These tests failed, and passed when they were repeated. Correct them or the code that they test:")
        print(*failed, sep="\n")
    return int(repeated)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

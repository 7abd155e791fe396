"""CI repeats a limited number of failed tests once, and fails if a test fails again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A test that fails in its first `failures` runs. It counts its runs in a file.
PROGRAM = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("failures", {failures}, ids=lambda failures: f"{{failures}}")
def test_fails(failures, request):
    path = Path(request.node.name)
    runs = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(runs))
    assert runs > failures
"""


def run_and_repeat(folder: Path, program: str, limit: int) -> subprocess.CompletedProcess[str]:
    """Run the tests in `program`, and repeat the failed tests if there are at most `limit`."""
    (folder / "test_failing.py").write_text(program)
    python = f"{sys.executable} -m"
    command = f"{python} pytest -q test_failing.py || {python} tests.support.repeat_failed $? {limit}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_tests_that_pass_when_repeated_are_listed(tmp_path: Path) -> None:
    done = run_and_repeat(tmp_path, PROGRAM.format(failures=[0, 1, 0, 1]), limit=2)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("test_failing.py::test_fails[1_0]\ntest_failing.py::test_fails[1_1]\n")
    assert (tmp_path / "test_fails[0_0]").read_text() == "1"


@pytest.mark.parametrize(("failures", "limit", "runs"), [([1, 2], 2, 2), ([1, 1], 1, 1)])
def test_command_fails_if_a_test_fails_again_or_too_many_tests_fail(
    failures: list[int], limit: int, runs: int, tmp_path: Path
) -> None:
    done = run_and_repeat(tmp_path, PROGRAM.format(failures=failures), limit)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert {path.read_text() for path in tmp_path.glob("test_fails*")} == {str(runs)}


def test_tests_are_not_repeated_if_the_run_did_not_complete(tmp_path: Path) -> None:
    done = run_and_repeat(tmp_path, "import missing_module", limit=2)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "Repeating" not in done.stdout

"""Run PyTorch's tests with Gloo and with Horovod, and compare the outcomes.

python -m tests.torch_suites                              the suites of the wheel
python -m tests.torch_suites --folder ~/pytorch           also suites that are only in a PyTorch checkout
python -m tests.torch_suites --horovod-folder ~/horovod   also Horovod's own tests
python -m tests.torch_suites --suite wheel --tests all_reduce broadcast

The exit code is 1 if a test passes with Gloo, fails with Horovod, and is not listed in differences.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import horovod_tests
from .differences import find_reason
from .suites import BY_NAME, SUITES, Suite

Outcomes = dict[str, Any]  # {backend: {test: (outcome, detail, seconds)}}
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "support"))  # as in the other tests
TITLES = {"horovod": "Horovod over Gloo", "horovod-mpi": "Horovod over MPI"}


@dataclass
class Comparison:
    """Results of a suite: the numbers of passed tests, unexpected failures and listed failures."""

    suite: Suite
    passed: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[str, str, str]] = field(default_factory=list)  # (backend, test, detail)
    listed: dict[str, str] = field(default_factory=dict)  # {test: reason}
    stale: list[tuple[str, str]] = field(default_factory=list)  # listed tests that pass

    def table_row(self, backends: list[str]) -> str:
        """Return the row of this suite in the Markdown table."""
        cells = [
            self.suite.title,
            str(self.passed["gloo"]),
            *(str(self.passed.get(name, "-")) for name in backends[1:]),
        ]
        return "| " + " | ".join([*cells, str(len(self.listed))]) + " |"


def run_suite(suite: Suite, backends: list[str], folder: Path | None, tests: list[str], logs: Path | None) -> Outcomes:
    """Run a suite in a process that imports the tests once. This process and the ranks of mpirun are forked from a
    process that has imported torch."""
    from preload import preloaded

    command = [sys.executable, "-m", "tests.torch_suites.coordinator", "--suite", suite.name, "--backends", *backends]
    command += [] if folder is None else ["--folder", str(folder)]
    command += [] if logs is None else ["--logs", str(logs)]
    command += ["--tests", *tests] if tests else []
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
        env=preloaded({**os.environ, "OMP_NUM_THREADS": "1"}),
    )
    outcomes: Outcomes = json.loads(finished.stdout)
    return outcomes


def compare(suite: Suite, outcomes: Outcomes) -> Comparison:
    """Compare the outcomes of each backend with those of Gloo."""
    result = Comparison(suite)
    for backend, tests in outcomes.items():
        result.passed[backend] = sum(outcome == "passed" for outcome, _, _ in tests.values())
        if backend == "gloo":
            continue
        for test, (outcome, detail, _) in tests.items():
            reason = find_reason(test, backend)
            if outcome == "passed" and reason is not None:
                result.stale.append((backend, test))
            elif outcome != "passed" and reason is not None:
                result.listed[test] = reason
            elif outcome != "passed":
                result.failed.append((backend, test, detail))
    return result


def write_table(
    path: Path, backends: list[str], comparisons: list[Comparison], folder: Path | None, lines: list[str]
) -> None:
    import torch

    # The version of a development build ends with "a0".
    version = "" if folder is None else (folder / "version.txt").read_text().strip().partition("a")[0]
    source = f" Tests that the torch wheel does not contain are those of PyTorch {version}." if version else ""

    missing = [suite.title for suite in SUITES if suite.name not in {one.suite.name for one in comparisons}]
    titles = [TITLES[backend] for backend in backends[1:]]
    text = [
        "# PyTorch's tests of process groups, with Gloo and with Horovod",
        "",
        f"Written by `make test-torch-suites` on {datetime.date.today()}, with torch {torch.__version__} on CPUs."
        f"{source} "
        "The numbers count the tests that pass. A test that passes with Gloo and fails with Horovod is listed with its "
        "reason.",
        "",
        "| suite | Gloo | " + " | ".join(titles) + " | listed |",
        "|---|---|" + "---|" * len(titles) + "---|",
        *(comparison.table_row(backends) for comparison in comparisons),
    ]
    listed = {test: reason for one in comparisons for test, reason in one.listed.items()}
    if listed:
        text += [
            "",
            "| listed test | reason |",
            "|---|---|",
            *(f"| `{test}` | {why} |" for test, why in listed.items()),
        ]
    text += [
        "",
        "Other test files for checkpoints, communication hooks and functional collectives need GPUs.",
    ]
    text += ["", *lines] if lines else []
    if missing:
        text += ["", "Not run, because the torch wheel does not contain the files: " + ", ".join(missing) + "."]
    path.write_text("\n".join(text) + "\n")


def main() -> int:
    """Run the suites of the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suites", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", nargs="+", choices=list(BY_NAME), help="suites; default: all whose files exist")
    parser.add_argument("--tests", nargs="+", default=[], help="only tests whose names contain one of these words")
    parser.add_argument("--folder", type=Path, help="checkout of PyTorch at the version of the installed torch")
    parser.add_argument("--horovod-folder", type=Path, help="checkout of Horovod, for its own tests")
    parser.add_argument("--no-mpi", action="store_true", help="do not run the suites under mpirun")
    parser.add_argument("--write", type=Path, help="file for the table, in Markdown")
    parser.add_argument("--logs", type=Path, help="folder for the output of the ranks")
    arguments = parser.parse_args()
    backends = ["gloo", "horovod"]
    if not arguments.no_mpi and shutil.which("mpirun"):
        backends.append("horovod-mpi")
    chosen = [BY_NAME[name] for name in arguments.suite] if arguments.suite else SUITES
    comparisons = []
    for suite in chosen:
        if not suite.is_in_wheel and (arguments.folder is None or not (arguments.folder / suite.module).exists()):
            if arguments.suite:
                parser.error(f"suite {suite.name!r} needs --folder with {suite.module}")
            continue
        started = time.monotonic()
        found = compare(suite, run_suite(suite, backends, arguments.folder, arguments.tests, arguments.logs))
        comparisons.append(found)
        print(f"{found.table_row(backends)} {time.monotonic() - started:.0f} s", flush=True)
        for backend, test, detail in found.failed:
            print(f"\nFAILED {suite.name} {backend} {test}\n{detail}", flush=True)
        for backend, test in found.stale:
            print(f"PASSED, although differences.py lists it: {backend} {test}", flush=True)
    lines = []
    if arguments.horovod_folder is not None:
        lines, is_passed = horovod_tests.run(arguments.horovod_folder)
        print("\n".join(lines))
    else:
        is_passed = True
    if arguments.write is not None:
        write_table(arguments.write, backends, comparisons, arguments.folder, lines)
    failed = sum(len(one.failed) for one in comparisons)
    passed = sum(sum(one.passed.values()) for one in comparisons)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not is_passed else 0


if __name__ == "__main__":
    sys.exit(main())

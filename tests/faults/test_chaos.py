"""A short run of benchmarks/chaos with killed runs and damaged checkpoints, and the detection of lost samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos"


@pytest.mark.ci
def test_chaos_run_does_not_lose_or_repeat_samples(tmp_path: Path) -> None:
    command = [sys.executable, CHAOS, "--runs", "5", "--corruptions", "42", "--seed", "3", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "chaos.json").read_text())
    kills = kept["kills"]
    assert (kills["runs"], kills["lost"], kills["repeated"], kills["failures"]) == (5, 0, 0, [])
    assert sum(kills["kills"].values()) >= 5
    assert kills["resumed"] >= 1
    assert kills["difference"] <= 1e-6
    outcomes = kept["corruptions"]
    assert sum(sum(counts.values()) for counts in outcomes.values()) == 42
    assert not any("wrong" in counts for counts in outcomes.values())
    assert outcomes["half a manifest"].get("newest") is None  # the checkpoint must be damaged
    assert (tmp_path / "chaos.md").read_text().strip() in done.stdout


def write_records(folder: Path, attempt: int, start: int, steps: range, *, ranks: int = 2, skipped: int = -1) -> None:
    """Write the records of an attempt with `ranks` ranks that starts at step `start` and trains on samples in order."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        lines = [{"start": start}]
        for step in steps:
            first = (step - 1) % 5 * 12
            samples = [number for number in range(first, min(first + 12, 50)) if number != skipped]
            lines.append({"step": step, "samples": samples[rank::ranks]})
        path = folder / f"{attempt:03d}-{rank}-of-{ranks}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_audit_counts_lost_and_repeated_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHAOS))
    from training import Audit, audit

    def audit_attempts(name: str, second: int, third: int, skipped: int = -1) -> Audit:
        folder = tmp_path / name
        write_records(folder, 0, 0, range(1, 9))
        write_records(folder, 1, second, range(second + 1, 15), ranks=3, skipped=skipped)
        write_records(folder, 2, third, range(third + 1, 21), ranks=1)
        return audit(folder)

    assert audit_attempts("whole", 6, 10) == Audit(lost=0, repeated=0, resumed=2)
    assert audit_attempts("anew", 6, 0) == Audit(lost=0, repeated=0, resumed=1)
    assert audit_attempts("a step without records", 9, 12) == Audit(lost=12, repeated=0, resumed=2)
    assert audit_attempts("a sample", 6, 12, skipped=3) == Audit(lost=1, repeated=0, resumed=2)
    # Simulate a rank that trains on a sample of another rank, for example because of a wrong order after a resume.
    folder = tmp_path / "whole"
    path = folder / "002-0-of-1.jsonl"
    path.write_text(path.read_text().replace('"samples": [0, 1,', '"samples": [0, 0,', 1))
    assert audit(folder) == Audit(lost=1, repeated=1, resumed=2)

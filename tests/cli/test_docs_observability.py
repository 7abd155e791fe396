"""The programs on the pages about observability and slow ranks run and write the documented files."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launches import running_launcher
from prometheus_client.parser import text_string_to_metric_families
from test_docs import program

from unitrain.bootstrap.network import find_free_port
from unitrain.cli import unitrain as command_line

EPOCHS, STEPS_PER_EPOCH = 5, 64  # the program in the documentation trains for 20 epochs


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.ci
def test_program_serves_metrics_and_writes_events(tmp_path: Path) -> None:
    folder, script, port = tmp_path / "runs/first", tmp_path / "train.py", find_free_port()
    text = program("docs/guides/observability.md", "peak_flops").replace('"runs/first"', repr(str(folder)))
    script.write_text(text.replace("max_epochs=20", f"max_epochs={EPOCHS}"))
    command = [
        sys.executable, "-m", "unitrain", "launch", "-np", "2", "--max-restarts", "3", "--metrics-port", str(port),
        str(script),
    ]  # fmt: skip
    metrics: dict[str, float] = {}
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        while launch.process.poll() is None:
            with suppress(OSError):
                metrics = read_metrics(port)
            with suppress(subprocess.TimeoutExpired):
                launch.process.wait(0.1)
        output = launch.output()
    assert launch.process.returncode == 0, output
    assert metrics["unitrain_ranks"] == 2, output
    assert metrics["unitrain_step"] <= EPOCHS * STEPS_PER_EPOCH

    rows = read_lines(folder / "steps.jsonl")
    assert rows[-1]["samples_per_second"] > 0
    assert 0 < rows[-1]["mfu"] < 1
    events = read_lines(folder / "events.jsonl")
    names = [event["event"] for event in events]
    assert (names[0], names[-1], names.count("validation")) == ("start", "end", EPOCHS)
    assert {event["step"] for event in events if event["event"] == "checkpoint"} >= {100, 200, 300}
    shown = CliRunner().invoke(command_line, ["report", "--goodput", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "training" in shown.output
    assert events[-1]["goodput"] > 0

    reader = program("docs/guides/slow_ranks.md", '"slow"')
    done = subprocess.run(
        [sys.executable, "-c", reader], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == sum(len(row.get("slow", [])) for row in rows)

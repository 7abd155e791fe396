"""Long runs of every mode need no additional memory, descriptors, threads, store keys or time per step."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from launches import running_ranks
from soak_training import MODES

PROGRAM = Path(__file__).parents[1] / "support" / "soak_training.py"
# The allocator keeps memory for later use, which grows slightly without a leak. A leak of 1 KB per step exceeds this
# limit in 20,000 steps; in a short run, only a leak of tens of kilobytes per step does.
MAX_GROWTH_MEBIBYTES = 12.0
# Rank 0 alone counts the keys of the store. The background threads create a few keys and connections once, at any time.
COUNTED = ("descriptors", "threads", "store_keys")
MAX_COUNT_GROWTH = 6
CASES = [*MODES, "restart"]


def run(backend: str, modes: list[str], steps: int, seconds: float) -> dict[tuple[int, str], list[dict[str, float]]]:
    """Return the snapshots of each rank and mode."""
    with running_ranks(PROGRAM, backend, 2, ",".join(modes), str(steps)) as processes:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    snapshots = defaultdict(list)
    for rank, output in enumerate(outputs):
        for line in output.splitlines():
            if line.startswith('{"mode"'):
                values = json.loads(line)
                snapshots[rank, values["mode"]].append(values)
    assert len(snapshots) == 2 * len(modes)
    assert {len(found) for found in snapshots.values()} == {4}
    return snapshots


def assert_is_flat(snapshots: list[dict[str, float]]) -> None:
    _, warm, *later = snapshots
    for found in later:
        assert all(found[name] <= warm[name] + MAX_COUNT_GROWTH for name in COUNTED), snapshots
        assert found["rss_mebibytes"] <= warm["rss_mebibytes"] + MAX_GROWTH_MEBIBYTES, snapshots


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_resources_are_constant_in_some_hundred_steps_of_every_mode(backend: str) -> None:
    for snapshots in run(backend, CASES, 240, 300).values():
        assert_is_flat(snapshots)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", CASES)
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_resources_and_step_time_are_constant_in_20000_steps(backend: str, mode: str) -> None:
    for snapshots in run(backend, [mode], 20_000, 3000).values():
        assert_is_flat(snapshots)
        first, *_, last = (found["step_seconds"] for found in snapshots)
        assert last <= 2 * first, snapshots

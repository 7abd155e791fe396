"""A fixed number of jobs with random, overlapping faults (see `tests/chaos/`) and fixed seeds, and tests of the oracle.

UNITRAIN_CHAOS_TRIALS sets the number of nightly trials, and UNITRAIN_CHAOS_FIRST sets the first seed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chaos import oracle, runner, trials
from requirements import needs_hosts

FIRST = int(os.environ.get("UNITRAIN_CHAOS_FIRST", "0"))
COUNT = int(os.environ.get("UNITRAIN_CHAOS_TRIALS", "20"))


@pytest.fixture(scope="module")
def references() -> runner.References:
    return runner.References()


@needs_hosts
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(FIRST, FIRST + COUNT) if seed != 0)],
)
def test_disturbed_job_has_the_results_of_an_undisturbed_job(seed: int, references: runner.References) -> None:
    trial = trials.draw_trial(seed)
    outcome = runner.run_trial(trial, references)
    repeat = f"python -m tests.chaos --trial '{trials.to_json(trial)}'"
    assert outcome.wrong == [], f"{outcome.output}\nseed {seed}; {repeat}"


def test_seeds_cover_all_faults_phases_and_options() -> None:
    drawn = [trials.draw_trial(seed) for seed in range(400)]
    assert drawn == [trials.draw_trial(seed) for seed in range(400)]
    assert [trials.parse_trial(trials.to_json(trial)) for trial in drawn] == drawn
    incidents = [incident for trial in drawn for incident in trial.incidents]
    assert {incident.phase for incident in incidents} == set(trials.PHASES)
    assert {incident.own for incident in incidents} == {"", *trials.OWN_FAULTS}
    kinds = {fault.kind for incident in incidents for fault in incident.faults}
    assert kinds == {*trials.FAULTS, *trials.NETWORK_FAULTS, trials.SLOTS_FAULT}
    starts = {(trial.starts[0].backend, trial.starts[0].launcher, trial.num_hosts) for trial in drawn}
    assert starts >= {("ddp", "torchrun", 1), ("horovod", "horovodrun", 1), ("ddp", "torchrun", 2)}
    options = Counter(option for trial in drawn for option in trial.options)
    assert len(options) == 7
    assert min(options.values()) >= 20, options


def test_trials_that_fill_a_disk_require_a_separate_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    start = trials.Start("ddp", "torchrun", (1,))
    full_disk = trials.Incident("forward", 1, 0, faults=(trials.Fault("full disk", seconds=1.0),))
    killed = trials.Incident("forward", 1, 0, own="kill")
    disk_trial, other_trial = trials.Trial((start,), (killed, full_disk)), trials.Trial((start,), (killed,))
    assert [trial.needs_mount for trial in (disk_trial, other_trial)] == [True, False]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="Run the trial as root"), runner._trial_folder(disk_trial):
        pass
    with runner._trial_folder(other_trial) as folder:
        assert (folder / "disk").is_dir()


def write_samples(folder: Path, attempt: int, start: int, steps: Sequence[int], **changes: Any) -> None:
    """Write the sample records of two ranks that train `steps`. `changes` maps "step_N" to different samples for rank
    1."""
    (folder / "samples").mkdir(exist_ok=True)
    for rank in range(2):
        rows: list[dict[str, Any]] = [{"attempt": attempt, "start": start}]
        for step in steps:
            first = (step - 1) % trials.STEPS_PER_EPOCH * 12 + 6 * rank
            samples = list(range(first, first + 6))
            rows.append({"step": step, "samples": changes.get(f"step_{step}", samples) if rank else samples})
        (folder / "samples" / f"{attempt}-{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_oracle_accepts_repeated_steps_and_reports_lost_and_repeated_samples(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, 0, range(1, 12), step_11=[])  # the first attempt is killed in step 11
    write_samples(tmp_path, 2, 9, range(10, 25))
    assert oracle.check_samples(tmp_path) == []
    write_samples(tmp_path, 2, 9, range(10, 25), step_20=[36, 37, 38, 39, 40, 41])
    assert oracle.check_samples(tmp_path) == [
        "samples: in epoch 3, lost [42, 43, 44, 45, 46, 47], repeated [36, 37, 38, 39, 40, 41]"
    ]
    write_samples(tmp_path, 2, 12, range(13, 25))
    assert oracle.check_samples(tmp_path) == ["samples: attempt 2 starts from step 12, but steps [12] were not trained"]


def test_oracle_reports_different_parameters_and_history(tmp_path: Path) -> None:
    expected = {"states": [{"parameters": "a"}], "history": [{"epoch": 1}]}
    (tmp_path / "result.json").write_text(json.dumps([2, expected]))
    assert oracle.check_result(tmp_path, expected) == []
    (tmp_path / "result.json").write_text(json.dumps([2, {"states": [{"parameters": "b"}], "history": []}]))
    assert [text.partition(":")[0] for text in oracle.check_result(tmp_path, expected)] == ["bits", "history"]

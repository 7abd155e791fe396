"""Command line of the chaos tests.

python -m tests.chaos --trials 100 --first 0   many trials (exit code 1 if any fails)
python -m tests.chaos --seed 123               one trial
python -m tests.chaos --trial '{...}'          one trial as JSON, with its output
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from preload import preloaded

from . import report, runner, trials


def main() -> int:
    """Run the trials of the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Disturb training jobs with random faults."
    )
    selection = parser.add_mutually_exclusive_group(required=True)
    selection.add_argument("--seed", type=int, help="the seed of one trial")
    selection.add_argument("--trial", help="one trial as JSON")
    selection.add_argument("--trials", type=int, help="how many trials to run")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of many trials (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="do not start trials after this time")
    parser.add_argument("--jobs", type=int, default=2, help="trials that run at the same time (default 2)")
    parser.add_argument("--hosts", type=int, choices=[1, 2], help="run only trials on this number of hosts")
    parser.add_argument("--output", type=Path, help="add the outcomes to this JSON lines file, and write a table")
    arguments = parser.parse_args()
    if arguments.trial is not None:
        chosen = [(None, trials.parse_trial(arguments.trial))]
    elif arguments.seed is not None:
        chosen = [(arguments.seed, trials.draw_trial(arguments.seed))]
    else:
        seeds = range(arguments.first, arguments.first + arguments.trials)
        chosen = [(seed, trials.draw_trial(seed)) for seed in seeds]
    chosen = [(seed, trial) for seed, trial in chosen if arguments.hosts in (None, trial.num_hosts)]
    if not runner.can_mount() and (skipped := [seed for seed, trial in chosen if trial.needs_mount]):
        reason = "because trials on two hosts or with a full disk need root and namespaces"
        print(f"{len(skipped)} trials are skipped, {reason}", flush=True)
        chosen = [(seed, trial) for seed, trial in chosen if not trial.needs_mount]
    references, began, lock = runner.References(), time.monotonic(), threading.Lock()
    outcomes: list[runner.Outcome] = []

    def run(seed: int | None, trial: trials.Trial) -> None:
        if time.monotonic() - began > arguments.seconds:
            return
        outcome = runner.run_trial(trial, references)
        with lock:
            outcomes.append(outcome)
            name = "trial" if seed is None else f"seed {seed}"
            faults = ", ".join(fault for fault, _ in outcome.injected) or "no fault"
            result = "FAILED" if outcome.wrong else "passed"
            print(f"{name}: {result} in {outcome.seconds:.0f} s, {outcome.num_starts} starts, {faults}", flush=True)
            if arguments.output is not None:
                report.append(arguments.output, seed, trial, outcome)
            if outcome.wrong or len(chosen) == 1:
                print(outcome.output)
            if outcome.wrong:
                print("\n".join(outcome.wrong))
                print(f"python -m tests.chaos --trial '{trials.to_json(trial)}'", flush=True)

    with tempfile.TemporaryDirectory(prefix="unitrain-chaos-") as temporary:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
        preloaded({})  # start the server of preloaded processes before threads use it
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for future in [pool.submit(run, seed, trial) for seed, trial in chosen]:
                future.result()
        tempfile.tempdir = None
    failed = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"{len(outcomes)} trials in {time.monotonic() - began:.0f} s, {failed} failed")
    if arguments.output is not None:
        report.write_table(arguments.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

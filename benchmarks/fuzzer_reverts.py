"""Show which faults the sequences of calls of the fuzzer find in an older version of unitrain.

    python benchmarks/fuzzer_reverts.py --before ef49b1a0 --sequences 300

Runs the known sequences, and random ones, with the `unitrain` of the commit `--before`, in which none of the fixes is
made. Then it runs the sequences that failed with the current code, and replaces the table in
benchmarks/results/fuzzer_reverts.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fuzzer_reverts.md"
HEADING = "## Sequences of calls"
Outcome = dict[str, Any]  # "name", "case" (JSON) and "found", the failure or an empty text


def run_sequences(names: list[str], seconds: float) -> None:
    """Run known sequences (by name) and random ones (by seed), and print an outcome per line."""
    import torch

    from tests.fuzzer import cases, known, runner, sequences

    torch.set_num_threads(1)
    with runner.pool() as ranks:
        for name in names:
            case = sequences.draw_sequence(int(name)) if name.isdigit() else known.SEQUENCES[name]
            found = "\n".join(runner.find_failures(case, ranks))
            print(json.dumps({"name": name, "case": cases.to_json(case), "found": found}), flush=True)


def run_with(folder: Path, names: list[str], seconds: float) -> list[Outcome]:
    """Return the outcomes with the package in `folder`. Sequences that do not end within `seconds` are left out."""
    variables = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(Path(__file__).resolve()), "--run", json.dumps(names)]
    try:
        text = subprocess.run(
            command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds
        ).stdout
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
    return [json.loads(line) for line in text.decode().splitlines() if line.startswith('{"name"')]


def failing_objects(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the definition of the object whose call failed, or of all objects if a rank died."""
    from tests.fuzzer import cases

    objects = cases.parse_case(outcome["case"])["objects"]
    names = re.findall(r"call \d+, (\w+)\.", outcome["found"])[:1] or list(objects)
    return [objects[name] for name in names]


def is_two_models(own: dict[str, Any], text: str) -> bool:
    in_another_order = own.get("swap") or own.get("compose") == "sandwich"
    is_elementwise = not {"ScheduleFree", "GlobalScale"} & optimizers_of(own)
    return bool(in_another_order) and (is_elementwise or not shards(own)) and len(own["models"]) == 2


def shards(own: dict[str, Any]) -> bool:
    return own["shard"] != "none"


def optimizers_of(own: dict[str, Any]) -> set[str]:
    return set(own.get("optimizers", [own.get("optimizer")]))


def features_of(own: dict[str, Any]) -> set[str]:
    return {feature for features in own.get("models", [own.get("features")]) for feature in features}


FAULTS: dict[str, Callable[[dict[str, Any], str], bool]] = {
    "the gradients of two models are mixed, or the ranks wait forever": is_two_models,
    "a dummy batch of one loader changes the statistics of SyncBatchNorm for another": lambda own, text: (
        "sync_norm" in features_of(own) and len(own.get("loaders", ())) > 1
    ),
    "sharded parameters that share memory": lambda own, text: shards(own) and "alias" in features_of(own),
    "an optimizer with modes is evaluated and saved with the weights of training": lambda own, text: (
        "ScheduleFree" in optimizers_of(own) and not shards(own) and text.startswith(("results", "best", "evaluate"))
    ),
    "an optimizer that is not elementwise is sharded": lambda own, text: (
        shards(own) and bool({"ScheduleFree", "GlobalScale"} & optimizers_of(own))
    ),
    "a schedule has another length after a resume, or with other data": lambda own, text: (
        "another length" in text or "Tried to step" in text
    ),
    "the best checkpoint is lost": lambda own, text: (
        text.startswith("best") and "ScheduleFree" not in optimizers_of(own)
    ),
    "an interrupted validation loses a step of the scheduler": lambda own, text: (
        text.startswith("rates of step") and own.get("scheduler_every") == "epoch"
    ),
    "a sampler with its own generator repeats samples": lambda own, text: own.get("sampler") in ("python", "numpy"),
    "two generators of a sampler draw equal orders": lambda own, text: own.get("sampler") == "twins",
    "changed data is ignored": lambda own, text: text.startswith("samples") and bool(own.get("data_change")),
    "an accuracy is taken for a count": lambda own, text: own.get("loss") == "accuracy",
    "LBFGS with a line search uses the loss of one rank": lambda own, text: "LBFGS" in optimizers_of(own),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="a commit without the fixes")
    parser.add_argument("--sequences", type=int, default=300, help="how many random sequences to run")
    parser.add_argument("--also", type=int, nargs="*", default=[], help="further seeds of random sequences")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of each version")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        run_sequences(json.loads(arguments.run), arguments.seconds)
        return
    sys.path.insert(0, str(ROOT))
    from tests.fuzzer import known

    names = [*known.SEQUENCES, *map(str, [*arguments.also, *range(arguments.sequences)])]
    with tempfile.TemporaryDirectory() as temporary:
        old = Path(temporary)
        archive = subprocess.run(
            ["git", "archive", arguments.before, "unitrain", "launchers"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        subprocess.run(["tar", "--extract", "--directory", temporary], input=archive, check=True)
        (old / "tests").symlink_to(ROOT / "tests")
        before = run_with(old, names, arguments.seconds)
    failed = [outcome for outcome in before if outcome["found"]]
    after = run_with(ROOT, [outcome["name"] for outcome in failed], arguments.seconds)
    write(arguments.before, before, {outcome["name"]: outcome["found"] for outcome in after})


def write(commit: str, before: list[Outcome], after: dict[str, str]) -> None:
    """Replace the section of the sequences in the results."""
    now = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    failed = [outcome for outcome in before if outcome["found"]]
    random_ones = [outcome for outcome in before if outcome["name"].isdigit()]
    lines = [
        HEADING,
        "",
        f"For each row, sequences of calls (`tests/fuzzer/sequences.py`) were run with the code of commit {commit}, in "
        "which none of the faults was fixed, and those that failed were run again with commit "
        f"{now.stdout.strip()}. `benchmarks/fuzzer_reverts.py` wrote this section on {date.today():%-d %B %Y}. "
        f"{sum(bool(one['found']) for one in random_ones)} of the {len(random_ones)} random sequences failed before. A "
        "random sequence may contain several faults; it is listed under the one at which it ended. To repeat one: "
        "`python -m tests.fuzzer --sequence N`.",
        "",
        "| Fault | Known sequences that fail | Random sequences that fail | Failed after the fixes |",
        "|---|---|---|---|",
    ]
    remaining = list(failed)
    for fault, matches in FAULTS.items():
        own = [one for one in remaining if any(matches(part, one["found"]) for part in failing_objects(one))]
        remaining = [outcome for outcome in remaining if outcome not in own]
        seeds = [outcome["name"] for outcome in own if outcome["name"].isdigit()]
        names = [outcome["name"] for outcome in own if not outcome["name"].isdigit()]
        still = [outcome["name"] for outcome in own if after.get(outcome["name"], "not run")]
        shown = ", ".join(seeds[:5]) + (f" and {len(seeds) - 5} more" if len(seeds) > 5 else "")
        lines.append(f"| {fault} | {'; '.join(names) or 'none'} | {shown or 'none'} | {', '.join(still) or 'none'} |")
    names = [outcome["name"] for outcome in remaining]
    lines += ["", f"Sequences that failed in another way before: {', '.join(names) or 'none'}.", ""]
    text = RESULTS.read_text()
    RESULTS.write_text(text.partition(HEADING)[0].rstrip() + "\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main()

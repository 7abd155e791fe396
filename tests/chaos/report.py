"""Writes the outcomes of many trials to a JSON lines file and a Markdown table."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .runner import Outcome
from .trials import PHASES, Trial


def append(path: Path, seed: int | None, trial: Trial, outcome: Outcome) -> None:
    """Append an outcome to the JSON lines file `path`."""
    first = trial.starts[0]
    row = {
        "seed": seed, "backend": first.backend, "launcher": first.launcher, "hosts": trial.num_hosts,
        "options": trial.options, "faults": outcome.injected, "starts": outcome.num_starts,
        "restarts": outcome.num_restarts, "seconds": round(outcome.seconds, 1),
        "wrong": [text.partition(":")[0] for text in outcome.wrong],
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_table(path: Path) -> None:
    """Write a Markdown table of all outcomes in `path` to a file next to `path`. Only the latest outcome of each
    seed counts."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    latest = {row["seed"]: row for row in rows}
    earlier = sorted({row["seed"] for row in rows if row["wrong"] and row is not latest[row["seed"]]})
    lines = format_tables(list(latest.values()))
    if earlier:
        lines[4] += f" The seeds {', '.join(map(str, earlier))} failed in an earlier run."
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def format_tables(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the summary and of the tables."""
    seeds = [row["seed"] for row in rows if row["seed"] is not None]
    wrong = Counter(error for row in rows for error in row["wrong"])
    faults = sum(len(row["faults"]) for row in rows)
    several = sum(len(row["faults"]) > 1 for row in rows)
    seconds = sorted(row["seconds"] for row in rows)
    lines = [
        "# Overlapping faults",
        "",
        f"torch {torch.__version__}, {os.cpu_count()} CPU cores. Seeds {min(seeds)} to {max(seeds)}. Commands: "
        "`python -m tests.chaos --trials 100 --first N --jobs 2` or `--jobs 3`.",
        "",
        f"{len(rows)} trials with {faults} faults; {several} trials had more than one. Jobs were started "
        f"{sum(row['starts'] for row in rows)} times, and `unitrain launch` restarted them "
        f"{sum(row['restarts'] for row in rows)} times. A trial took {seconds[len(seconds) // 2]:.0f} s (median; at "
        f"most {seconds[-1]:.0f} s). **{sum(bool(row['wrong']) for row in rows)} trials failed**"
        + (": " + ", ".join(f"{error} ({count})" for error, count in wrong.items()) if wrong else "")
        + ".",
        "",
        "| backend | launcher | hosts | trials | failed |",
        "|---|---|---|---|---|",
    ]
    places = Counter((row["backend"], row["launcher"], row["hosts"]) for row in rows)
    failed = Counter((row["backend"], row["launcher"], row["hosts"]) for row in rows if row["wrong"])
    lines += [
        f"| {' | '.join(map(str, place))} | {count} | {failed[place]} |" for place, count in sorted(places.items())
    ]
    options = Counter(option for row in rows for option in row["options"])
    lines += ["", "| option | trials |", "|---|---|"]
    lines += [f"| {option} | {count} |" for option, count in sorted(options.items())]
    counts = Counter((fault, phase) for row in rows for fault, phase in row["faults"])
    lines += [
        "",
        "Faults by the phase of the incident that caused them. Because of their delays, many faults start in a later "
        "phase.",
        "",
        f"| fault | {' | '.join(PHASES)} | total |",
        "|---|" + "---|" * (len(PHASES) + 1),
    ]
    for fault in sorted({fault for fault, _ in counts}):
        found = [counts[fault, phase] for phase in PHASES]
        lines.append(f"| {fault} | {' | '.join(map(str, found))} | {sum(found)} |")
    return lines

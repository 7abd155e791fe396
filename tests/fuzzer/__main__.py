"""Command line of the fuzzer.

python -m tests.fuzzer --seed 123              one case, shrunk if it fails
python -m tests.fuzzer --case '{...}'          one case as JSON
python -m tests.fuzzer --known [NAME ...]      the smallest cases of known defects
python -m tests.fuzzer --cases 1000 --first 0  many cases

The exit code is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from . import cases, known, runner


def main() -> int:
    """Run the cases of the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzer", description="Compare random runs with plain torch.")
    selection = parser.add_mutually_exclusive_group(required=True)
    selection.add_argument("--seed", type=int, help="the seed of the case to run")
    selection.add_argument("--case", help="one case as JSON, as printed by a failure")
    selection.add_argument("--known", nargs="*", metavar="NAME", help="known cases; without a name, all of them")
    selection.add_argument("--cases", type=int, help="how many cases to run")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of many cases (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="do not start cases after this time")
    parser.add_argument("--kind", choices=["trainer", "loop", "collective"], help="run only cases of this kind")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="time to simplify a failure; 0: never")
    parser.add_argument("--stop-at-first-failure", action="store_true", help="stop after a failing case")
    arguments = parser.parse_args()
    if arguments.case is not None:
        chosen = [("case", cases.parse_case(arguments.case))]
    elif arguments.known is not None:
        if unknown := [name for name in arguments.known if name not in known.CASES]:
            parser.error(f"no known case is named {unknown[0]!r}")
        chosen = [(name, known.CASES[name]) for name in arguments.known or known.CASES]
    elif arguments.seed is not None:
        chosen = [(f"seed {arguments.seed}", cases.draw_case(arguments.seed))]
    else:
        seeds = range(arguments.first, arguments.first + arguments.cases)
        chosen = [(f"seed {seed}", cases.draw_case(seed)) for seed in seeds]
    chosen = [(name, case) for name, case in chosen if arguments.kind in (None, case["kind"])]
    torch.set_num_threads(1)  # the oracle shares the cores with the ranks
    started, failed, ran = time.monotonic(), 0, 0
    with runner.pool() as ranks:
        for name, case in chosen:
            if time.monotonic() - started > arguments.seconds:
                break
            ran += 1
            if not (found := runner.find_failures(case, ranks)):
                continue
            failed += 1
            print(f"\n{name} FAILED: {found[0]}", flush=True)
            if arguments.shrink_seconds:
                case, found = runner.shrink(case, found, ranks, seconds=arguments.shrink_seconds)
                print("\n".join(found))
            print(f"python -m tests.fuzzer --case '{cases.to_json(case)}'", flush=True)
            if arguments.stop_at_first_failure:
                break
    seconds = time.monotonic() - started
    print(f"{ran} cases in {seconds:.0f} s ({ran / seconds:.1f} per second), {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

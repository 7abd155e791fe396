"""Command line of the fuzzer.

python -m tests.fuzzer --seed 123                              one case, shrunk if it fails
python -m tests.fuzzer --sequence 123                          one sequence of calls
python -m tests.fuzzer --case '{...}'                          one case or sequence as JSON
python -m tests.fuzzer --known [NAME ...]                      the smallest cases of known defects
python -m tests.fuzzer --cases 1000 --sequences 200 --first 0  many cases and sequences

The exit code is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

from . import cases, known, runner, sequences


def main() -> int:
    """Run the cases of the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzer", description="Compare random runs with plain torch.")
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--seed", type=int, help="the seed of the case to run")
    selection.add_argument("--sequence", type=int, help="the seed of the sequence to run")
    selection.add_argument("--case", help="one case as JSON, as printed by a failure")
    selection.add_argument("--known", nargs="*", metavar="NAME", help="known cases; without a name, all of them")
    parser.add_argument("--cases", type=int, default=0, help="how many cases to run")
    parser.add_argument("--sequences", type=int, default=0, help="how many sequences to run")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of many cases (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="do not start cases after this time")
    parser.add_argument(
        "--kind", choices=["trainer", "loop", "collective", "sequence"], help="run only cases of this kind"
    )
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
    elif arguments.sequence is not None:
        chosen = [(f"sequence {arguments.sequence}", sequences.draw_sequence(arguments.sequence))]
    elif not (arguments.cases or arguments.sequences):
        parser.error("nothing to run: use --cases 100 --sequences 20, or --seed, --sequence, --case or --known")
    else:
        first = arguments.first
        chosen = [(f"seed {seed}", cases.draw_case(seed)) for seed in range(first, first + arguments.cases)]
        seeds = range(first, first + arguments.sequences)
        chosen += [(f"sequence {seed}", sequences.draw_sequence(seed)) for seed in seeds]
    chosen = [(name, case) for name, case in chosen if arguments.kind in (None, case["kind"])]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of unused parameters that a run may use later
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
            print(runner.describe(case))
            print(f"python -m tests.fuzzer --case '{cases.to_json(case)}'", flush=True)
            if arguments.stop_at_first_failure:
                break
        for reason, count in sorted(ranks.refusals.items()):
            print(f"refused, as permitted, {count} times: {reason}")
    seconds = time.monotonic() - started
    print(f"{ran} cases in {seconds:.0f} s ({ran / seconds:.1f} per second), {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

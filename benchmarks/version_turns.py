"""A rank of `versions.py`: runs the loops of `loops.py` with unitrain from one checkout, in turns.

For each turn, the program reads a line "LOOP|MODEL|ROUND" from standard input, and writes the seconds per step to
standard output. `PYTHONPATH` selects the checkout. The program uses only the public interface of unitrain, which older
checkouts also have.
"""

from __future__ import annotations

import sys

from loops import pin_to_core, take_turn

import unitrain


def main() -> None:
    """Run the turns until standard input ends."""
    with unitrain.init(sys.argv[1], device="cpu") as backend:
        print(pin_to_core(backend), unitrain.__file__, flush=True)
        for line in sys.stdin:
            loop, model, round_number = line.strip().split("|")
            print(take_turn(backend, loop, model, int(round_number)), flush=True)


if __name__ == "__main__":
    main()

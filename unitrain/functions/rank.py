"""One rank of `unitrain.run`: makes the call that it finds in a folder, and leaves there what became of it.

python rank.py FOLDER, started by a launcher
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

# A script's own folder is where Python looks first. What is looked for here is unitrain, installed or not.
sys.path[0] = str(Path(__file__).parents[2])

from unitrain.bootstrap import environment  # noqa: E402
from unitrain.functions.call import Call, Outcome  # noqa: E402


def main(folder: Path) -> None:
    """Make the call; an exception goes on, so that the other ranks hear of it as in any program."""
    rank = environment.detect().rank
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines, or those of several ranks would mix
            stream.reconfigure(line_buffering=True, write_through=False)
    try:
        call = Call.load(folder)
        Outcome(call.function(*call.args, **call.kwargs)).write(folder, rank)
    except BaseException as error:
        Outcome.of(error).write(folder, rank)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))

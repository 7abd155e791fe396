"""Program that each rank of `unitrain.run` executes: call the function stored in a folder, and store its result there.

A launcher runs `python rank.py FOLDER`.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

# Python prepends the folder of a script to sys.path; this program needs the parent folder of unitrain instead.
sys.path[0] = str(Path(__file__).parents[2])

from unitrain.bootstrap import environment  # noqa: E402
from unitrain.functions.call import CallOutcome, FunctionCall  # noqa: E402


def main(folder: Path) -> None:
    """Call the function and store its result or error. Re-raise the error, so that unitrain reports it to other
    ranks."""
    rank = environment.detect().rank
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # line buffering, because the ranks' outputs are merged by line
            stream.reconfigure(line_buffering=True, write_through=False)
    try:
        call = FunctionCall.load(folder)
        CallOutcome(call.function(*call.args, **call.kwargs)).write(folder, rank)
    except BaseException as error:
        CallOutcome.from_error(error).write(folder, rank)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))

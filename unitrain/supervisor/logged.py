"""What a rank prints, in a file of its own and with its number before each line; stands between launcher and script.

python logged.py FOLDER SCRIPT ARGS..., started by a launcher for each rank
"""

import os
import signal
import sys
from pathlib import Path

# A script's own folder is where Python looks first, and this one has modules of common names.
sys.path[0] = str(Path(__file__).parents[2])

from unitrain.bootstrap import environment  # noqa: E402

# What ends a job goes to all its processes. This one ends with what it reads from.
_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(folder: Path, program: list[str]) -> None:
    """Become `program`, whose output a process beside it reads: so that a signal to this one is the program's."""
    rank_info = environment.detect()
    folder.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        for number in _LEFT_TO_THE_RANK:
            signal.signal(number, signal.SIG_IGN)
        # horovodrun has a number before each line itself.
        prefix = "" if rank_info.launcher == "horovodrun" else f"[{rank_info.rank}] "
        _pass_on(reading, folder / f"rank-{rank_info.rank}.log", prefix.encode())
        os._exit(0)
    os.close(reading)
    for stream in (1, 2):
        os.dup2(writing, stream)
    os.close(writing)
    os.execv(sys.executable, [sys.executable, "-u", *program])


def _pass_on(reading: int, file: Path, prefix: bytes) -> None:
    # Without a buffer: closing the file would write what could not be written once more.
    with os.fdopen(reading, "rb") as lines, file.open("ab", buffering=0) as log:
        writes = True
        for line in lines:
            if writes:
                try:
                    log.write(line)
                except OSError as error:  # a full disk must not end the rank, which would write to a broken pipe
                    writes = False
                    message = f"unitrain: '{file}' ends here: {error.strerror}. What the rank prints is still shown.\n"
                    os.write(2, message.encode())
            os.write(1, prefix + line)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

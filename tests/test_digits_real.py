"""The tutorial as the README starts it: whatever launcher and backend it runs on, it prints the same numbers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from launches import started

BIN = Path(sys.executable).parent
DIGITS = str(Path(__file__).parent.parent / "examples" / "digits.py")
COMMANDS = [
    [str(BIN / "unitrain"), "launch", "-np", "2", DIGITS],
    [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", DIGITS, "--backend", "ddp"],
    [str(BIN / "horovodrun"), "-np", "2", sys.executable, DIGITS, "--backend", "horovod"],
]


def final(command: list[str]) -> str:
    """Return the line in which one rank, and no other, tells the result."""
    with started([*command, "--device", "cpu"], {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    # horovodrun passes on what it has read so far, and its own mark may come before the line's end.
    (line,) = re.findall(r"final val_accuracy=\d\.\d{4} val_loss=\d\.\d{4}(?!\d)", output)
    return str(line)


def test_two_ranks_give_the_same_numbers_on_each_backend() -> None:
    expected, *others = [final(command) for command in COMMANDS]
    assert others == [expected] * len(others)
    assert float(expected.split()[1].removeprefix("val_accuracy=")) >= 0.97

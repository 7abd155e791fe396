"""Program of each rank of `unitrain memory`: record the memory of the user's script.

Usage: python run_script.py FOLDER SCRIPT ARGS...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(folder: Path, script: str, args: list[str]) -> None:
    """Execute `script` with `args` as the main module, and write the record to `folder`."""
    from unitrain.memory.recorder import start_recorder

    sys.argv[:] = [script, *args]
    recorder = start_recorder(folder)
    runpy.run_path(script, run_name="__main__")
    recorder.write()


if __name__ == "__main__":
    # As in `python SCRIPT`, the folder of the script replaces the folder of this file, which Python has prepended.
    sys.path[0] = str(Path(sys.argv[2]).resolve().parent)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""`python -m unitrain` is the `unitrain` command. Launchers also start this file as a script."""

import sys
from pathlib import Path

# Python prepends the folder of a script to sys.path, and this folder contains modules with common names.
if Path(sys.path[0]) == Path(__file__).parent:
    sys.path[0] = str(Path(__file__).parent.parent)

from unitrain.cli import unitrain

unitrain(prog_name="unitrain")

"""`python -m unitrain` is the `unitrain` command; launchers start it as a script."""

import sys
from pathlib import Path

# A script's own folder is where Python looks first, and this one has modules of common names.
if Path(sys.path[0]) == Path(__file__).parent:
    sys.path[0] = str(Path(__file__).parent.parent)

from unitrain.cli import unitrain

unitrain(prog_name="unitrain")

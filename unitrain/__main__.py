"""`python -m unitrain` is the `unitrain` command."""

from unitrain.cli import unitrain

unitrain(prog_name="unitrain")

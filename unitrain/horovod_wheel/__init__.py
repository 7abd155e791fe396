"""Horovod 0.28.1 as a wheel for the torch that is installed: detect, plan, patch, build, cache, check.

`machine` looks at this machine, `plan` turns what it found into plain data, `patches` are the source changes, `build`
runs a plan, and `check` tells what the installed Horovod can do. Nothing here reads the process environment by itself:
every entry point takes it as a mapping.
"""

__all__ = ["build", "check", "machine", "patches", "plan"]

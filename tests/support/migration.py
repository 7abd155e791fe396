"""Converts scripts with `unitrain migrate` for tests."""

from __future__ import annotations

from textwrap import dedent

from unitrain.migrate import Migration, migrate


def convert(source: str) -> str:
    """Return the converted script, which must compile."""
    result = migrate(dedent(source).lstrip())
    assert result.problems == ()
    assert result.source is not None
    compile(result.source, "converted", "exec")
    return result.source


def find_problems(source: str) -> dict[int, str]:
    """Return the rejected names by line."""
    result: Migration = migrate(dedent(source).lstrip())
    assert result.source is None
    return {problem.line: problem.name for problem in result.problems}


def horovod_script(line: str, header: str = "") -> str:
    """Return a script that initializes Horovod and contains `line`."""
    return f"import torch\nimport horovod.torch as hvd\n{header}\nhvd.init()\n{line}\n"


def ddp_script(line: str, header: str = "") -> str:
    """Return a script that initializes torch.distributed and contains `line`."""
    return f"import os\nimport torch\nimport torch.distributed as dist\n{header}\ndist.init_process_group()\n{line}\n"

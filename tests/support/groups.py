"""Backends and sizes on which tests of backend-neutral code run. Other pairs run nightly.

Three ranks on one backend also cover shards of unequal sizes and sums of more than two terms. Tests of gradients run on
each backend. Tests of the order of data run on one backend, because this code calls the same few collectives
everywhere.
"""

from __future__ import annotations

import pytest


def nightly(*values: object) -> list[object]:
    """Return the values as test parameters that only `make test-all` runs."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def ci(*values: object) -> list[object]:
    """Return the values as test parameters that CI and `make test-all` run, but `make test` does not."""
    return [pytest.param(value, marks=pytest.mark.ci) for value in values]


SEVERAL_RANKS = [("ddp", 3), ("horovod", 2), *nightly(("ddp", 2), ("horovod", 3))]
GROUPS = [("local", 1), *SEVERAL_RANKS]
GROUPS_ON_DDP = [("local", 1), ("ddp", 3), *nightly(("ddp", 2), ("horovod", 2), ("horovod", 3))]
GROUPS_ON_HOROVOD = [("local", 1), ("horovod", 2), *nightly(("ddp", 2), ("ddp", 3), ("horovod", 3))]

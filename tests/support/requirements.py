"""Requirements of tests. Tests with a missing requirement are skipped. If UNITRAIN_TEST_ALL is set, as in CI, they
run and fail instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import horovod.torch as hvd
import hosts
import pytest
import slurm


def _needs(present: bool, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not present and not os.environ.get("UNITRAIN_TEST_ALL"), reason=reason)


def needs_package(name: str, extra: str) -> pytest.MarkDecorator:
    """Return a marker for tests that import a package from an extra of unitrain."""
    return _needs(importlib.util.find_spec(name) is not None, f"needs {name}: pip install '.[{extra}]'")


needs_open_mpi = _needs(shutil.which("mpirun") is not None, "needs Open MPI: sudo apt-get install openmpi-bin")
needs_mpi = _needs(
    shutil.which("mpirun") is not None and hvd.mpi_built(),
    "needs Open MPI and a Horovod built with it: "
    "sudo apt-get install openmpi-bin libopenmpi-dev && unitrain horovod build --with-mpi",
)
needs_network_namespaces = _needs(
    os.geteuid() == 0 and all(map(shutil.which, ("unshare", "nsenter", "ip"))) and hosts.can_create_namespaces(),
    "needs root, a kernel that allows namespaces, and: sudo apt-get install util-linux iproute2",
)
needs_hosts = _needs(
    os.geteuid() == 0 and all(map(shutil.which, hosts.PROGRAMS)) and hosts.can_create_namespaces(),
    "needs root, a kernel that allows namespaces, and: sudo apt-get install util-linux iproute2 openssh-server",
)
needs_mounts = _needs(
    os.geteuid() == 0 and hosts.can_create_namespaces(), "needs root and the permission to mount a file system"
)
needs_mpich = _needs(shutil.which("mpiexec.mpich") is not None, "needs MPICH: sudo apt-get install mpich")
needs_slurm = _needs(all(map(shutil.which, slurm.PROGRAMS)), "needs Slurm: sudo apt-get install slurm-wlm munge")

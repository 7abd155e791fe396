"""Horovod as a process group of torch.distributed.

backend            the backend `horovod`
process_group      Horovod's collectives as a torch.distributed process group
signatures         the overloads of a process group's methods, and the checks of their arguments
operations         the start of Horovod's operations: names, pieces and conversions of tensors
work               Horovod operations in flight as `Work` objects, and their completion
tensors            tensors and reductions in the forms that Horovod accepts
sparse             conversion of sparse tensors to rows of bytes, and back
monitored_barrier  torch's barrier that names missing ranks, over the store
mismatches         detection of ranks that wait for different operations
process_sets       process sets of a subset of the ranks, created and removed at run time
point_to_point     messages between two ranks
runtime            starting Horovod under any launcher
horovodrun         program that runs horovodrun without environment variables on command lines

`register_process_group` is for torch.distributed programs without a unitrain backend. Importing this package does not
import Horovod; calling this function does.
"""

from __future__ import annotations


def register_process_group() -> None:
    """Make `torch.distributed.init_process_group("horovod")` available under any launcher. Every rank must call this
    function before `init_process_group`.

    It also sets the variables that torch reads and the launcher has not set: RANK, WORLD_SIZE and LOCAL_RANK, and under
    horovodrun, under mpirun and without a launcher, MASTER_ADDR and MASTER_PORT. Under horovodrun and mpirun, unless
    both of these are set, it starts Horovod to choose the address or the port. Further calls do nothing. Raises
    BackendUnavailableError if Horovod is missing or was built for a different torch version.
    """
    from unitrain.backends import registry

    registry.load("horovod")
    from unitrain.backends.horovod import process_group

    process_group.register_process_group()

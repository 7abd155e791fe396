"""The way to Horovod's process group for those who use nothing else of unitrain; Horovod is imported by the call."""

from __future__ import annotations

from unitrain.backends import registry


def register_process_group() -> None:
    """Make `torch.distributed.init_process_group("horovod")` work, under any launcher. Every rank calls it, before
    that.

    Under horovodrun and mpirun it also starts Horovod and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT, which torch looks for. Calling it again does nothing. Raises BackendUnavailableError when Horovod is
    missing, or was built for another torch.
    """
    registry.load("horovod")
    from unitrain.backends.horovod import process_group

    process_group.register_process_group()

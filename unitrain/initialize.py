"""Choosing a backend and starting it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from unitrain import validation
from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.errors import ConfigError, LauncherMismatchError
from unitrain.monitoring import supervisor_client
from unitrain.processes import end_workers_with_rank

if TYPE_CHECKING:
    import torch

    from unitrain.backends.base import Backend

_LONGEST_SECONDS = 365 * 24 * 3600  # no timeout at all would be a hang that nobody is told of

# What a launcher's users expect when nothing else is said: the backend that the launcher came with.
_IMPLIED = {
    "none": "local",
    "torchrun": "ddp",
    "srun": "ddp",
    "flux": "ddp",
    "kubernetes": "ddp",
    "env": "ddp",
    "horovodrun": "horovod",
    "mpirun": "horovod",
    "mpirun_rsh": "horovod",
    "mpiexec": "horovod",
    "jsrun": "horovod",
}


def init(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    transport: str | None = None,
    timeout_seconds: float = 300.0,
) -> Backend:
    """Join the other ranks that the launcher started and return the backend; use it as a context manager.

    The backend is the argument, else UNITRAIN_BACKEND, else what the launcher implies (torchrun: ddp, horovodrun:
    horovod), else `local`. `transport` is the argument, else UNITRAIN_TRANSPORT; it and `device` are otherwise chosen
    from what the machine has. No wait, here or in any later collective, is longer than `timeout_seconds`. All ranks
    call it, and may do so again once the backend is shut down. Raises UnknownBackendError, BackendUnavailableError,
    LauncherMismatchError, ConfigError for a second backend beside the first, or CollectiveTimeoutError naming the ranks
    that did not come.
    """
    is_number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    if not (is_number and 0 < timeout_seconds <= _LONGEST_SECONDS):
        raise ConfigError(
            f"timeout_seconds must be a number above 0 and at most {_LONGEST_SECONDS} (a year), got "
            f"{validation.describe_value(timeout_seconds)}. Use 300 for five minutes."
        )
    fix = "Use unitrain.init(backend='ddp'), or leave it out"
    validation.check_instance("unitrain.init(backend)", backend, str, "the name of a backend", fix, optional=True)
    fix = "Use unitrain.init(transport='gloo'), or leave it out"
    validation.check_instance(
        "unitrain.init(transport=...)", transport, str, "the name of a transport", fix, optional=True
    )
    rank_info = environment.detect()
    environment.is_debug_enabled()  # raises for an invalid value, also if the script wraps no model
    name = backend or environment.setting("UNITRAIN_BACKEND") or _IMPLIED[rank_info.launcher]
    backend_class = registry.load(name)
    transport = transport or environment.setting("UNITRAIN_TRANSPORT")

    from unitrain.backends.base import StartOptions

    end_workers_with_rank()
    started = backend_class.start(StartOptions(rank_info, device, transport, timedelta(seconds=timeout_seconds)))
    if (started.rank, started.size) != (rank_info.rank, rank_info.size):
        # Otherwise N processes would each train alone and overwrite each other's results, all with exit code 0.
        raise LauncherMismatchError(
            f"{rank_info.source} said rank {rank_info.rank} of {rank_info.size}, but backend {name!r} came up as "
            f"rank {started.rank} of {started.size}. "
            f"Believed was {', '.join(rank_info.evidence) or 'that no launcher has set a variable'}. "
            f"Start it with: unitrain launch --backend {name} -np {rank_info.size} ..."
        )
    supervisor_client.connect(started.rank)
    return started

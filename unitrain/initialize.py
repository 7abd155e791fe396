"""`unitrain.init`: select and start a backend."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unitrain import validation
from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.errors import ConfigError, LauncherMismatchError
from unitrain.monitoring import supervisor_client
from unitrain.output import guard_standard_streams
from unitrain.processes import terminate_workers_with_rank

if TYPE_CHECKING:
    import torch

    from unitrain.backends.base import Backend

_MAX_TIMEOUT_SECONDS = 365 * 24 * 3600  # without a timeout, a hang would never be reported

# The default backend of each launcher, with which it is commonly used.
_BACKEND_OF_LAUNCHER = {
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
    """Join the other ranks that the launcher started, and return the backend. Use it as a context manager.

    Args:
        backend: "ddp", "horovod", "local" or the name of an installed backend. The default is UNITRAIN_BACKEND, or else
            the launcher's backend (torchrun: ddp, horovodrun: horovod), or else "local".
        device: the device of this rank's tensors. The default is this rank's GPU, or the CPU if there is no GPU.
        transport: for example "gloo" or "nccl". The default is UNITRAIN_TRANSPORT, or else the default transport of the
            device.
        timeout_seconds: the timeout of the rendezvous and of every later collective.

    From this call on, a failed write to standard output or standard error is ignored: reporting does not end training.

    All ranks must call this function, and may call it again after `shutdown`. Raises UnknownBackendError,
    BackendUnavailableError, LauncherMismatchError, EnvironmentVariableError, ConfigError for an invalid argument or if
    a backend is already in use, or CollectiveTimeoutError, which names the missing ranks.
    """
    check_timeout(timeout_seconds)
    fix = "Use unitrain.init(backend='ddp'), or leave it out"
    validation.check_instance("unitrain.init(backend)", backend, str, "the name of a backend", fix, optional=True)
    fix = "Use unitrain.init(transport='gloo'), or leave it out"
    validation.check_instance(
        "unitrain.init(transport=...)", transport, str, "the name of a transport", fix, optional=True
    )
    from unitrain.torch_compat import check_torch

    check_torch()
    rank_info = environment.detect()
    # An invalid variable raises an error, even if this program does not use it.
    environment.is_debug_enabled()
    environment.max_polling_seconds(1)
    name = backend or environment.get_variable("UNITRAIN_BACKEND") or _BACKEND_OF_LAUNCHER[rank_info.launcher]
    backend_class = registry.load(name)
    transport = transport or environment.get_variable("UNITRAIN_TRANSPORT")

    from unitrain.backends.base import StartOptions

    guard_standard_streams()
    terminate_workers_with_rank()
    started = backend_class.start(StartOptions(rank_info, device, transport, timedelta(seconds=timeout_seconds)))
    if (started.rank, started.size) != (rank_info.rank, rank_info.size):
        # Otherwise N processes would train separately, overwrite each other's results, and exit with code 0.
        raise LauncherMismatchError(
            f"{rank_info.source} sets rank {rank_info.rank} of {rank_info.size}, but backend {name!r} started as "
            f"rank {started.rank} of {started.size}. "
            f"Detected: {', '.join(rank_info.evidence) or 'no variable of a launcher'}. "
            f"Start the script with: unitrain launch --backend {name} -np {rank_info.size} ..."
        )
    supervisor_client.connect(started.rank)
    return started


def check_timeout(timeout_seconds: Any) -> None:
    """Raise ConfigError unless `timeout_seconds` is a number of seconds above 0 and at most a year."""
    is_number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    if not (is_number and 0 < timeout_seconds <= _MAX_TIMEOUT_SECONDS):
        raise ConfigError(
            f"timeout_seconds must be a number above 0 and at most {_MAX_TIMEOUT_SECONDS} (a year), got "
            f"{validation.describe_value(timeout_seconds)}. Use 300 for five minutes."
        )

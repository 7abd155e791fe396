"""The backend `horovod`: the collectives and distributed models of the ddp backend, on Horovod's process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from unitrain.backends import checks
from unitrain.backends.base import ReduceOp, StartOptions
from unitrain.backends.horovod import tensors as horovod_tensors
from unitrain.backends.horovod.operations import NAMES_PER_SHAPE
from unitrain.backends.horovod.process_group import BACKEND_NAME, register_backend
from unitrain.backends.horovod.runtime import CYCLE_TIME, FUSION_THRESHOLD, connect_ranks_and_horovod
from unitrain.backends.process_group import ProcessGroupBackend, destroying_default_group_on_error
from unitrain.bootstrap import environment
from unitrain.bootstrap.devices import choose_device, gather_and_check_gpus
from unitrain.bootstrap.network import interface_with_address
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import BackendUnavailableError, ConfigError
from unitrain.torch_compat import default_process_group


class HorovodBackend(ProcessGroupBackend):
    """Horovod's collectives over Gloo, MPI or NCCL, depending on how Horovod was built and started.

    After `shutdown`, Horovod keeps running until the process exits, and a later backend reuses it: MPI can be started
    only once per process, and after a restart horovodrun's rendezvous server would still return the addresses of the
    first start.
    """

    name = "horovod"
    _uses_all_to_all = False  # hvd.alltoall of 25 MB takes twice the time of an allreduce
    tunables = (*ProcessGroupBackend.tunables, CYCLE_TIME, FUSION_THRESHOLD)
    num_slow_operations = NAMES_PER_SHAPE  # an operation with a new name takes more messages

    @classmethod
    def start(cls, options: StartOptions) -> Self:
        """Start Horovod, connect the ranks, and return the backend. Raises ConfigError if this Horovod does not use the
        requested transport, if two ranks use the same GPU, or if this process already has a process group. Raises
        BackendUnavailableError for a GPU if this Horovod supports only CPU tensors.
        """
        checks.check_no_default_group()
        rank_info = options.rank_info
        device = choose_device(options.device, rank_info.local_rank)
        _check_gpu_operations(device)
        rendezvous = connect_ranks_and_horovod(rank_info, options.timeout)
        gather_and_check_gpus(rendezvous, device, options.device)
        transport = _detect_transport(device)
        if options.transport not in (None, transport):
            raise ConfigError(
                f"Transport {options.transport!r} was requested, but Horovod uses {transport!r} here. "
                "Leave transport out, or list what this Horovod supports with: unitrain horovod check"
            )
        register_backend()
        dist.init_process_group(
            BACKEND_NAME,
            store=dist.PrefixStore("horovod", rendezvous.store),
            rank=rank_info.rank,
            world_size=rank_info.size,
            timeout=options.timeout,
        )
        with destroying_default_group_on_error():
            return cls(rendezvous, device, transport, _create_control_group(rendezvous, options.timeout))

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        transport: str,
        control_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(rendezvous, device, transport, control_group)
        self._has_control_group = control_group is not None
        self._check_consistency.on_mismatch = self._reset_operation_names

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        if not self._can_overlap_check(tensor, op):
            return super().allreduce(tensor, op)
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        # Horovod runs an operation only when all ranks have started it under the same name, which contains the
        # operation, dtype and size. The operation can therefore start before the consistency check and overlap with it.
        work: Any = default_process_group().allreduce([result])
        try:
            self._check_consistency("allreduce", tensor, op=op)
        except BaseException:
            work.discard()
            raise
        self._monitor.wait_for_ranks(work)
        return self._finish_reduction(result, tensor.dtype, op)

    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        if (
            not self._can_overlap_check(tensor, op)
            or tensor.shape[0] % self.size != 0
            or self._direct_connections(tensor, tensor.numel()) is not None
        ):
            return super().reducescatter(tensor, op)
        reduction = self._create_piecewise_reducescatter(tensor, op)
        reduction.start()  # starts before the consistency check, like an allreduce
        try:
            self._check_consistency("reducescatter", tensor, op=op)
        except BaseException:
            reduction.discard()
            raise
        return reduction.finish(self._monitor.wait_for_ranks)

    def _can_overlap_check(self, tensor: Any, op: str) -> bool:
        """Return whether a reduction can start before its consistency check has completed.

        It can if its arguments are valid, and the tensor is on a CPU, needs no conversion, and has at most
        MAX_PIECE_BYTES, so that one operation reduces it. Small tensors are excluded, because the consistency check
        also transfers their contents. The result is the same on all ranks with matching arguments.
        """
        return (
            isinstance(tensor, Tensor)
            and not nn.parameter.is_lazy(tensor)
            and not tensor.is_nested
            and tensor.dtype in (torch.float32, torch.float64)
            and op in ("sum", "mean")
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and not (tensor.requires_grad and torch.is_grad_enabled())
            and self._check_consistency.max_content_bytes
            < tensor.numel() * tensor.element_size()
            <= horovod_tensors.MAX_PIECE_BYTES
            and self._has_control_group
            and self.size > 1
            and not self._is_shut_down
            and not self._is_forked
            and not self._is_on_rank_zero
        )

    def _reset_operation_names(self) -> None:
        group: Any = default_process_group()
        group.start_new_names()


def _create_control_group(rendezvous: Rendezvous, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a Gloo group of all ranks for consistency checks, or None if torch has no Gloo. All ranks must call this
    function.

    Without this group, a check would wait for Horovod, which starts operations once per cycle, in the order of issue:
    an exchange of 1 KB would take 1 ms, and longer while gradients are being reduced.
    """
    if not dist.is_gloo_available():
        return None
    own = rendezvous.own_address
    interface = environment.get_variable("HOROVOD_GLOO_IFACE") or (interface_with_address(own) if own else None)
    if interface:
        environment.export_defaults({"GLOO_SOCKET_IFNAME": interface})
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment]
    return group


def _check_gpu_operations(device: torch.device) -> None:
    if device.type == "cuda" and not (hvd.nccl_built() or hvd.cuda_built() or hvd.rocm_built()):
        raise BackendUnavailableError(
            f"This rank computes on {device}, but Horovod was built without GPU operations. "
            "Build it with: unitrain horovod build --with-cuda, or use device='cpu'."
        )


def _detect_transport(device: torch.device) -> str:
    if device.type == "cuda" and hvd.nccl_built():
        return "nccl"
    return "gloo" if hvd.gloo_enabled() else "mpi"

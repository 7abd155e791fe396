"""Alltoall and allgather of Gloo between CPUs, in an order of messages that uses both directions of a slow network.

Before Gloo sends a message, it waits for a small message in which the receiver states that its buffer is ready. Gloo's
own alltoall and allgather start to send before they start to receive. On a slow network, that small message then waits
behind the data that its sender has already started to send, so two ranks often send one after the other. The functions
of this module start to receive first. The patch gloo-receive-first in `horovod_wheel/patches` changes Horovod's copy of
Gloo in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from unitrain.torch_compat import Work, all_gather_single

_TAG = 0x5E1D  # other point-to-point messages of a group have other tags. Messages with the same tag remain in order
# Gloo stops transferring the messages between two ranks if the buffer of an unfinished message is released.
_unfinished: set[_Exchange] = set()
_MIN_BYTES = 1 << 16  # per rank. Smaller messages are not slower in Gloo's order, and its own collectives can be polled


def start_alltoall(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to send part r of `source` to the rank with index r of `group`, and to receive part r of `output` from it.

    Both tensors are contiguous bytes, [size * bytes], of the same shape on all ranks of the group, which must all call
    this function. Wait for the result before changing either tensor.
    """
    if not _is_slow_in_gloo(output, group):
        return dist.all_to_all_single(output, source, group=group, async_op=True)
    return _start_exchange(output.chunk(group.size()), source.chunk(group.size()), group)


def start_allgather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to gather every rank's `source`, contiguous [bytes], into `output`, contiguous [size * bytes].

    All ranks of `group` must call this function with the same shapes. Wait for the result before changing either
    tensor.
    """
    if not _is_slow_in_gloo(output, group):
        work: dist.Work | None = all_gather_single(output, source, group=group, async_op=True)
        return work
    return _start_exchange(output.chunk(group.size()), [source] * group.size(), group)


def _is_slow_in_gloo(output: Tensor, group: dist.ProcessGroup) -> bool:
    if output.device.type != "cpu" or len(output) < _MIN_BYTES * group.size():
        return False
    return "cpu:gloo" in dist.get_backend_config(group)


def _start_exchange(output: Sequence[Tensor], source: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    rank, size = group.rank(), group.size()
    exchange = _Exchange()
    for offset in range(1, size):
        sender = (rank - offset) % size
        exchange.add(group.recv([output[sender]], sender, _TAG))
    for offset in range(1, size):
        receiver = (rank + offset) % size
        exchange.add(group.send([source[receiver]], receiver, _TAG))
    output[rank].copy_(source[rank])
    return exchange


def discard_unfinished() -> None:
    """Release the messages of exchanges whose `wait` was not called or did not complete, for example after an exception
    in a backward pass. Call this function after the process groups are destroyed."""
    _unfinished.clear()


class _Exchange(Work):
    """The messages of an exchange, which remain in memory until `wait` has completed or `discard_unfinished` is called.

    Gloo completes a message only in `wait`, so `is_completed` returns False before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._works: list[dist.Work] = []
        _unfinished.add(self)

    def add(self, work: dist.Work) -> None:
        """Add a message."""
        self._works.append(work)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        while self._works:
            self._works[0].wait()
            del self._works[0]
        _unfinished.discard(self)
        return True

    def is_completed(self) -> bool:
        return not self._works

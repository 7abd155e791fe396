"""Messages between two ranks of a Horovod process group.

Horovod only has collectives. A message sent as an alltoall would require negotiation among all ranks. torch's Gloo
transport therefore sends the messages, over TCP connections between all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.horovod.runtime import own_address
from unitrain.backends.horovod.tensors import Destination, dense_bytes
from unitrain.backends.horovod.work import GroupTimeoutError
from unitrain.bootstrap import environment
from unitrain.errors import UnsupportedError
from unitrain.output import get_logger
from unitrain.torch_compat import Work, create_gloo_group

_LOGGER = get_logger(__name__)
_CONNECTION_TIMEOUT = timedelta(seconds=30)


class PointToPoint:
    """Sends and receives messages of one rank of a group. `global_ranks` are used in error messages.

    The constructor connects all ranks of the group, which pass the same `store`. If any ranks cannot connect, for
    example because of a firewall, rank 0 of the group logs a warning instead of raising an error, because collectives
    still work. Two ranks then connect when they exchange their first message. Raises GroupTimeoutError if some ranks do
    not call the constructor, and UnsupportedError if torch has no Gloo.
    """

    def __init__(self, store: dist.Store, rank: int, global_ranks: Sequence[int], timeout: timedelta) -> None:
        if not dist.is_gloo_available():
            raise UnsupportedError(
                "Messages between two ranks require the Gloo transport, which this torch build does not contain. "
                "Install an official torch release from https://pytorch.org, or use backend 'ddp' with NCCL."
            )
        self._global_ranks = global_ranks
        self._timeout = timeout
        interface = environment.get_variable("GLOO_SOCKET_IFNAME") or environment.get_variable("HOROVOD_GLOO_IFACE")
        location: dict[str, Any] = {"interface": (interface or "").partition(",")[0], "address": own_address()}
        size, limit = len(global_ranks), min(timeout, _CONNECTION_TIMEOUT)
        problem = ""
        try:
            self.transport = create_gloo_group(dist.PrefixStore("all", store), rank, size, limit, **location)
        except RuntimeError as error:
            problem = f"rank {global_ranks[rank]}: {_first_line(error)}"
        # A rank may be connected although others are not. Messages require the same transport on both ranks.
        problem = _exchange_problems(dist.PrefixStore("connected", store), problem, size, timeout + limit)
        if problem:
            if rank == 0:
                _LOGGER.warning(
                    "The ranks of a Horovod group cannot connect to send messages: %s. Collectives are not affected. "
                    "Allow TCP connections between the hosts, or set HOROVOD_GLOO_IFACE to an interface that connects "
                    "them.",
                    problem,
                )
            self.transport = create_gloo_group(
                dist.PrefixStore("each", store), rank, size, timeout, **location, connects=False
            )

    def send(self, tensor: Tensor, rank: int, tag: int) -> MessageWork:
        """Start to send `tensor` to `rank` of the group. Do not modify `tensor` until the work is complete."""
        payload = dense_bytes(tensor).cpu()
        work = self.transport.send([payload], rank, tag)
        return MessageWork(work, f"Sending {_describe(payload, tag)} to rank {self._global_ranks[rank]}", self._timeout)

    def recv(self, tensor: Tensor, rank: int | None, tag: int) -> MessageWork:
        """Start to receive `tensor` from `rank` of the group, or from any rank if `rank` is None."""
        target = Destination(tensor)
        buffer = (
            target.bytes
            if tensor.device.type == "cpu"
            else torch.empty(len(target.bytes), dtype=torch.uint8, device="cpu")
        )

        def finish() -> None:
            if buffer.data_ptr() != target.bytes.data_ptr():
                target.bytes.copy_(buffer)
            target.finish()

        if rank is None:
            # Gloo refuses an empty buffer here, but accepts a message that is shorter than the buffer.
            received = buffer if len(buffer) else torch.empty(1, dtype=torch.uint8, device="cpu")
            work, source = self.transport.recv_anysource([received], tag), "any rank"
        else:
            work, source = self.transport.recv([buffer], rank, tag), f"rank {self._global_ranks[rank]}"
        return MessageWork(work, f"Receiving {_describe(buffer, tag)} from {source}", self._timeout, finish)


class MessageWork(Work):
    """A message in flight. `wait` raises GroupTimeoutError if the other rank does not call the matching operation in
    time, and RuntimeError if the connection is lost."""

    def __init__(
        self, work: dist.Work, description: str, timeout: timedelta, finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._description = description
        self._timeout = timeout
        self._finish = finish
        self._is_complete = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self._is_complete:
            return True
        if self._error is not None:
            raise self._error
        limit = timeout or self._timeout
        try:
            self._work.wait(limit)
        except RuntimeError as error:
            self._error = self._explain(error, limit)
            raise self._error from error
        with torch.no_grad():
            if self._finish is not None:
                self._finish()
        self._is_complete = True
        return True

    def is_completed(self) -> bool:
        return self._is_complete or self._error is not None or self._work.is_completed()

    def is_success(self) -> bool:
        return self._is_complete

    def exception(self) -> Exception | None:
        return self._error

    def source_rank(self) -> int:
        """Return the group rank of the sender."""
        return self._work._source_rank()

    _source_rank = source_rank

    def _explain(self, error: RuntimeError, limit: timedelta) -> Exception:
        reason = _first_line(error)
        if "Timed out" in reason or "timed out" in reason or "timeout" in reason:
            return GroupTimeoutError(
                f"{self._description} timed out after {limit.total_seconds():g} s, because the matching operation was "
                "not called. Check the first error of the other rank, or raise the limit with "
                "torch.distributed.init_process_group(timeout=...)."
            )
        return RuntimeError(f"{self._description} failed: {reason}. Check the first error of the other rank.")


def _exchange_problems(store: dist.Store, problem: str, size: int, timeout: timedelta) -> str:
    """Wait until all of the `size` ranks have passed their `problem`, and return one of the problems, or "" if all are
    "". All ranks call this function, and receive the same result. Raises GroupTimeoutError after `timeout`."""
    if problem:
        store.set("problem", problem)
    if store.add("ranks", 1) == size:
        store.set("complete", "true")
    try:
        store.wait(["complete"], timeout)
    except RuntimeError as error:  # a FileStore does not raise DistStoreError
        raise GroupTimeoutError(
            f"Creating a Horovod group timed out after {timeout.total_seconds():g} s, because some ranks did not "
            "create it. Check the first error of the other ranks."
        ) from error
    return store.get("problem").decode() if store.check(["problem"]) else ""


def _describe(payload: Tensor, tag: int) -> str:
    return f"{len(payload):,} bytes with tag {tag}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

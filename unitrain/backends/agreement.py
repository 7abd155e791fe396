"""The exchange that goes before every collective: the ranks tell each other what they are about to do (`call.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unitrain.backends.base import Backend
from unitrain.backends.call import ROW_LENGTH, Call, describe_disagreement, small
from unitrain.backends.ledger import Ledger
from unitrain.backends.objects import pack, unpack
from unitrain.backends.torch_names import all_gather
from unitrain.backends.waiting import Waiting
from unitrain.errors import CollectiveMismatchError, ConfigError, TensorError, UnitrainError


class Agreement:
    """Counts the collectives that this rank of `backend` calls, and compares each with those of the other ranks."""

    def __init__(self, backend: Backend, ledger: Ledger, waiting: Waiting) -> None:
        self._backend, self._ledger, self._waiting = backend, ledger, waiting
        self._calls = 0

    def __call__(
        self,
        operation: str,
        tensor: Tensor | None = None,
        *,
        op: str = "",
        root: int = -1,
        check: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[Call]:
        """Tell every rank what this one is about to do, and return what each does. All ranks call it.

        `check` raises what is wrong with the arguments here. With `dtype`, a small tensor goes along in it. Raises the
        lowest such rank's error, or CollectiveMismatchError where the ranks do not do the same, on every rank.
        """
        self._backend.refuse_alone(operation)
        problem: UnitrainError | None = None
        call = Call(self._calls, operation, refused=True)
        try:
            if check is not None:
                check()
            call = Call(
                self._calls,
                operation,
                op,
                root,
                tensor.dtype if tensor is not None else None,
                tuple(tensor.shape) if tensor is not None else (),
                content=small(tensor, dtype) if tensor is not None and dtype is not None else None,
            )
        except (TensorError, ConfigError) as error:
            problem = error
        self._calls += 1
        self._ledger.enter(call)
        rows = torch.empty(self._backend.size, ROW_LENGTH, dtype=torch.int64)
        self._waiting.wait_for_ranks(all_gather(rows.view(-1), call.row(), async_op=True))
        calls = Call.from_rows(rows)
        if any(other.refused for other in calls):
            self._raise_problem(problem)
        if not all(calls[self._backend.rank].agrees_with(other) for other in calls):  # as told, also of many dimensions
            raise CollectiveMismatchError(
                f"{describe_disagreement(calls)} Call the same collectives in the same order on every rank, "
                "with the same shape and dtype, and none of them inside `if rank == 0`."
            )
        return calls

    def gather_bytes(self, payload: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return every rank's `payload`, uint8 [its size], in rank order, once the ranks have agreed on it. All ranks
        call it, with the `sizes` of all."""
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        gathered = torch.empty(len(sizes) * max(sizes), dtype=torch.uint8)
        self._waiting.wait_for_ranks(all_gather(gathered, padded, async_op=True))
        return [part[:size] for part, size in zip(gathered.view(len(sizes), -1), sizes, strict=True)]

    def _raise_problem(self, problem: UnitrainError | None) -> None:
        """Raise the lowest refused rank's error on every rank, outside the numbered calls."""
        payload, _ = pack(problem)
        sizes = torch.empty(self._backend.size, dtype=torch.int64)
        self._waiting.wait_for_ranks(all_gather(sizes, torch.tensor([payload.numel()]), async_op=True))
        for part in self.gather_bytes(payload, sizes.tolist()):
            if (found := unpack(part, self._backend.device)) is not None:
                raise found

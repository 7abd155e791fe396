"""The stages at the end of a backward pass, in one fixed order, and the tensors from which a backward pass can start.

At the end of a backward pass, autograd calls the callbacks that were queued during the pass, in queue order. That order
depends on which hook happens to run first. `end_of_backward` therefore queues one callback per backward pass, which
runs all stages in the order of `BackwardStage`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from enum import IntEnum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from unitrain.torch_compat import current_backward, queue_backward_callback

_MAX_INSPECTED_OBJECTS = 100  # an output may hold references to many other objects of the program
_OPAQUE_TYPES = (
    str, bytes, int, float, complex, type(None), type, nn.Module, ModuleType, FunctionType, BuiltinFunctionType,
    MethodType,
)  # fmt: skip


class BackwardStage(IntEnum):
    """The stages at the end of a backward pass, which run in increasing order. Functions in a stage run in the order of
    the numbers of their models, which is the same on all ranks although the ranks may reach the models in different
    orders. Functions of one model run in the order in which they were added.

    FIND_UNUSED_PARAMETERS: in the first backward pass, exchange the names of unused parameters, and reduce zeros for
        them. Other ranks wait for these gradients, so the buckets that contain them cannot complete before this stage.
    REDUCE_BUCKETS: start deferred allreduces. On CPUs, also wait for the first collective of every bucket; on GPUs, the
        CUDA stream waits instead. With logical ranks, reduce the gradients; with sharded gradients, reduce the
        remaining buckets.
    COMPRESS: run the remaining collectives of compressed buckets, and complete the futures that DDP waits for. With a
        communication hook of the user, wait for its futures.
    WAIT_FOR_WORK_OBJECTS: wait for the `Work` objects of Python process groups, and raise their errors. If DDP's C++
        code waited for them first, their errors would lose their type.
    MARK_REDUCED: mark the gradients as reduced, so that an optimizer accepts them.

    After MARK_REDUCED, DDP copies the reduced buckets into the gradients, unless the gradients are views of the
    buckets.

    REBUILD_BUCKETS: after the first backward pass, broadcast the order of the gradients in the buckets. DDP would do so
        in the next forward pass, where ranks that call the models in different orders would wait for each other.
    RAISE_ERRORS: raise ModelError for unused parameters; with sharded gradients, also exchange their names. It is last
        because other ranks depend on this rank in all previous stages.
    """

    FIND_UNUSED_PARAMETERS = 1
    REDUCE_BUCKETS = 2
    COMPRESS = 3
    WAIT_FOR_WORK_OBJECTS = 4
    MARK_REDUCED = 5
    REBUILD_BUCKETS = 6
    RAISE_ERRORS = 7


class EndOfBackwardCallbacks:
    """Runs the stages at the end of each backward pass.

    All callbacks that a backend queues with autograd are queued by this class. A nested backward pass has a separate
    sequence of stages.
    """

    def __init__(self) -> None:
        # Autograd holds the only strong reference to a sequence, and drops it if the backward pass raises an exception.
        self._sequences: WeakValueDictionary[int, _StageSequence] = WeakValueDictionary()

    def add(self, stage: BackwardStage, function: Callable[[], None], model_number: int = 0) -> None:
        """Call `function` in `stage` at the end of the current backward pass, which may already be executing these
        stages. `model_number` is the number of the model on whose behalf the function communicates.

        The first call in a backward pass must precede the last bucket, after which DDP queues its callback.
        """
        backward = current_backward()
        sequence = self._sequences.get(backward)
        if sequence is None or sequence.has_run:
            sequence = self._sequences[backward] = _StageSequence()
            queue_backward_callback(sequence.run)
        sequence.add(stage, model_number, function)


class _StageSequence:
    """The stages of one backward pass."""

    def __init__(self) -> None:
        self.has_run = False
        self._pending: list[tuple[BackwardStage, int, int, Callable[[], None]]] = []
        self._insertion_index = itertools.count()

    def add(self, stage: BackwardStage, model_number: int, function: Callable[[], None]) -> None:
        heapq.heappush(self._pending, (stage, model_number, next(self._insertion_index), function))

    def run(self) -> None:
        """Call the functions of all stages up to MARK_REDUCED, including functions that are added meanwhile."""
        while self._pending and self._pending[0][0] <= BackwardStage.MARK_REDUCED:
            heapq.heappop(self._pending)[-1]()
        self.has_run = True
        if self._pending:
            queue_backward_callback(self._run_last_stages)  # after the callback of DDP

    def _run_last_stages(self) -> None:
        while self._pending:
            heapq.heappop(self._pending)[-1]()


end_of_backward = EndOfBackwardCallbacks()


def do_not_wait() -> None:
    """Return immediately. Callers use this wait function if no collective has started."""


def tensors_requiring_grad(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a forward pass that require grad, from which a backward pass can start.

    The search covers tuples, lists, the values and attributes of dictionaries, and the attributes of other objects, but
    not of modules, classes and functions. It inspects at most 100 dictionaries and other objects, and any number of
    tuples and lists.
    """
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    tensors: list[Tensor] = []
    _collect_tensors_requiring_grad(output, tensors, set(), set())
    return tensors


def _collect_tensors_requiring_grad(
    output: Any, tensors: list[Tensor], seen_sequences: set[int], seen_objects: set[int]
) -> None:
    if isinstance(output, Tensor):
        if output.requires_grad:
            tensors.append(output)
        return
    if isinstance(output, _OPAQUE_TYPES) or id(output) in seen_sequences or id(output) in seen_objects:
        return
    children: Iterable[Any]
    if isinstance(output, list | tuple):
        seen_sequences.add(id(output))
        children = output
    elif len(seen_objects) >= _MAX_INSPECTED_OBJECTS:
        return
    else:
        seen_objects.add(id(output))
        children = _attributes(output)
        if isinstance(output, dict):
            children = [*output.values(), *children]
    for child in children:
        _collect_tensors_requiring_grad(child, tensors, seen_sequences, seen_objects)


def _attributes(output: object) -> list[Any]:
    names = [name for cls in type(output).__mro__ for name in _slot_names(cls)]
    values = [getattr(output, name) for name in names if name != "__dict__" and hasattr(output, name)]
    return [*values, *getattr(output, "__dict__", {}).values()]


def _slot_names(cls: type) -> list[str]:
    """Return the names of the attributes in `cls.__slots__`, which may be one string, with private names mangled."""
    slots: Any = vars(cls).get("__slots__", ())
    prefix = f"_{cls.__name__.lstrip('_')}"
    return [
        f"{prefix}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in ((slots,) if isinstance(slots, str) else slots)
    ]

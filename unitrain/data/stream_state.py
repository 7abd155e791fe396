"""States of iterable datasets and loaders that resume at a position without reading the items before it.

A stateful dataset has the methods `state_dict()` and `load_state_dict(state)`, as in torchdata and Hugging Face
datasets. The worker that collates a batch takes a snapshot of the state after the batch, and sends it with the batch.
The state after the last batch that the training loop has used is therefore known, regardless of how many batches the
workers have prefetched.
"""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from unitrain.errors import DataError
from unitrain.torch_compat import has_shuffle_buffer

# Replaces the snapshot after the last item, after which many datasets return their initial state.
END_OF_STREAM = b""
_STATE_TYPES = (type(None), bool, int, float, str, bytes, torch.Tensor)
_IMMUTABLE_TYPES = {
    type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, ModuleType,
}  # fmt: skip
# Larger arrays are assumed to be data, not state, because a state is pickled after each batch and should be small.
_MAX_STATE_BYTES = 2**20
# Datasets of Hugging Face, and loaders of torchdata, start each iteration at the beginning. Their state describes the
# last iteration, which may be an iteration before the training.
_MODULES_THAT_START_AT_THE_BEGINNING = ("datasets.iterable_dataset", "torchdata.")


@dataclass(frozen=True)
class StreamState:
    """State of this rank's iteration over a stream after one of its batches.

    Attributes:
        snapshots: Pickled state of the dataset in each worker that has loaded a batch. For a shared stream, all workers
            have the same state, and the only key is 0.
        last_worker: The worker that loaded the last batch; -1 before the first batch.
        position: The position after the batch, for a shared stream; None for other streams, before the first batch and
            in restored states.
        repeats: Whether the batch was repeated, with uneven="pad".
    """

    snapshots: Mapping[int, bytes]
    last_worker: int = -1
    position: int | None = None
    repeats: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the state, without its position, in types that load with `weights_only=True`."""
        snapshots = {
            worker: {"state": pickle.loads(snapshot)} if snapshot else {} for worker, snapshot in self.snapshots.items()
        }
        return {"snapshots": snapshots, "last_worker": self.last_worker, "repeats": self.repeats}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> StreamState:
        """Return the state that `to_dict` converted; its position is None."""
        snapshots = {
            worker: pickle.dumps(snapshot["state"]) if snapshot else END_OF_STREAM
            for worker, snapshot in state["snapshots"].items()
        }
        return cls(snapshots, state["last_worker"], repeats=state["repeats"])


def has_state_methods(items: Any) -> bool:
    """Return whether `items` has the methods `state_dict()` and `load_state_dict(state)`.

    Methods of these names with other required parameters, as in MosaicML's StreamingDataset, do not count.
    """
    return _has_method(items, "state_dict", 0) and _has_method(items, "load_state_dict", 1)


def is_stateful(items: Any) -> bool:
    """Return whether `items` resumes exactly from its state.

    The state of a Hugging Face dataset lacks the contents of its shuffle buffer, so a dataset with such a buffer would
    lose these items.
    """
    return has_state_methods(items) and not has_shuffle_buffer(items)


def is_stateful_loader(data: Any) -> bool:
    """Return whether `data` is a loader that creates its own batches, and has the methods of a stateful dataset.

    A StatefulDataLoader of torchdata is not such a loader: unitrain uses its dataset and settings, as for a DataLoader.
    """
    return has_custom_iter(data) and has_state_methods(data)


def has_custom_iter(data: Any) -> bool:
    """Return whether `data` is a DataLoader whose `__iter__` may yield other batches than torch's DataLoader."""
    if not isinstance(data, DataLoader):
        return False
    iterate = type(data).__iter__
    return iterate is not DataLoader.__iter__ and not iterate.__module__.startswith("torchdata.stateful_dataloader.")


def take_snapshot(items: Any) -> bytes:
    """Return the pickled state of `items`. Raises DataError if it cannot be stored in a checkpoint."""
    state = items.state_dict()
    if (problem := _find_invalid_part(state)) is not None:
        raise DataError(
            f"{type(items).__name__}.state_dict() returns {problem}, which a checkpoint cannot store. Return only "
            "numbers, strings, tensors, lists and dictionaries, for example array.tolist() instead of a numpy array."
        )
    return pickle.dumps(state)


def load_snapshot(items: Iterable[Any], snapshot: bytes) -> Iterable[Any]:
    """Return `items` with the state `snapshot`.

    The result is a copy, so that later epochs do not start from the state. It shares large arrays, shared memory, and
    objects that cannot be copied, such as files, with `items`. A loader is not copied: it starts from the state once.
    After the end of the stream, the result is empty.
    """
    if snapshot == END_OF_STREAM:
        return ()
    resumed: Any = items if isinstance(items, DataLoader) else _copy_parts(items, {})
    resumed.load_state_dict(pickle.loads(snapshot))
    return cast(Iterable[Any], resumed)


@dataclass
class _Iterations:
    """The iterations over a stateful dataset: its state before the first one (None if it is unknown), and whether the
    last one has not reached the end."""

    initial_state: Any
    is_unfinished: bool = False

    def finish(self) -> None:
        self.is_unfinished = False


# By the ID of the dataset. A dataset may be passed to several Trainers and loaders.
_iterations: dict[int, _Iterations] = {}


def begin_iteration(items: Any) -> Callable[[], None]:
    """Let the next iteration over `items` start at the beginning. Return a function to call when it reaches the end.

    A stateful dataset may store its position in itself. If the preceding iteration in this process ended early, the
    state that the dataset had before its first iteration is therefore loaded. After an iteration that reached the end,
    the dataset itself starts at the beginning, and its state may contain a number of epochs, which must be kept.
    """
    if not has_state_methods(items) or _starts_at_the_beginning(items):
        return _do_nothing
    iterations = _iterations.get(id(items))
    if iterations is None:
        try:
            weakref.finalize(items, _iterations.pop, id(items), None).atexit = False
        except TypeError:  # an object of a class with __slots__
            return _do_nothing
        iterations = _iterations[id(items)] = _Iterations(_copy_state(items))
    elif iterations.is_unfinished and iterations.initial_state is not None:
        items.load_state_dict(copy.deepcopy(iterations.initial_state))
    iterations.is_unfinished = True
    return iterations.finish


def _do_nothing() -> None:
    pass


def _starts_at_the_beginning(items: Any) -> bool:
    return any(base.__module__.startswith(_MODULES_THAT_START_AT_THE_BEGINNING) for base in type(items).__mro__)


def _copy_state(items: Any) -> Any:
    """Return a copy of the state of `items`, or None if `items` has no state before its first iteration."""
    try:
        return copy.deepcopy(items.state_dict())
    except Exception:  # the method may require an iterator, and may raise any exception without one
        return None


def _has_method(items: Any, name: str, num_arguments: int) -> bool:
    """Return whether `items` has a method `name` that can be called with `num_arguments` positional arguments."""
    method = getattr(items, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*range(num_arguments))
    except (TypeError, ValueError):
        return False
    return True


def _copy_parts(value: Any, copied: dict[int, Any]) -> Any:
    """Return a copy of `value` and its parts, except large arrays, shared memory, and parts that cannot be copied.

    `copied` maps the IDs of the objects that are already copied to their copies. A deep copy would duplicate a dataset
    in memory, and would fail for a part such as an open file.
    """
    value_type: Any = type(value)
    if value_type in _IMMUTABLE_TYPES or _is_data(value):
        return value
    if id(value) in copied:
        return copied[id(value)]
    result: Any
    if value_type is tuple:
        parts = [_copy_parts(part, copied) for part in value]
        result = value if all(map(operator.is_, parts, value)) else tuple(parts)
    elif value_type is list:
        result = copied[id(value)] = []
        result.extend(_copy_parts(part, copied) for part in value)
    elif value_type is dict:
        result = copied[id(value)] = {}
        result.update((key, _copy_parts(part, copied)) for key, part in value.items())
    elif value_type is MethodType:
        result = MethodType(value.__func__, _copy_parts(value.__self__, copied))
    elif _has_plain_attributes(value_type):
        result = copied[id(value)] = value_type.__new__(value_type)
        vars(result).update((name, _copy_parts(part, copied)) for name, part in vars(value).items())
    else:
        memo = dict(copied)
        try:
            result = copy.deepcopy(value, memo)
        except Exception:  # a method of the object may raise any exception
            result = copy.copy(value) if has_state_methods(value) else value
        else:
            copied.update(memo)
    copied[id(value)] = result
    return result


def _is_data(value: Any) -> bool:
    """Return whether `value` is a large array, or a tensor in memory that workers share."""
    if isinstance(value, torch.Tensor):
        return (
            value.layout == torch.strided
            and not value.is_meta
            and (value.nbytes > _MAX_STATE_BYTES or value.is_shared())
        )
    size = getattr(value, "nbytes", 0)
    return isinstance(size, int) and size > _MAX_STATE_BYTES


def _has_plain_attributes(value_type: Any) -> bool:
    """Return whether objects of class `value_type` consist of the attributes in their `__dict__`."""
    return (
        value_type.__dictoffset__ != 0
        and value_type.__new__ is object.__new__
        and not any(vars(base).get("__slots__") for base in value_type.__mro__)
        and not any(hasattr(value_type, name) for name in ("__copy__", "__deepcopy__", "__setstate__"))
        and all(
            getattr(value_type, name) is getattr(object, name)
            for name in ("__reduce__", "__reduce_ex__", "__getstate__")
        )
    )


def _find_invalid_part(state: Any, path: str = "a state") -> str | None:
    """Return a description of a part of `state` that does not load with `weights_only=True`, or None."""
    parts: Iterable[tuple[Any, Any]]
    if type(state) in _STATE_TYPES:
        return None
    if type(state) is dict:
        parts = [*((key, key) for key in state), *state.items()]
    elif type(state) in (list, tuple):
        parts = enumerate(state)
    else:
        return f"{path} of type {type(state).__name__}"
    problems = (_find_invalid_part(part, f"{path if path != 'a state' else 'state'}[{key!r}]") for key, part in parts)
    return next((problem for problem in problems if problem is not None), None)

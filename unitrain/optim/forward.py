"""Calls of the model on batches: pairs (inputs, targets), mappings, and other batches through the user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.data.batch import leaves, map_parts
from unitrain.errors import ConfigError, DataError, ModelError, UnitrainError

# (model, batch) -> (output, target), the arguments of the loss function and the metrics.
ForwardFunction = Callable[[nn.Module, Any], tuple[Any, Any]]


class Forward:
    """Calls a model on a batch, through `function` if it is not None.

    Otherwise, a batch is a pair (inputs, targets), and the model is called with the inputs; or a mapping, such as a
    dictionary or a BatchEncoding of transformers, and the model is called with its items as keyword arguments. `model`
    is the user's model, without wrappers. Raises ConfigError if `function` is not callable, DataError if a batch is
    neither a pair nor a mapping, or is a mapping without tensors or with keys that the model does not accept, and
    ModelError if `function` does not return a pair.
    """

    def __init__(self, function: ForwardFunction | None, model: nn.Module) -> None:
        if function is not None and (not callable(function) or isinstance(function, type)):
            raise ConfigError(
                f"Trainer(forward=...) takes a function, got {function!r}. "
                "Use forward=lambda model, batch: (model(batch[0]), batch[1])."
            )
        self._function = function
        self._keyword_forward, self._has_checked_keys = KeywordForward(model), False

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return (output, target). The target of a mapping is the mapping."""
        if self._function is None:
            if isinstance(batch, Mapping):
                return self._keyword_forward.call(model, batch), batch
            inputs, target = split_into_input_and_target(batch)
            return model(inputs), target
        result = self._function(model, batch)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        raise ModelError(
            f"forward must return a pair (output, target), got {_describe_object(result)}. End it with: "
            "return output, target"
        )

    def compute_output(self, model: nn.Module, batch: Any) -> Any:
        """Return only the output, for predictions. Without a function, the batch may consist of inputs only. If it is a
        mapping, the loss and the cache of a language model are removed from the output."""
        if self._function is None:
            if isinstance(batch, Mapping):
                return self._keyword_forward.without_loss(self._keyword_forward.call(model, batch))
            if isinstance(batch, (list, tuple)) and len(batch) == 1:
                return model(batch[0])
            if not isinstance(batch, (list, tuple)):
                return model(batch)
        return self(model, batch)[0]

    def check_same_keys(self, communicator: Communicator, batch: Any) -> None:
        """Raise DataError on every rank if the ranks have mappings with different keys, or if only some ranks have
        mappings.

        All ranks must call this method. It communicates in its first call only, and not at all if the user passed a
        function.
        """
        if self._function is not None or self._has_checked_keys:
            return
        self._has_checked_keys = True
        local_keys = ", ".join(sorted(map(repr, batch))) if isinstance(batch, Mapping) else None
        keys_by_rank = gather_if_different(communicator, local_keys)
        if keys_by_rank is not None:
            keys_text = "; ".join(f"rank {rank}: {keys or 'not a mapping'}" for rank, keys in enumerate(keys_by_rank))
            raise DataError(
                f"The batches do not have the same keys on every rank ({keys_text}). Give every rank the same data, "
                "and let the dataset and its collate_fn return the same keys for every sample."
            )


class KeywordForward:
    """Calls `model.forward` with the items of a mapping as keyword arguments."""

    def __init__(self, model: nn.Module) -> None:
        self._name = f"{type(model).__name__}.forward"
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # some compiled functions have no signature
            parameters = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
        self._accepted = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        self._accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def call(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """Return `model(**batch)`. Raises DataError if the batch has no tensor, if it has keys that the model does not
        accept, or if the model fails on a batch that contains a list of tensors."""
        if not any(isinstance(leaf, Tensor) for leaf in leaves(batch)):
            item_types = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in batch.items())
            raise DataError(
                f"The batch, of class {type(batch).__name__}, has no tensors ({item_types or 'it is empty'}). "
                f"{_TENSORS_FIX}"
            )
        unknown = [key for key, value in batch.items() if key not in self._accepted and self._is_rejected(key, value)]
        if unknown:
            raise self._unknown_keys_error(unknown)
        try:
            return model(**batch)
        except Exception as error:
            # default_collate turns lists of numbers into lists with one tensor per position.
            transposed = [key for key, value in batch.items() if _is_list_of_tensors(value)]
            if not transposed or isinstance(error, UnitrainError | torch.OutOfMemoryError | MemoryError):
                raise
            raise DataError(
                f"{self._name} failed on a batch in which {transposed[0]!r} is a list of "
                f"{len(batch[transposed[0]])} tensors: {type(error).__name__}: {error}. {_TENSORS_FIX}"
            ) from error

    def without_loss(self, output: Any) -> Any:
        """Return `output` without the items that have no row per sample, if it is a mapping or a dataclass.

        These items are the loss, the cache of a language model, and other objects that are neither tensors nor
        containers. In a dataclass, they are replaced by None.
        """
        if isinstance(output, Mapping):
            predictions = {key: value for key, value in output.items() if _is_predicted(key, value)}
            return type(output)(**predictions) if is_dataclass(output) else predictions
        if is_dataclass(output) and not isinstance(output, type):
            parts = ((field.name, getattr(output, field.name)) for field in fields(output) if field.init)
            return replace(output, **{name: None for name, value in parts if not _is_predicted(name, value)})
        return output

    def _is_rejected(self, key: Any, value: Any) -> bool:
        """Return whether the model cannot use an item for which it has no parameter.

        A model that accepts any keyword would ignore a column of strings.
        """
        if not self._accepts_all or not isinstance(key, str):
            return True
        return isinstance(value, str) or (
            isinstance(value, list | tuple) and any(isinstance(element, str) for element in value)
        )

    def _unknown_keys_error(self, unknown: Iterable[Any]) -> DataError:
        names = ", ".join(map(repr, unknown))
        accepted = ", ".join(self._accepted) or "no keywords"
        return DataError(
            f"The batch has {names}, which {self._name} does not accept. It accepts: {accepted}. Remove the other "
            f"columns, as in dataset.remove_columns([{names}]), or pass a function: "
            "Trainer(..., forward=lambda model, batch: ...)."
        )


_TENSORS_FIX = (
    'Let the samples contain tensors, as in dataset.set_format("torch") for a datasets.Dataset, or use a collate_fn, '
    "such as transformers.DataCollatorWithPadding(tokenizer): DataLoader(dataset, batch_size=32, collate_fn=...)."
)


def _is_predicted(name: Any, value: Any) -> bool:
    """Return whether `predict` collects an item of the model's output.

    The cache of a language model is an object, or nested tuples with the name "past_key_values".
    """
    is_object = not (value is None or isinstance(value, Tensor) or map_parts(lambda _, part: part, value) is not value)
    return name not in ("loss", "past_key_values") and not is_object


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(element, Tensor) for element in value)


def split_into_input_and_target(batch: Any) -> tuple[Any, Any]:
    """Return the two parts of a batch. Raises DataError if it is not a pair."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        f"A batch must be a pair (inputs, targets) or a mapping of the model's keyword arguments, got "
        f"{_describe_object(batch)}. For other batches, pass a function: "
        f"Trainer(..., forward=lambda model, batch: {_forward_example(batch)})."
    )


def _describe_object(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if type(value) in (list, tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = f"an object of class {type(value).__name__}"
    if isinstance(value, Mapping):
        return f"{text} with {', '.join(map(repr, value)) or 'nothing in it'}"
    return f"{text} with {len(value)} elements" if isinstance(value, list | tuple) else text


def _forward_example(batch: Any) -> str:
    """Return an example of `forward` for a batch of this type, for an error message."""
    if isinstance(batch, (list, tuple)) and len(batch) > 2:
        return "(model(*batch[:-1]), batch[-1])"
    if isinstance(batch, (list, tuple)) and batch:
        return "(model(batch[0]), batch[0])"
    return "(model(batch), batch)" if isinstance(batch, Tensor) else "(model(batch.x), batch.y)"

"""From a batch to what the loss and the metrics are given: the output of the model, and the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from unitrain.errors import ConfigError, DataError, ModelError

# (model, batch) -> (output, target), both whatever the loss and the metrics take.
ForwardFunction = Callable[[nn.Module, Any], tuple[Any, Any]]


class Forward:
    """Calls a model on a batch, by the user's own function where there is one.

    Without one a batch is a pair (inputs, targets), and the model is called with the inputs. Raises ConfigError for
    what is not a function, DataError for a batch that is no pair, ModelError where the function returns none.
    """

    def __init__(self, function: ForwardFunction | None) -> None:
        if function is not None and (not callable(function) or isinstance(function, type)):
            raise ConfigError(
                f"Trainer(forward=...) takes a function, got {function!r}. "
                "Use forward=lambda model, batch: (model(batch[0]), batch[1])."
            )
        self._function = function

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return (output, target)."""
        if self._function is None:
            inputs, target = input_and_target(batch)
            return model(inputs), target
        result = self._function(model, batch)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        raise ModelError(
            f"forward must return a pair (output, target), got {_described(result)}. End it with: return output, target"
        )

    def output(self, model: nn.Module, batch: Any) -> Any:
        """Return the output alone; without a function, also of a batch that has inputs and no targets."""
        if self._function is None:
            if isinstance(batch, (list, tuple)) and len(batch) == 1:
                return model(batch[0])
            if not isinstance(batch, (list, tuple)):
                return model(batch)
        return self(model, batch)[0]


def input_and_target(batch: Any) -> tuple[Any, Any]:
    """Take a batch apart. Raises DataError unless it is a pair."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        f"A batch must be a pair (inputs, targets), got {_described(batch)}. Tell the Trainer what to do with another: "
        f"Trainer(..., forward=lambda model, batch: {_example(batch)})."
    )


def _described(found: Any) -> str:
    kind = type(found).__name__
    if isinstance(found, Tensor):
        return f"a {kind} of shape {list(found.shape)}"
    if isinstance(found, Mapping):
        return f"a {kind} with {', '.join(map(repr, found)) or 'nothing in it'}"
    return f"a {kind} of {len(found)}" if isinstance(found, (list, tuple)) else f"a {kind}"


def _example(batch: Any) -> str:
    """Return what `forward` could be for such a batch."""
    if isinstance(batch, Mapping) and len(batch) > 1:
        first, *_, last = batch
        return f"(model(batch[{first!r}]), batch[{last!r}])"
    if isinstance(batch, (list, tuple)) and len(batch) > 2:
        return "(model(*batch[:-1]), batch[-1])"
    if isinstance(batch, (list, tuple, Mapping)) and batch:
        part = f"batch[{next(iter(batch))!r}]" if isinstance(batch, Mapping) else "batch[0]"
        return f"(model({part}), {part})"
    return "(model(batch), batch)" if isinstance(batch, Tensor) else "(model(batch.x), batch.y)"

"""The base class of callbacks, with six hooks and state that is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import TrainConfig
from unitrain.data.order import MicroBatch
from unitrain.errors import CallbackError, ConfigError, UnitrainError
from unitrain.optim.loss_weighting import Loss
from unitrain.output import get_logger
from unitrain.progress.training_progress import TrainingProgress

_HOOKS = (
    "on_fit_start",
    "on_micro_batch_end",
    "on_before_optimizer_step",
    "on_step_end",
    "on_epoch_end",
    "on_fit_end",
)
_HOOKS_OF_STEPS = ("on_micro_batch_end", "on_before_optimizer_step", "on_step_end")

_log = get_logger(__name__)


class RunningTrainer(Protocol):
    """The attributes of the Trainer that this package uses. This is a protocol, because the Trainer imports this
    package."""

    @property
    def backend(self) -> Backend: ...

    @property
    def config(self) -> TrainConfig: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def progress(self) -> TrainingProgress: ...

    @property
    def result_names(self) -> tuple[str, ...]: ...

    @property
    def last_loss(self) -> Tensor: ...

    @property
    def loss_scale(self) -> Tensor | None: ...

    def stop(self, reason: str) -> None: ...

    def log_histogram(self, name: str, values: Tensor) -> None: ...


class Callback:
    """Base class for callbacks. Override the hooks that you need. They are called on every rank.

    `trainer` is the unitrain.Trainer. A hook may read its attributes, call `trainer.stop`, and call collectives of
    `trainer.backend` if every rank calls the same collectives. An exception in a hook stops the run. It is raised as a
    CallbackError that names the hook, unless it is a UnitrainError. Hooks that are not overridden cost no time.
    """

    # The hooks declare `trainer` as Any, so that mypy accepts overrides that annotate it as unitrain.Trainer.

    def on_fit_start(self, trainer: Any) -> None:
        """Called before `fit` trains its first step, even if the run is already complete."""

    def on_micro_batch_end(self, trainer: Any, batch: Any, micro_batch: MicroBatch, loss: Loss) -> None:
        """Called after the forward and backward pass of a micro-batch. `batch` is this rank's batch, on its device.

        `micro_batch.samples` is the number of samples, 0 for a dummy batch. `loss.value` is the mean over the samples
        or, if loss_fn returns a token count, the sum over `loss.tokens` tokens.
        """

    def on_before_optimizer_step(self, trainer: Any) -> None:
        """Called when the gradients of the global batch are complete, before they are clipped.

        With fp16, they are still multiplied by the loss scale. With `local_sgd`, after the warm-up, they are the
        gradients of this rank or of its synchronous group.
        """

    def on_step_end(self, trainer: Any) -> None:
        """Called after the optimizer step, even if fp16 skipped it. `trainer.progress.step` already includes it."""

    def on_epoch_end(self, trainer: Any, results: dict[str, float]) -> None:
        """Called after the training and validation of an epoch, before its checkpoint is written.

        `results` are equal on all ranks. If the run stops within an epoch, `trainer.progress.sample` is above 0, and
        the hook is called again at the end of that epoch when the run has resumed.
        """

    def on_fit_end(self, trainer: Any) -> None:
        """Called at the end of `fit`, after its last checkpoint, even if an exception ended `fit` in or after
        `on_fit_start`, and even if this hook of another callback failed.

        `fit` returns when the hooks of all ranks have returned. If an exception ended `fit`, an exception in this hook
        is logged, and `fit` raises the exception that ended it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: tensors, numbers, strings, and containers of these. Rank 0's state is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned. If the run is resumed from a checkpoint with this state, the
        Trainer's constructor calls this method on every rank."""


class Callbacks:
    """Calls the callbacks of a run, in the user's order. Errors name the callback and the hook that failed."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"A callback must be a unitrain.Callback, got {callback!r}. "
                    "Subclass unitrain.Callback, and pass an instance."
                )
        self._callbacks = tuple(callbacks)
        self._callbacks_by_hook = {
            hook: tuple(
                callback
                for callback in callbacks
                # A hook may also be assigned to an instance.
                if getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
            )
            for hook in _HOOKS
        }

    def call(self, hook: str, trainer: RunningTrainer, *arguments: Any) -> None:
        """Call `hook` of every callback that overrides it.

        An exception other than UnitrainError is raised as a CallbackError. After an exception, the remaining callbacks
        are not called, except that `on_fit_end` is called for all callbacks. All ranks must call this method. Errors of
        hooks that are called once per epoch or run are raised on all ranks.
        """
        if hook in _HOOKS_OF_STEPS:
            self._call(hook, trainer, *arguments)
        else:
            call_on_all_ranks(trainer.backend, lambda: self._call(hook, trainer, *arguments))

    def _call(self, hook: str, trainer: RunningTrainer, *arguments: Any) -> None:
        callbacks = self._callbacks_by_hook[hook]
        if hook != "on_fit_end":
            for callback in callbacks:
                _call(callback, hook, trainer, *arguments)
            return
        with ExitStack() as calls:  # calls the last added function first
            for callback in reversed(callbacks):
                calls.callback(_call, callback, hook, trainer, *arguments)

    @contextmanager
    def call_at_fit_end(self, trainer: RunningTrainer) -> Iterator[None]:
        """Context manager that calls `on_fit_end` on exit.

        If the block raises an exception, this exception is raised even if a hook fails. The exception of the hook is
        then logged.
        """
        try:
            yield
        except BaseException as error:
            try:
                self._call("on_fit_end", trainer)  # the other ranks may not have left fit
            except Exception as hook_error:
                _log.error(
                    "on_fit_end failed after %s had ended fit: %s",
                    type(error).__name__,
                    hook_error,
                    exc_info=hook_error,
                )
            raise
        self.call("on_fit_end", trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the non-empty states by callback name."""
        states = {name: callback.state_dict() for name, callback in self._named_callbacks()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore the callbacks that have a state in `states`. States of other callbacks are ignored."""
        for name, callback in self._named_callbacks():
            if name in states:
                callback.load_state_dict(states[name])

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        """Return (name, callback) pairs. From its second occurrence on, a class name is followed by a number."""
        counts_by_class: dict[str, int] = {}
        named_callbacks = []
        for callback in self._callbacks:
            class_name = type(callback).__name__
            counts_by_class[class_name] = count = counts_by_class.get(class_name, 0) + 1
            named_callbacks.append((class_name if count == 1 else f"{class_name} {count}", callback))
        return named_callbacks


def _call(callback: Callback, hook: str, trainer: RunningTrainer, *arguments: Any) -> None:
    method: Callable[..., None] = getattr(callback, hook)
    try:
        method(trainer, *arguments)
    except UnitrainError:
        raise
    except Exception as error:
        raise CallbackError(
            f"{type(callback).__name__}.{hook} failed on rank {trainer.backend.rank}, after step "
            f"{trainer.progress.step}: {type(error).__name__}: {error}. "
            "Fix the callback, or remove it from the Trainer's callbacks."
        ) from error

"""What can be hooked into a run: six moments, and a state that its checkpoints keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unitrain.errors import CallbackError, ConfigError, UnitrainError

if TYPE_CHECKING:
    from unitrain.data.order import MicroBatch
    from unitrain.optim.loss_weighting import Loss
    from unitrain.trainer import Trainer

_MOMENTS = (
    "on_fit_start",
    "on_micro_batch_end",
    "on_before_optimizer_step",
    "on_step_end",
    "on_epoch_end",
    "on_fit_end",
)


class Callback:
    """Side effects of a run; override what is needed. Every rank has its own, and every rank is called.

    A method may read all of `trainer`, ask it to `stop`, and communicate over `trainer.backend` where every rank does
    the same. What it raises ends the run as a CallbackError that names it. A method that is not overridden costs
    nothing.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """`fit` is about to train, from `trainer.progress` on, if anything is left to do."""

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, part: MicroBatch, loss: Loss) -> None:
        """Forward and backward of a micro-step are done, for this rank's `batch`, which is on its device.

        `part.samples` of it count, none on a rank that only stands in for lack of samples. `loss.value` is the mean
        over them; where loss_fn counts tokens, the sum over `loss.tokens`.
        """

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """The gradients of a step are complete: those of the global batch, before they are clipped.

        In fp16 they are multiplied by the loss scale still.
        """

    def on_step_end(self, trainer: Trainer) -> None:
        """The optimizer has stepped, or fp16 has skipped the step; `trainer.progress.step` counts it."""

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        """An epoch, or the part of it before the run stops, is trained and validated; `results` are equal on all ranks.

        Where the run stops within an epoch, `trainer.progress.sample` is above 0, and the method is called again at
        the end of that epoch after a resume. It is called before the checkpoint is written.
        """

    def on_fit_end(self, trainer: Trainer) -> None:
        """`fit` is done, its last checkpoint written; it is called too when an exception ends it."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to keep: tensors, numbers, strings and containers of these. Rank 0's is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; on every rank, in the Trainer's constructor."""


class Callbacks:
    """Calls those that override a method, in the order in which they were given, and names the one that fails."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"A callback must be a unitrain.Callback, got {callback!r}. "
                    "Subclass it, and override the methods that are needed."
                )
        self._callbacks = tuple(callbacks)
        self._overriding = {
            moment: tuple(
                callback for callback in callbacks if getattr(type(callback), moment) is not getattr(Callback, moment)
            )
            for moment in _MOMENTS
        }

    def call(self, moment: str, trainer: Trainer, *arguments: Any) -> None:
        """Call `moment` of each. Raises CallbackError for an exception that is not a deliberate one already."""
        for callback in self._overriding[moment]:
            method: Callable[..., None] = getattr(callback, moment)
            try:
                method(trainer, *arguments)
            except UnitrainError:
                raise
            except Exception as error:
                raise CallbackError(
                    f"{type(callback).__name__}.{moment} failed on rank {trainer.backend.rank}, after step "
                    f"{trainer.progress.step}: {type(error).__name__}: {error}. "
                    "Mend it, or leave it out of the Trainer's callbacks."
                ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each that has one, by its name."""
        states = {name: callback.state_dict() for name, callback in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Pass each its state; one that a checkpoint does not know starts anew, and what nobody claims is left."""
        for name, callback in self._named():
            if name in states:
                callback.load_state_dict(states[name])

    def _named(self) -> list[tuple[str, Callback]]:
        """Return each with its class's name, numbered from the second of the same class on."""
        counts: dict[str, int] = {}
        named = []
        for callback in self._callbacks:
            kind = type(callback).__name__
            counts[kind] = counts.get(kind, 0) + 1
            named.append((kind if counts[kind] == 1 else f"{kind} {counts[kind]}", callback))
        return named

"""Number formats: autocast, and the loss scaling that fp16 needs, the same on every backend and device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.config import PrecisionName
from unitrain.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What forward computes in, and how gradients are kept from vanishing in it; parameters stay as the user made them.

    With fp16 the loss is multiplied by a scale that follows what the format can hold. Gradients are global when they
    are read, so an inf that one rank found is in the gradients of all, and all of them skip the same step and change
    the scale alike, without asking each other. Raises ConfigError where `device` cannot compute in the format.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self._device, self._device_type = device, device.type
        self._dtype = _DTYPES.get(name)
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(
                f"TrainConfig.precision 'bf16' is not supported by {torch.cuda.get_device_name(device)}. "
                "Use TrainConfig(precision='fp16') there."
            )
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """What the forward and the loss run in."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, self._dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return what to run backward from."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def loss_scale(self, before: Tensor | None = None) -> Tensor | None:
        """Return what losses are multiplied by now, with what they were multiplied by `before` that; None for neither.
        It does not wait for the device."""
        if self._scaler is None:
            return before
        return self._scaler.scale(torch.ones((), device=self._device) if before is None else before)

    def unscale(self, optimizer: Optimizer) -> None:
        """Give the gradients their true size, once per step, before anyone looks at it."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Let `optimizer` step unless a gradient is inf or nan in fp16; return whether it did.

        A fused optimizer decides that on the device, so this has to wait for it, as for any other.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        stepped = False

        def note(*_: Any) -> None:
            nonlocal stepped
            stepped = True

        handle = optimizer.register_step_post_hook(note)
        try:
            self._scaler.step(optimizer)
        finally:
            handle.remove()
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # the mark by which GradScaler knows them
            stepped = not any(found.item() for found in self._scaler._found_inf_per_device(optimizer).values())
        self._scaler.update()
        return stepped

    def discard_step(self) -> None:
        """Begin a step anew, after one that was not finished."""
        if self._scaler is not None:
            scaler = torch.amp.GradScaler(self._device_type)
            scaler.load_state_dict(self._scaler.state_dict())
            self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """The scale, for a checkpoint; empty unless the format is fp16."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scale of a checkpoint; one that has none, of another precision, leaves it as it is."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def allow_tf32(allowed: bool | None) -> None:
    """Let GPUs multiply float32 matrices in TF32, or forbid it, for this process; None leaves it as it is."""
    if allowed is not None:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed

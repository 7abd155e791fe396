"""Autocast and loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.config import PrecisionName
from unitrain.errors import ConfigError
from unitrain.torch_compat import found_non_finite, skips_step_on_device

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast for the forward pass and, with fp16, loss scaling. Parameters keep their dtype.

    With fp16, the loss scale is dynamic. Gradients are reduced before GradScaler reads them, so an inf on one rank
    propagates to all ranks. All ranks therefore skip the same steps and update the loss scale identically, without
    additional communication. Raises ConfigError if `device` does not support the dtype.
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
        """Return the context manager for the forward pass and the loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, self._dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call backward on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def loss_scale(self, factor: Tensor | None = None) -> Tensor | None:
        """Return the current loss scale multiplied by `factor`, by which the loss is already multiplied.

        Without `factor`, return the loss scale; without a loss scale, return `factor`. Does not synchronize with the
        device.
        """
        if self._scaler is None:
            return factor
        return self._scaler.scale(torch.ones((), device=self._device) if factor is None else factor)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, once per step."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step `optimizer`, unless a gradient is inf or nan in fp16. Return whether it stepped.

        With fp16 this synchronizes with the device.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        has_stepped = False
        skips_on_device = skips_step_on_device(optimizer)
        parameters_with_state = set(optimizer.state) if skips_on_device else set()

        def record_step(*_: Any) -> None:
            nonlocal has_stepped
            has_stepped = True

        handle = optimizer.register_step_post_hook(record_step)
        try:
            self._scaler.step(optimizer)
        finally:
            handle.remove()
        if skips_on_device:
            has_stepped = not found_non_finite(self._scaler, optimizer)
            if not has_stepped:
                # torch 2.14's fused SGD creates momentum buffers even for a skipped step, and does not initialize them.
                for parameter in [parameter for parameter in optimizer.state if parameter not in parameters_with_state]:
                    del optimizer.state[parameter]
        self._scaler.update()
        return has_stepped

    def discard_step(self) -> None:
        """Discard the state of a step that was not completed."""
        if self._scaler is not None:
            scaler = torch.amp.GradScaler(self._device_type)
            scaler.load_state_dict(self._scaler.state_dict())
            self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty unless the precision is fp16."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale. An empty state, from a run in another precision, has no effect."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def allow_tf32(allowed: bool | None) -> None:
    """Allow or forbid TF32 for float32 matrix multiplications and convolutions in this process; None keeps the
    settings."""
    if allowed is not None:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed

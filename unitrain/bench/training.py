"""Time training steps and their phases, on the ranks."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import unitrain
from unitrain import factories, randomness
from unitrain.backends.base import Backend
from unitrain.bench.results import PHASES
from unitrain.callbacks.callback import Callback
from unitrain.config import CHECKPOINT_SETTINGS, TrainConfig
from unitrain.optim.forward import Forward
from unitrain.optim.model_loss import ModelLoss
from unitrain.torch_compat import queue_backward_callback

# After the timed steps of a turn, this fraction of the steps, but at least the minimum, is repeated to time the phases.
_PROFILED_FRACTION = 0.25
_MIN_PROFILED_STEPS = 3
_PROCESS_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Settings of TrainConfig that a benchmark sets itself, in addition to max_steps.
FIXED_SETTINGS: dict[str, Any] = {
    "max_epochs": None,
    "max_seconds": None,
    "dry_run": False,
    "preemption_signals": (),
    "monitor": None,
    "output_dir": None,
    "resume": False,
    "metrics_port": None,
    **{name: getattr(TrainConfig, name) for name in CHECKPOINT_SETTINGS},
    "progress": "off",
    "log_every_n_steps": None,
}


class TrainTurnResult(NamedTuple):
    """The measurements of one turn (one of several interleaved runs) on this rank: `seconds` and `samples` per step,
    seconds per step by phase, peak memory, number of trainable parameters, and duration of the turn."""

    seconds: float
    samples: float
    phases: dict[str, float]
    memory_bytes: int
    parameters: int
    turn_seconds: float


class StepProfiler(Callback):
    """Callback that times the phases of a step. It wraps the forward function and the loss function.

    `data` ends when the batch is available, `forward` when the loss is computed, `backward` when the local backward
    pass is complete, and `exposed` when the gradients are reduced. `optimizer` is the rest of the step. On GPUs, the
    profiler synchronizes after each phase, so throughput is measured in separate steps.
    """

    def __init__(self, backend: Backend, forward: Forward, loss_fn: Callable[..., Any]) -> None:
        self.is_active = False
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.steps = self.samples = 0
        self._cuda = backend.device.type == "cuda"
        self._forward, self._loss_fn = forward, loss_fn
        self._phase_start_time: float | None = None

    def reset(self, *, is_active: bool) -> None:
        """Reset the counters. The first step is not profiled, because it includes the start of the data loader."""
        self.is_active = is_active
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.steps = self.samples = 0
        self._phase_start_time = None

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Call the user's forward function, or the model."""
        self._end_phase("data")
        return self._forward(model, batch)

    def loss(self, output: Any, target: Any) -> Any:
        """Call the user's loss function."""
        loss = self._loss_fn(output, target)
        self._end_phase("forward")
        value = loss[0] if isinstance(loss, tuple) else loss
        if self.is_active and isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(self._on_loss_gradient)
        return loss

    def on_micro_batch_end(self, trainer: Any, batch: Any, micro_batch: Any, loss: Any) -> None:
        self.samples += micro_batch.samples
        self._end_phase("exposed")

    def on_step_end(self, trainer: Any) -> None:
        if self._phase_start_time is not None:
            self._end_phase("optimizer")
            self.steps += 1
        elif self.is_active:
            self._phase_start_time = self._synchronized_time()

    def _on_loss_gradient(self, gradient: Tensor) -> None:
        # The gradient reduction queues its callback later, so its callback runs after this one.
        queue_backward_callback(lambda: self._end_phase("backward"))

    def _end_phase(self, phase: str) -> None:
        if self._phase_start_time is not None:
            now = self._synchronized_time()
            self.seconds[phase] += now - self._phase_start_time
            self._phase_start_time = now

    def _synchronized_time(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class _PreparedTraining(NamedTuple):
    trainer: Any
    data: Any
    profiler: StepProfiler


_prepared: dict[str, _PreparedTraining] = {}


def take_turn(
    backend: Backend, target: str, settings: Mapping[str, Any], batch_size: int | None, steps: int
) -> TrainTurnResult:
    """Train `target` for `steps` steps (at least 2) with `settings` of TrainConfig, then repeat some of the steps to
    time their phases.

    All ranks must call this function. `settings` must not contain `max_steps` or FIXED_SETTINGS, and take precedence
    over `batch_size`. `target` is passed to `factories.call_training_function`. The first turn with the same arguments
    creates the model, and later ones continue its training. Checkpoints, validation, schedulers, loggers and callbacks
    are disabled. Raises ConfigError and the errors of the Trainer.
    """
    start_time = time.perf_counter()
    key = json.dumps([target, dict(settings), batch_size, steps], default=str)
    if key not in _prepared:
        _prepared[key] = _prepare(backend, target, settings, batch_size, steps)
    trainer, data, profiler = _prepared[key]
    _reset_memory(backend)
    seconds = _fit(backend, trainer, data, profiler, num_done_steps=0, is_active=False)
    samples, memory_bytes = profiler.samples / steps, _peak_memory(backend)
    profiled = min(steps - 1, max(_MIN_PROFILED_STEPS, round(_PROFILED_FRACTION * steps)))
    _fit(backend, trainer, data, profiler, num_done_steps=steps - profiled - 1, is_active=True)
    phases = {phase: seconds / profiler.steps for phase, seconds in profiler.seconds.items()}
    trained = [parameter for parameter in backend.unwrap(trainer.model).parameters() if parameter.requires_grad]
    parameters = sum(parameter.numel() for parameter in trained)
    turn_seconds = time.perf_counter() - start_time
    return TrainTurnResult(seconds / steps, samples, phases, memory_bytes, parameters, turn_seconds)


def _prepare(
    backend: Backend, target: str, settings: Mapping[str, Any], batch_size: int | None, steps: int
) -> _PreparedTraining:
    randomness.seed_generators(0)
    arguments = factories.call_training_function(target)
    config: TrainConfig = arguments["config"]
    if batch_size is not None:
        settings = {"batch_size": batch_size, **settings}
    config = replace(config, **settings, **FIXED_SETTINGS, max_steps=steps)
    model = arguments["model"]
    forward = Forward(arguments.get("forward"), model)
    profiler = StepProfiler(backend, forward, arguments.get("loss_fn") or ModelLoss())
    trainer = unitrain.Trainer(
        model,
        arguments["optimizer"],
        profiler.loss,
        backend=backend,
        config=config,
        forward=profiler.forward,
        callbacks=[profiler],
    )
    return _PreparedTraining(trainer, arguments["train_data"], profiler)


def _fit(
    backend: Backend, trainer: Any, data: Any, profiler: StepProfiler, *, num_done_steps: int, is_active: bool
) -> float:
    """Train the steps after step `num_done_steps`. Return the seconds from barrier to barrier."""
    trainer.progress.reset(step=num_done_steps)
    profiler.reset(is_active=is_active)
    backend.barrier()
    start_time = time.perf_counter()
    trainer.fit(data)
    backend.barrier()
    return time.perf_counter() - start_time


def _reset_memory(backend: Backend) -> None:
    if backend.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(backend.device)
        return
    with contextlib.suppress(OSError):  # some containers do not have the file
        _CLEAR_REFS.write_text("5")  # resets VmHWM, see proc(5)


def _peak_memory(backend: Backend) -> int:
    """Return the peak memory in bytes since the last reset: allocated on the GPU, or resident in the process.

    If the system cannot reset the peak of the process, return the peak since the start of the process.
    """
    if backend.device.type == "cuda":
        return torch.cuda.max_memory_allocated(backend.device)
    if _PROCESS_STATUS.exists():
        match = re.search(r"^VmHWM:\s+(\d+) kB$", _PROCESS_STATUS.read_text(), re.MULTILINE)
        if match is not None:
            return int(match[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10

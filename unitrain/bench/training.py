"""What a rank runs in its turn at training: some steps of the Trainer, and where their time goes."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

import unitrain
from unitrain import factories, randomness
from unitrain.backends.base import Backend
from unitrain.bench.results import PARTS
from unitrain.callbacks.callback import Callback
from unitrain.config import TrainConfig
from unitrain.optim.step import Forward

# Of the steps of a turn, so many more are watched to find out where the time goes.
_WATCHED = 0.25
_LEAST_WATCHED = 3
_STATUS = Path("/proc/self/status")


class TrainTurn(NamedTuple):
    """Of this rank: seconds per step, samples per step, seconds by part of a step, the most memory in bytes, what the
    model has of parameters, and how long the whole turn took."""

    seconds: float
    samples: float
    parts: dict[str, float]
    memory: int
    parameters: int
    whole: float


class Stopwatch(Callback):
    """The last callback of a Trainer, and around its forward and loss: it takes the seconds of each part of a step.

    `data` lasts until the batch is there, `forward` until the loss is, `backward` until this rank's own is done,
    `exposed` until the gradients are those of all ranks, and `optimizer` is the rest. On a GPU each part is waited for,
    which is why the steps that it watches are others than those that speed is taken from.
    """

    def __init__(self, backend: Backend, forward: Any, loss_fn: Callable[..., Any]) -> None:
        self.watching = False
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = self.samples = 0
        self._cuda = backend.device.type == "cuda"
        self._forward, self._loss_fn = Forward(forward), loss_fn
        self._began: float | None = None

    def start(self, *, watching: bool) -> None:
        """Begin to count; the first step, which waits for the first batch, is not watched."""
        self.watching = watching
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = self.samples = 0
        self._began = None

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Call the user's own, or the model."""
        self._lap("data")
        return self._forward(model, batch)

    def loss(self, output: Any, target: Any) -> Any:
        """Call the user's own."""
        loss = self._loss_fn(output, target)
        self._lap("forward")
        value = loss[0] if isinstance(loss, tuple) else loss
        if self.watching and isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(self._watch_backward)
        return loss

    def on_micro_batch_end(self, trainer: Any, batch: Any, part: Any, loss: Any) -> None:
        self.samples += part.samples
        self._lap("exposed")

    def on_step_end(self, trainer: Any) -> None:
        if self._began is not None:
            self._lap("optimizer")
            self.steps += 1
        elif self.watching:
            self._began = self._now()

    def _watch_backward(self, gradient: Tensor) -> None:
        # What makes gradients global asks for its callback later than this, and is called behind it.
        Variable._execution_engine.queue_callback(lambda: self._lap("backward"))

    def _lap(self, part: str) -> None:
        if self._began is not None:
            now = self._now()
            self.seconds[part] += now - self._began
            self._began = now

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class _Prepared(NamedTuple):
    trainer: Any
    data: Any
    watch: Stopwatch


_prepared: dict[str, _Prepared] = {}


def take_turn(
    backend: Backend, target: str, settings: Mapping[str, Any], batch_size: int | None, steps: int
) -> TrainTurn:
    """Train `target`, as `factories.made_by` takes it, for `steps` steps, at least 2, with settings of TrainConfig.

    All ranks call it. The model is made in the first turn and goes on training in the others. Nothing is written,
    validated or resumed, and rates stay as they are: schedulers, loggers and callbacks are left out. Raises ConfigError
    and what the Trainer does.
    """
    began = time.perf_counter()
    key = json.dumps([target, dict(settings), batch_size, steps], default=str)
    if key not in _prepared:
        _prepared[key] = _prepare(backend, target, settings, batch_size, steps)
    trainer, data, watch = _prepared[key]
    _reset_memory(backend)
    seconds = _fit(backend, trainer, data, watch, done=0, watching=False)
    samples, memory = watch.samples / steps, _most_memory(backend)
    watched = min(steps - 1, max(_LEAST_WATCHED, round(_WATCHED * steps)))
    _fit(backend, trainer, data, watch, done=steps - watched - 1, watching=True)
    parts = {part: taken / watch.steps for part, taken in watch.seconds.items()}
    trained = [parameter for parameter in backend.unwrap(trainer.model).parameters() if parameter.requires_grad]
    parameters = sum(parameter.numel() for parameter in trained)
    return TrainTurn(seconds / steps, samples, parts, memory, parameters, time.perf_counter() - began)


def _prepare(
    backend: Backend, target: str, settings: Mapping[str, Any], batch_size: int | None, steps: int
) -> _Prepared:
    randomness.seed_generators(0)
    made = factories.made_by(target)
    config: TrainConfig = made["config"]
    plain: dict[str, Any] = {
        "max_epochs": None,
        "max_steps": steps,
        "max_seconds": None,
        "preemption_signals": (),
        "monitor": None,
        "output_dir": None,
        "resume": False,
        "checkpoint_every_epochs": 1,
        "checkpoint_every_steps": None,
        "keep_last": None,
        "keep_every": None,
        "keep_best": None,
        "progress": "off",
        "log_every_n_steps": None,
    }
    if batch_size is not None:
        plain["batch_size"] = batch_size
    config = replace(config, **plain, **settings)
    watch = Stopwatch(backend, made.get("forward"), made["loss_fn"])
    trainer = unitrain.Trainer(
        made["model"],
        made["optimizer"],
        watch.loss,
        backend=backend,
        config=config,
        forward=watch.forward,
        callbacks=[watch],
    )
    return _Prepared(trainer, made["train_data"], watch)


def _fit(backend: Backend, trainer: Any, data: Any, watch: Stopwatch, *, done: int, watching: bool) -> float:
    """Train as if `done` steps were, to the end, and return the seconds that it took, from barrier to barrier."""
    trainer.progress.reset(step=done)
    watch.start(watching=watching)
    backend.barrier()
    started = time.perf_counter()
    trainer.fit(data)
    backend.barrier()
    return time.perf_counter() - started


def _reset_memory(backend: Backend) -> None:
    if backend.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(backend.device)
    elif _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew: proc(5)


def _most_memory(backend: Backend) -> int:
    """Return the most bytes since the last reset: allocated on the GPU, or resident in the process."""
    if backend.device.type == "cuda":
        return torch.cuda.max_memory_allocated(backend.device)
    if _STATUS.exists():
        return next(int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if "VmHWM:" in line)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # since the process began, and in bytes on macOS

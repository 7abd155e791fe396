"""Time the steps of a run started by `unitrain tune`, and exit."""

from __future__ import annotations

import atexit
import dataclasses
import math
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unitrain.backends.local_sgd_config import LocalSGDConfig, parse_local_sgd
from unitrain.callbacks.callback import Callback
from unitrain.config import CHECKPOINT_SETTINGS, TrainConfig
from unitrain.errors import ConfigError
from unitrain.processes import usable_cores
from unitrain.trainer_arguments import TrainerArguments
from unitrain.tune.trial import TrialRequest, TrialResult

if TYPE_CHECKING:
    from unitrain.backends.base import Backend
    from unitrain.trainer import Trainer

_MIN_STEPS = 5

# Seconds of time.perf_counter(), or an event on a GPU.
_Time = float | torch.cuda.Event


def create_timer(request: str) -> StepTimer:
    """Create the timer of a run started by `unitrain tune` with `request`. See `bootstrap.overrides`."""
    return StepTimer(TrialRequest.parse(request))


class StepTimer(Callback):
    """The last callback of a timed run. After the timed steps, it raises SystemExit, so that the rest of the script
    does not use a partially trained model.
    """

    def __init__(self, request: TrialRequest) -> None:
        self._request = request
        self._steps, self._is_finished = 0, False
        self._period = 1  # number of steps after which the communication of local SGD repeats
        self._steps_to_time: int | None = None  # set at the end of the warm-up
        self._timed_steps = 0  # steps in complete periods since the end of the warm-up

    def override(self, arguments: TrainerArguments, backend: Backend) -> TrainerArguments:
        """Return `arguments` modified for the timed run: without checkpoints, output or a time limit.

        Validation is limited to one batch per epoch, because the steps of two runs may contain different numbers of
        validations. Local SGD starts without synchronous steps, which would be timed instead of the local steps.
        """
        changes: dict[str, Any] = {"max_seconds": None, "output_dir": None, "resume": False, "progress": "off"}
        changes |= {"dry_run": False, "limit_val_batches": 1, "validate_every_steps": None}
        changes |= {name: getattr(TrainConfig, name) for name in CHECKPOINT_SETTINGS}  # no checkpoints are written
        changes |= self._request.changes
        if isinstance(changes.get("local_sgd"), dict):
            changes["local_sgd"] = LocalSGDConfig(**changes["local_sgd"])
        config = dataclasses.replace(arguments.config, **changes)
        if isinstance(config.local_sgd, LocalSGDConfig):
            config = dataclasses.replace(config, local_sgd=dataclasses.replace(config.local_sgd, warmup_steps=0))
        return dataclasses.replace(arguments, config=config, callbacks=[*arguments.callbacks, self])

    def on_fit_start(self, trainer: Trainer) -> None:
        local_sgd = trainer.config.local_sgd
        self._period = 1 if local_sgd is None else parse_local_sgd(local_sgd, "TrainConfig.local_sgd").steps
        self._start = self._record_time(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        self._steps += 1
        if self._steps_to_time is None:
            if self._steps == self._request.warmup_steps // 2:  # the first steps are the slowest
                self._start = self._record_time(trainer)
            elif self._steps == self._request.warmup_steps:
                per_step = _seconds_between(self._start, self._record_time(trainer)) / (
                    self._request.warmup_steps - self._request.warmup_steps // 2
                )
                slowest = trainer.backend.allreduce(
                    torch.tensor(per_step, dtype=torch.float64, device="cpu"), "max"
                ).item()
                self._steps_to_time = self._round_up_to_periods(
                    max(_MIN_STEPS, math.ceil(self._request.seconds / slowest))
                )
                self._steps, self._start = 0, self._record_time(trainer)
        elif self._steps % self._period == 0:
            self._timed_steps, self._end = self._steps, self._record_time(trainer)
            if self._steps == self._steps_to_time:
                self._finish(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._is_finished or not trainer.is_finished:
            return  # `_finish` or an exception is already ending the run
        warmup, min_steps = self._request.warmup_steps, self._round_up_to_periods(_MIN_STEPS)
        if self._timed_steps >= min_steps:
            self._finish(trainer)
        num_steps = self._steps if self._steps_to_time is None else warmup + self._steps
        raise ConfigError(
            f"The run ended after {num_steps} steps, but timing needs {warmup + min_steps}. Train "
            "longer, for example with more epochs: unitrain tune ends the run after the timed steps."
        )

    def _round_up_to_periods(self, steps: int) -> int:
        """Return `steps`, rounded up to complete periods. With local SGD, only complete periods are timed, so that the
        mean step time includes synchronizations in proportion."""
        return math.ceil(steps / self._period) * self._period

    def _record_time(self, trainer: Trainer) -> _Time:
        """Return the time at which the device completes the steps so far. This method does not wait for the device,
        because it would also wait for the overlapped transfers of local SGD."""
        device = trainer.backend.device
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _finish(self, trainer: Trainer) -> NoReturn:
        self._is_finished = True
        backend = trainer.backend
        per_step = _seconds_between(self._start, self._end) / self._timed_steps
        slowest = backend.allreduce(torch.tensor(per_step, dtype=torch.float64, device="cpu"), "max").item()
        # Launchers may bind each rank to separate cores, so the cores of a host are the cores of all its ranks.
        affinities = backend.allgather_object((backend.node_rank, usable_cores()))
        cores = len({core for node, usable in affinities if node == backend.node_rank for core in usable})
        if backend.rank == 0:
            on_gpu = backend.device.type == "cuda"
            result = TrialResult(
                seconds_per_step=slowest,
                steps=self._timed_steps,
                backend=backend.name,
                transport=backend.transport,
                size=backend.size,
                num_nodes=backend.num_nodes,
                threads=None if on_gpu else torch.get_num_threads(),
                cores_per_rank=max(1, cores // backend.local_size),
            )
            sys.stdout.write(f"{result.format_line()}\n")
            sys.stdout.flush()
        backend.barrier()
        atexit.register(backend.shutdown)
        raise SystemExit(0)


def _seconds_between(start: _Time, end: _Time) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3

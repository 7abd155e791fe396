"""What takes part in a run that `unitrain tune` started: it times the steps, and ends the run."""

from __future__ import annotations

import atexit
import dataclasses
import math
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unitrain.callbacks.callback import Callback
from unitrain.config import CHECKPOINT_SETTINGS, TrainConfig
from unitrain.errors import ConfigError
from unitrain.processes import usable_cores
from unitrain.trainer_overrides import TrainerArguments
from unitrain.tune.trial import Request, Result

if TYPE_CHECKING:
    from unitrain.backends.base import Backend
    from unitrain.trainer import Trainer

_LEAST_STEPS = 5


def create_timer(request: str) -> StepTimer:
    """Return the timer of a run that `unitrain tune` started with `request`. See `trainer_overrides`."""
    return StepTimer(Request.read(request))


class StepTimer(Callback):
    """The last callback of a run that is timed. It ends the process with SystemExit when it has timed enough steps:
    nothing that the script does with a trained model happens to one that is not."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._steps, self._ended = 0, False
        self._most: int | None = None  # steps to time, agreed when the warm-up is over

    def override(self, arguments: TrainerArguments, backend: Backend) -> TrainerArguments:
        """Return `arguments` with which the run is timed: without checkpoints, output and time limit."""
        changes: dict[str, Any] = {"max_seconds": None, "output_dir": None, "resume": False, "progress": "off"}
        changes |= {name: getattr(TrainConfig, name) for name in CHECKPOINT_SETTINGS}  # of what is not written
        if self._request.compression is not None:
            changes["compression"] = self._request.compression
        config = dataclasses.replace(arguments.config, **changes)
        return dataclasses.replace(arguments, config=config, callbacks=[*arguments.callbacks, self])

    def on_fit_start(self, trainer: Trainer) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Trainer) -> None:
        self._steps += 1
        if self._most is None:
            if self._steps == self._request.warmup // 2:  # the first steps are slower than any
                self._began = self._now(trainer)
            elif self._steps == self._request.warmup:
                per_step = (self._now(trainer) - self._began) / (self._request.warmup - self._request.warmup // 2)
                slowest = trainer.backend.allreduce(torch.tensor(per_step, dtype=torch.float64), "max").item()
                self._most = max(_LEAST_STEPS, math.ceil(self._request.seconds / slowest))
                self._steps, self._began = 0, self._now(trainer)
        elif self._steps == self._most:
            self._end(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._ended or not trainer.is_finished:
            return  # `_end` itself, or an exception, is on its way
        if self._most is not None and self._steps >= _LEAST_STEPS:
            self._end(trainer)
        raise ConfigError(
            f"The run ended after {self._steps} steps, too few to be timed. Let it train longer, as by more epochs: "
            "unitrain tune ends it in time."
        )

    def _now(self, trainer: Trainer) -> float:
        if trainer.backend.device.type == "cuda":
            torch.cuda.synchronize(trainer.backend.device)
        return time.perf_counter()

    def _end(self, trainer: Trainer) -> NoReturn:
        self._ended = True
        backend = trainer.backend
        per_step = (self._now(trainer) - self._began) / self._steps
        slowest = backend.allreduce(torch.tensor(per_step, dtype=torch.float64), "max").item()
        # Launchers may bind each rank to cores of its own, so the cores of a host are those of all its ranks.
        affinities = backend.allgather_object((backend.node_rank, usable_cores()))
        cores = len({core for node, usable in affinities if node == backend.node_rank for core in usable})
        if backend.rank == 0:
            on_gpu = backend.device.type == "cuda"
            result = Result(
                seconds_per_step=slowest,
                steps=self._steps,
                backend=backend.name,
                transport=backend.transport,
                size=backend.size,
                num_nodes=backend.num_nodes,
                threads=None if on_gpu else torch.get_num_threads(),
                cores_per_rank=max(1, cores // backend.local_size),
            )
            sys.stdout.write(f"{result.text()}\n")
            sys.stdout.flush()
        backend.barrier()
        atexit.register(backend.shutdown)
        raise SystemExit(0)

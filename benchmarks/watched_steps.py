"""Cost of the flight recorder, the failure monitor and the check for signals in microseconds per step, for
`watch_cost.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from loops import BATCH, FEATURES, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unitrain.backends.base import Backend
from unitrain.backends.gradients.ddp_wrapper import DistributedModel
from unitrain.monitoring.flight_recorder import CollectiveCall, FlightRecorder
from unitrain.progress.stopping import StopCoordinator

STEP_SECONDS = 0.005
MEASURED = ("gradients", "flight recorder", "heartbeat", "signals")
_HEARTBEAT_SECONDS, _AGREE_SECONDS = 0.5, 2.0
_STEPS, _CALLS = 300, 5000

_models: list[nn.Module] = []


def measure_microseconds(backend: Backend) -> dict[str, float]:
    """Return the overhead of each of MEASURED in microseconds per step of STEP_SECONDS. All ranks must call this
    function.

    - gradients: the median difference between adjacent steps with and without the monitored group for buckets.
    - flight recorder: recording one collective. A step of the Trainer calls less than one collective on average.
    - heartbeat: the two requests to the store that the failure monitor sends twice per second.
    - signals: checking whether a sync point is due in each step, and a sync point every two seconds.
    """
    if not _models:
        _models.extend([_wrap_model(backend, watched=False), _wrap_model(backend, watched=True)])
    backend.barrier()
    taken = []
    for number in range(_STEPS):
        order = _models if number % 2 else _models[::-1]
        seconds = {id(model): _seconds_per_call(partial(_step, model), 1) for model in order}
        taken.append([seconds[id(model)] for model in _models])
    flight_recorder, call = FlightRecorder(), CollectiveCall(1, "allreduce", "mean", dtype=torch.float32, shape=(2,))
    watchdog: Any = backend._monitor._watchdog  # type: ignore[attr-defined]
    with StopCoordinator(backend, max_seconds=None, signals=["SIGUSR1"]) as stopping:
        due = _seconds_per_call(lambda: stopping.is_due(0), _CALLS)
        agree = _seconds_per_call(lambda: stopping.exchange(1, [0.0, 0.0]), 20)
    heartbeat_seconds = _seconds_per_call(watchdog._poll_store, 50)
    costs = {
        "gradients": statistics.median(watched - bare for bare, watched in taken),
        "flight recorder": _seconds_per_call(lambda: flight_recorder.record(call), _CALLS),
        "heartbeat": heartbeat_seconds * STEP_SECONDS / _HEARTBEAT_SECONDS,
        "signals": due + agree * STEP_SECONDS / _AGREE_SECONDS,
    }
    return {part: cost * 1e6 for part, cost in costs.items()}


def _wrap_model(backend: Backend, *, watched: bool) -> nn.Module:
    torch.manual_seed(1)
    kept = DistributedModel._ddp_init_helper
    if not watched:
        DistributedModel._ddp_init_helper = DistributedDataParallel._ddp_init_helper  # type: ignore[method-assign]
    try:
        return backend.distributed_model(network([64, 64]))
    finally:
        DistributedModel._ddp_init_helper = kept  # type: ignore[method-assign]


def _step(model: nn.Module) -> None:
    model(torch.ones(BATCH, FEATURES)).square().mean().backward()
    model.zero_grad()


def _seconds_per_call(action: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - started) / times

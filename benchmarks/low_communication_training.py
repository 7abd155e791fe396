"""Train the GPT of examples/gpt.py with each method of low-communication training. See low_communication.py."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hierarchical_reduction_steps import sent_bytes
from torch import Tensor, nn

import unitrain

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, LENGTH, loss_and_count, paragraphs

__all__ = ["ALONE", "LENGTH", "OUTER_LR", "OUTER_MOMENTUM", "SYNCHRONOUS", "Method", "Workload", "build", "methods"]

ALONE = "without communication"
SYNCHRONOUS = "synchronous"
OUTER_LR, OUTER_MOMENTUM = 1.0, 0.6  # of DiLoCo: the best of the tested values, see docs/guides/low_communication.md
# Methods without local steps first train for `FIRST_STEPS` steps, because DDP changes its buckets after the first step,
# and Horovod sends more messages to start the first 16 operations of a size. Methods with local steps first complete
# these operations. Each turn of a method without local steps then begins with `WARMUP_STEPS` steps that are not
# measured, and measures a multiple of `MIN_STEPS` steps.
FIRST_STEPS, WARMUP_STEPS, MIN_STEPS = 20, 4, 4


@dataclass(frozen=True)
class Workload:
    """The size of the model, and the number of texts per rank and step."""

    width: int = 128
    layers: int = 3
    batch: int = 16


@dataclass(frozen=True)
class Method:
    """Synchronous training with gradient `compression`, or local steps.

    `predicted_method` is the name of the method in `unitrain bench predict`. Without communication, every rank trains
    separately.
    """

    compression: Any = "none"
    local_sgd: unitrain.LocalSGDConfig | None = None
    predicted_method: str | None = None
    communicates: bool = True


def methods(
    steps: int, *, warmup_steps: int = 0, outer_lr: float = OUTER_LR, outer_momentum: float = OUTER_MOMENTUM
) -> dict[str, Method]:
    """Return the methods by name.

    Local SGD and DiLoCo take `steps` local steps between synchronizations, after `warmup_steps` synchronous steps.
    `outer_lr` and `outer_momentum` are the settings of the outer optimizer of DiLoCo.
    """
    local_sgd = partial(_local_sgd_method, steps=steps, warmup_steps=warmup_steps)
    diloco = partial(local_sgd, outer_lr=outer_lr, outer_momentum=outer_momentum)
    return {
        ALONE: Method(communicates=False),
        SYNCHRONOUS: Method(predicted_method="synchronous"),
        "synchronous, bf16": Method("bf16", predicted_method="bf16"),
        "synchronous, PowerSGD": Method(unitrain.PowerSGD(rank=4, start_step=20)),
        "local SGD": local_sgd("local-sgd"),
        "DiLoCo": diloco("local-sgd"),
        "DiLoCo, bf16": diloco("local-sgd-bf16", compression="bf16"),
        "DiLoCo, int8": diloco("local-sgd-int8", compression="int8"),
        "DiLoCo, streaming": diloco("streaming", fragments=5, overlap_steps=5),
    }


def _local_sgd_method(predicted_method: str, **settings: Any) -> Method:
    return Method(local_sgd=unitrain.LocalSGDConfig(**settings), predicted_method=predicted_method)


def build(workload: Workload) -> nn.Module:
    """Return the untrained model, which is the same for every method."""
    torch.manual_seed(0)
    return GPT(width=workload.width, layers=workload.layers)


def samples() -> tuple[Tensor, Tensor]:
    """Return the texts for training and validation, with shape [texts, length + 1]."""
    inputs, targets = paragraphs().tensors
    texts = torch.cat([inputs, targets[:, -1:]], dim=1)
    texts = texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))]
    return texts[500:], texts[:500]


def mean_loss(model: nn.Module, texts: Tensor) -> Tensor:
    """Return the loss per character."""
    total, count = loss_and_count(model(texts[:, :-1]), texts[:, 1:])
    return total / count


class Training:
    """A model that is trained with AdamW and a `method`, on random texts of each rank."""

    def __init__(
        self,
        backend: unitrain.Backend,
        method: Method,
        workload: Workload,
        *,
        steps: int,
        peak_lr: float,
        seed: int,
    ) -> None:
        self._texts, self._validation = samples()
        self._batch = workload.batch
        self._model = build(workload)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=peak_lr, fused=True)
        self._scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, peak_lr, total_steps=steps + 1, pct_start=0.1
        )
        self._local_sgd = None
        if method.local_sgd is not None:
            self._local_sgd = unitrain.LocalSGD(self._model, self._optimizer, backend, method.local_sgd)
        self._distributed = self._model
        if method.local_sgd is None and method.communicates:
            self._distributed = backend.distributed_model(self._model, compression=method.compression)
            backend.distributed_optimizer(self._optimizer, self._distributed)
        self._generator = torch.Generator().manual_seed(1000 * seed + backend.rank)

    def run(self, steps: int) -> None:
        """Train for `steps` steps."""
        for _ in range(steps):
            chosen = torch.randint(len(self._texts), (self._batch,), generator=self._generator)
            mean_loss(self._distributed, self._texts[chosen]).backward()
            if self._local_sgd is not None:
                self._local_sgd.reduce_gradients()  # only during the warm-up
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._scheduler.step()
            self.after_step()

    def after_step(self) -> None:
        """Count a step, and synchronize the weights of the ranks if a synchronization is due."""
        if self._local_sgd is not None:
            self._local_sgd.step()

    def synchronize(self) -> None:
        """Synchronize the weights of the ranks."""
        if self._local_sgd is not None:
            self._local_sgd.synchronize()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the validation loss of the mean weights over all ranks or, without communication, of this rank's
        weights. All ranks evaluate the same texts."""
        with nullcontext() if self._local_sgd is None else self._local_sgd.averaged_weights():
            losses = [mean_loss(self._model, part) for part in self._validation.split(100)]
        return float(torch.stack(losses).mean())


def train_and_validate(
    backend: unitrain.Backend,
    method: Method,
    workload: Workload,
    *,
    steps: int,
    evaluate_every: int,
    peak_lr: float,
    seed: int,
) -> list[tuple[int, float]]:
    """Train for `steps` steps, and return the validation losses as pairs (step, loss)."""
    training = Training(backend, method, workload, steps=steps, peak_lr=peak_lr, seed=seed)
    curve = []
    for step in range(evaluate_every, steps + 1, evaluate_every):
        training.run(evaluate_every)
        if step == steps:
            training.synchronize()
        curve.append((step, training.validation_loss()))
    return curve


def measure_losses(
    backend: unitrain.Backend,
    chosen: dict[str, Method],
    workload: Workload,
    *,
    peak_lrs: Sequence[float],
    seeds: int,
    steps: int,
    evaluate_every: int,
) -> dict[str, Any]:
    """Return the runs of each method with the best peak learning rate, which is selected with seed 0."""
    found: dict[str, Any] = {}
    for name, method in chosen.items():
        run = partial(train_and_validate, backend, method, workload, steps=steps, evaluate_every=evaluate_every)
        by_lr = {peak_lr: run(peak_lr=peak_lr, seed=0) for peak_lr in peak_lrs}
        best = min(by_lr, key=lambda peak_lr: by_lr[peak_lr][-1][1])
        curves = [by_lr[best], *(run(peak_lr=best, seed=seed) for seed in range(1, seeds))]
        found[name] = {"tried": {str(lr): curve[-1][1] for lr, curve in by_lr.items()}, "best": best, "curves": curves}
        if backend.rank == 0:
            print(name, found[name]["tried"], [curve[-1] for curve in curves], flush=True)
    return found


def measure_speeds(
    backend: unitrain.Backend,
    chosen: dict[str, Method],
    workload: Workload,
    *,
    seconds: float,
    rounds: int,
    local_steps: int,
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per step and the bytes that this host sends per step, by method and round.

    The methods take turns of about `seconds` seconds. With local steps, the number of steps in a turn is a multiple of
    `local_steps`.
    """
    turns: dict[str, tuple[Training, int, int]] = {}
    for name, method in chosen.items():
        if isinstance(method.compression, unitrain.PowerSGD):
            method = replace(method, compression=replace(method.compression, start_step=2))
        training = Training(backend, method, workload, steps=10**6, peak_lr=1e-3, seed=0)
        if method.local_sgd is None:
            warmup, unit = WARMUP_STEPS, MIN_STEPS
            training.run(FIRST_STEPS)
        else:
            warmup = unit = local_steps
            for _ in range(backend.num_slow_operations * local_steps):
                training.after_step()  # without computation, which saves time
            training.run(local_steps)
        _, per_step = measure_steps(backend, training, unit)
        turns[name] = training, warmup, unit * backend.broadcast_object(math.ceil(seconds / (per_step * unit)))
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "bytes": []} for name in turns}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(turns), len(turns)):
            training, warmup, steps = turns[name]
            training.run(warmup)
            sent, per_step = measure_steps(backend, training, steps)
            training.synchronize()  # completes transfers that overlap with the next steps
            found[name]["seconds"].append(per_step)
            found[name]["bytes"].append(sent)
        if backend.rank == 0:
            print({name: statistics.median(measured["seconds"]) for name, measured in found.items()}, flush=True)
    return found


def measure_steps(backend: unitrain.Backend, training: Training, steps: int) -> tuple[float, float]:
    """Train for `steps` steps, and return the bytes sent by this host and the seconds, both per step."""
    backend.barrier()
    before, start = sent_bytes(), time.perf_counter()
    training.run(steps)
    backend.barrier()  # waits until the other host has received all bytes
    return (sent_bytes() - before) / steps, (time.perf_counter() - start) / steps


def main() -> None:
    """Measure losses or speeds, and print the results. The arguments are a JSON object; see low_communication.py."""
    given = json.loads(sys.argv[1])
    measure = {"losses": measure_losses, "speeds": measure_speeds}[given["measure"]]
    available = methods(given["local_steps"], **given["settings"])
    chosen = {name: available[name] for name in given["methods"]}
    with unitrain.init(device="cpu") as backend:
        results = measure(backend, chosen, Workload(**given["workload"]), **given["arguments"])
        if backend.rank == 0:
            print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()

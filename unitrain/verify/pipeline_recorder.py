"""Record the steps of a Pipeline in a run started by `unitrain verify`.

The reference is one process that computes all stages on the batches of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unitrain.backends.objects import broadcast_with_tensors
from unitrain.data.batch import map_tensors
from unitrain.verify.digests import digest_samples, digest_tensor
from unitrain.verify.record import TENSORS_FILE, RankRecord, RecordRequest, StepRecord
from unitrain.verify.snapshots import (
    batch_statistics,
    copy_state,
    copy_to_cpu,
    largest_difference,
    rng_digests,
    to_double,
)

if TYPE_CHECKING:
    from unitrain.backends.base import Backend
    from unitrain.backends.pipeline.overrides import PipelineArguments


class PipelineRecorder:
    """Overrides the arguments of a Pipeline, and records its steps.

    A step consists of the batches before an `optimizer.step()`, and ends when the next batch starts. When the requested
    steps have ended, the recorder writes the record and raises SystemExit. In a shorter run, it writes the record at
    the end of the block `with unitrain.init()`.
    """

    def __init__(self, folder: Path, request: RecordRequest) -> None:
        self._folder, self._request = folder, request
        self._steps: list[StepRecord] = []
        self._is_started = self._is_written = False  # `_is_started`: after the first batch has started
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._reset_step()

    def override(self, arguments: PipelineArguments, backend: Backend) -> PipelineArguments:
        """Return `arguments` modified for the recorded run.

        A run with one process computes all stages on the batches of all replicas. If requested, the model and the data
        are converted to double precision.
        """
        model, stages = cast(Any, arguments.model), cast(Any, arguments.stages)
        if not isinstance(model, nn.Sequential) or not isinstance(stages, int):
            return arguments  # the Pipeline raises an error
        if backend.size == 1:
            replicas = max(1, self._request.emulated_ranks // max(1, stages))
            arguments = replace(arguments, stages=1, replicas_per_rank=replicas)
        if self._request.float64 and len(model):
            loss_fn = arguments.loss_fn
            model.double()
            if isinstance(loss_fn, nn.Module):
                loss_fn.double()
            model[0].register_forward_pre_hook(lambda _, inputs: map_tensors(to_double, inputs))
            arguments = replace(
                arguments, loss_fn=lambda output, targets: loss_fn(output, map_tensors(to_double, targets))
            )
        return arguments

    def on_pipeline_start(self, module: nn.Module, stages: int, backend: Backend) -> None:
        """Observe the steps of the optimizers of `module`, the stage of this rank."""
        self._module, self._stages, self._backend = module, stages, backend
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._hook = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: self._on_optimizer_step(optimizer)
        )
        backend.call_before_exit(self._write)

    def on_batch_start(self) -> None:
        """End the previous step if an optimizer has stepped since the previous batch.

        After the requested number of steps, write the record and raise SystemExit.
        """
        if not self._is_started:
            self._is_started = True
            self._start = {name: copy_to_cpu(parameter) for parameter, name in self._names.items()}
            self._start_digests = {name: digest_tensor(parameter) for parameter, name in self._names.items()}
            self._initial_rng_digests = rng_digests(self._backend.device)
        self._end_step()
        if len(self._steps) == self._request.steps:
            self._write()
            raise SystemExit(0)

    def on_batch_end(self, batch: Any, micro_batch_sizes: Sequence[int], loss_weight: float, loss: Tensor) -> None:
        """Record the samples and the loss of a batch on the first stage of each replica."""
        if self._backend.rank % self._stages or not loss_weight:  # a dummy batch has weight 0
            self._samples.append(0)
            return
        samples = sum(micro_batch_sizes)
        self._samples += micro_batch_sizes
        self._losses.append(float(loss) * samples)
        self._weight += samples
        self._digest += digest_samples(map_tensors(Tensor.cpu, batch), samples)

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if any(parameter in self._names for group in optimizer.param_groups for parameter in group["params"]):
            self._optimizers[id(optimizer)] = optimizer
            self._learning_rates[id(optimizer)] = [
                float(group["lr"]) for group in optimizer.param_groups if "lr" in group
            ]

    def _end_step(self) -> None:
        if not self._learning_rates:
            return
        self._steps.append(
            StepRecord(
                loss=sum(self._losses),
                weight=self._weight,
                samples=self._samples,
                digest=self._digest,
                learning_rates=[rate for rates in self._learning_rates.values() for rate in rates],
            )
        )
        self._reset_step()

    def _reset_step(self) -> None:
        self._losses: list[float] = []
        self._samples: list[int] = []
        self._learning_rates: dict[int, list[float]] = {}
        self._weight, self._digest = 0.0, 0

    def _write(self) -> None:
        """Write the record of this rank and, on rank 0, the parameters and optimizer state. All ranks must call this
        method."""
        if self._is_written or not self._is_started:
            return
        self._is_written = True
        self._hook.remove()
        self._end_step()
        backend, current = self._backend, rng_digests(self._backend.device)
        own = {
            "start": self._start_digests,
            "end": {name: digest_tensor(parameter) for parameter, name in self._names.items()},
            "max_change": {
                name: largest_difference(copy_to_cpu(parameter), self._start[name])
                for parameter, name in self._names.items()
            },
        }
        used = [name for name, digest in self._initial_rng_digests.items() if digest != current[name]]
        gathered = backend.allgather_object((own, used, batch_statistics(self._module)))
        first = backend.rank - backend.rank % self._stages
        stages = [gathered[rank][0] for rank in range(first, first + self._stages)]
        RankRecord(
            rank=backend.rank,
            size=backend.size,
            backend=backend.name,
            transport=backend.transport,
            device=str(backend.device),
            optimizer=", ".join(type(optimizer).__name__ for optimizer in self._optimizers.values()),
            steps=self._steps,
            used_rngs=sorted({name for _, names, _ in gathered for name in names}),
            has_fixed_global_batch_size=False,
            batch_statistics=next((statistics for _, _, statistics in gathered if statistics != "none"), "none"),
            compression_dtype="none",
            **{key: {name: value for stage in stages for name, value in stage[key].items()} for key in own},
        ).write(self._folder)
        self._save_tensors()
        backend.barrier()

    def _save_tensors(self) -> None:
        own = {f"parameter {name}": copy_to_cpu(parameter) for parameter, name in self._names.items()}
        for optimizer in self._optimizers.values():
            for parameter, entry in optimizer.state.items():
                if (name := self._names.get(cast(nn.Parameter, parameter))) is not None:
                    own |= copy_state(name, entry)
        tensors: dict[str, Tensor] = {}
        for stage in range(self._stages):
            tensors |= broadcast_with_tensors(self._backend, own, root=stage)
        if self._backend.rank == 0:
            save_file(tensors, self._folder / TENSORS_FILE)

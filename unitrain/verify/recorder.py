"""Record the steps of a run started by `unitrain verify`, and exit after the requested steps."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors.torch import save_file
from torch import Tensor, nn

from unitrain.accumulation import scale_accumulation
from unitrain.backends.sharding.state_format import gather_complete_tensor
from unitrain.callbacks.callback import Callback
from unitrain.data.batch import map_tensors
from unitrain.errors import ConfigError
from unitrain.optim.step import optimizer_parameters
from unitrain.trainer_arguments import TrainerArguments
from unitrain.verify.digests import digest_samples, digest_tensor
from unitrain.verify.pipeline_recorder import PipelineRecorder
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
    from unitrain.data.order import MicroBatch
    from unitrain.optim.loss_weighting import Loss
    from unitrain.trainer import Trainer


def create_recorder(folder: str) -> Recorder:
    """Create the recorder, which writes to `folder`, for a run of `unitrain verify`. See `bootstrap.overrides`."""
    return Recorder(Path(folder))


class Recorder(Callback):
    """The last callback of a verified run, so that the record includes the effects of all other callbacks.

    After the requested steps, or at the end of the run, it writes the record and raises SystemExit, so that the rest of
    the script does not use a partially trained model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._request = folder, RecordRequest.read(folder)
        self._steps: list[StepRecord] = []
        self._has_fixed_global_batch_size = self._is_written = False
        self._reset_step()

    def override(self, arguments: TrainerArguments, backend: Backend) -> TrainerArguments:
        """Return `arguments` modified for the recorded run.

        The settings that determine the length of the run are unchanged, because learning-rate schedules depend on them;
        only `max_seconds` is removed. Raises ConfigError for local SGD, and with RecordRequest.bits if the script does
        not set logical ranks.
        """
        config, model = arguments.config, arguments.model
        loss_fn, forward = arguments.loss_fn, arguments.forward
        if self._request.bits and config.logical_ranks is None:
            raise ConfigError(
                "unitrain verify --bits compares runs on different numbers of ranks, which have the same bits only "
                "with logical ranks. Use TrainConfig(logical_ranks=8, ...) in the script, or leave --bits out."
            )
        if config.local_sgd is not None:
            raise ConfigError(
                "unitrain verify compares runs on different numbers of ranks, whose results differ with local steps. "
                "Leave TrainConfig.local_sgd out to verify the script."
            )
        # `unitrain verify` itself reports ranks whose weights differ.
        changes: dict[str, Any] = {"max_seconds": None, "check_weights": False}
        if config.output_dir is not None:
            changes["output_dir"] = self._folder / "output"
        # With logical ranks, the global batch size does not depend on the number of ranks.
        self._has_fixed_global_batch_size = config.global_batch_size is not None or config.logical_ranks is not None
        if not self._has_fixed_global_batch_size and backend.size < self._request.emulated_ranks:
            # SyncBatchNorm normalizes over the samples of all ranks, so a single process needs them in one micro-batch.
            needs_one_micro_batch = config.batch_size is not None and (
                config.sync_batch_norm or batch_statistics(model) == "all"
            )
            name = "batch_size" if needs_one_micro_batch else "gradient_accumulation_steps"
            changes[name] = scale_accumulation(getattr(config, name), self._request.emulated_ranks, backend.size)
        if self._request.float64:
            changes["precision"] = "fp32"  # disables autocast
            loss_fn, forward = _convert_to_double(model, loss_fn, forward)
        return TrainerArguments(
            model=model,
            loss_fn=loss_fn,
            config=replace(config, **changes),
            callbacks=[*arguments.callbacks, self],
            forward=forward,
        )

    def pipeline_overrides(self) -> PipelineRecorder:
        """Return the recorder of a Pipeline, which a script may use instead of a Trainer.

        Raises ConfigError with RecordRequest.bits.
        """
        if self._request.bits:
            raise ConfigError(
                "unitrain verify --bits requires logical ranks, which a Pipeline does not support. Leave --bits out."
            )
        return PipelineRecorder(self._folder, self._request)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._start_digests = _gather_parameter_digests(trainer)
        self._start_values = {name: copy_to_cpu(parameter) for name, parameter in _gather_parameters(trainer).items()}
        self._initial_rng_digests = rng_digests(trainer.backend.device)

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: MicroBatch, loss: Loss) -> None:
        self._samples.append(micro_batch.samples)
        if not micro_batch.samples:  # a dummy batch
            return
        value = float(loss.value.detach())
        self._losses.append(value * micro_batch.samples if loss.tokens is None else value)
        self._loss_weights.append(float(micro_batch.samples if loss.tokens is None else loss.tokens))
        self._sample_digest += digest_samples(map_tensors(Tensor.cpu, batch), micro_batch.samples)

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self._learning_rates[:] = [
            float(group["lr"]) for group in trainer.optimizer.param_groups if group.get("lr") is not None
        ]

    def on_step_end(self, trainer: Trainer) -> None:
        self._steps.append(
            StepRecord(
                loss=sum(self._losses),
                weight=sum(self._loss_weights),
                samples=self._samples,
                digest=self._sample_digest,
                learning_rates=self._learning_rates,
                losses=self._losses if self._request.bits else (),
                tensors=_tensor_digests(trainer) if self._request.bits else {},
            )
        )
        self._reset_step()
        if len(self._steps) == self._request.steps:
            self._finish(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if trainer.is_finished and not self._is_written:  # otherwise an exception or `_finish` ended the run
            self._finish(trainer)

    def _reset_step(self) -> None:
        self._losses: list[float] = []
        self._loss_weights: list[float] = []
        self._samples: list[int] = []
        self._learning_rates: list[float] = []
        self._sample_digest = 0

    def _finish(self, trainer: Trainer) -> NoReturn:
        self._is_written = True
        backend = trainer.backend
        before, after = self._initial_rng_digests, rng_digests(backend.device)
        record = RankRecord(
            rank=backend.rank,
            size=backend.size,
            backend=backend.name,
            transport=backend.transport,
            device=str(backend.device),
            optimizer=type(trainer.optimizer).__name__,
            steps=self._steps,
            start=self._start_digests,
            end=_gather_parameter_digests(trainer),
            max_change={
                name: largest_difference(copy_to_cpu(parameter), self._start_values[name])
                for name, parameter in _gather_parameters(trainer).items()
            },
            used_rngs=[name for name in before if before[name] != after[name]],
            has_fixed_global_batch_size=self._has_fixed_global_batch_size,
            batch_statistics=batch_statistics(backend.unwrap(trainer.model)),
            compression_dtype=compression
            if (compression := trainer.config.compression) in ("fp16", "bf16")
            else "none",
        )
        tensors = _gather_tensors(trainer) if backend.rank == 0 or trainer.config.shard != "none" else {}
        if backend.rank == 0:
            save_file(tensors, self._folder / TENSORS_FILE)
        record.write(self._folder)
        backend.barrier()
        atexit.register(backend.shutdown)
        raise SystemExit(0)


def _gather_parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Return the complete parameters by name. All ranks must call this function if parameters are sharded."""
    named_parameters = trainer.backend.unwrap(trainer.model).named_parameters()
    return {name: gather_complete_tensor(parameter, trainer.backend) for name, parameter in named_parameters}


def _gather_parameter_digests(trainer: Trainer) -> dict[str, str]:
    return {name: digest_tensor(parameter) for name, parameter in _gather_parameters(trainer).items()}


def _tensor_digests(trainer: Trainer) -> dict[str, str]:
    """Return the digests of the tensors that must be equal for any number of processes."""
    model, average = trainer.backend.unwrap(trainer.model), trainer.averaged_model
    tensor_by_name: dict[str, Tensor] = {f"parameter {name}": tensor for name, tensor in model.named_parameters()}
    if trainer.backend.rank == 0:  # other processes have statistics of other logical ranks
        tensor_by_name |= {f"buffer {name}": tensor for name, tensor in model.named_buffers()}
    tensor_by_name |= (
        {} if average is None else {f"average {name}": tensor for name, tensor in average.named_parameters()}
    )
    digests = {name: digest_tensor(tensor) for name, tensor in tensor_by_name.items()}
    for name, parameter in model.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            digests[f"state {name} {key}"] = digest_tensor(value) if isinstance(value, Tensor) else repr(value)
    return digests


def _gather_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of the parameters ("parameter NAME") and of the optimizer state ("state NAME KEY").

    All ranks must call this function if parameters or the optimizer state are sharded.
    """
    parameters = _gather_parameters(trainer)
    copies = {f"parameter {name}": copy_to_cpu(parameter) for name, parameter in parameters.items()}
    state = trainer.optimizer.state_dict()["state"]  # complete, even if the optimizer state is sharded
    names = {parameter: name for name, parameter in trainer.backend.unwrap(trainer.model).named_parameters()}
    for index, parameter in enumerate(optimizer_parameters(trainer.optimizer)):
        copies |= copy_state(names[parameter], state.get(index, {}))
    return copies


def _convert_to_double(
    model: nn.Module, loss_fn: Callable[..., Any], forward: Callable[..., Any] | None
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Convert `model` to double precision. Return wrapped loss and forward functions that convert their inputs."""
    model.double()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (map_tensors(to_double, args), map_tensors(to_double, kwargs)), with_kwargs=True
    )
    if isinstance(loss_fn, nn.Module):
        loss_fn.double()
    return (
        lambda output, target: loss_fn(output, map_tensors(to_double, target)),
        None if forward is None else lambda model, batch: forward(model, map_tensors(to_double, batch)),
    )

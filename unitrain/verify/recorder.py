"""Record the steps of a run started by `unitrain verify`, and exit after the requested steps."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unitrain import randomness
from unitrain.backends.sharding.state_format import complete_tensor
from unitrain.callbacks.callback import Callback
from unitrain.data.batch import map_tensors
from unitrain.modules.sync_batch_norm import SyncedForward
from unitrain.optim.step import optimizer_parameters
from unitrain.torch_compat import BatchNormBase
from unitrain.trainer_overrides import TrainerArguments
from unitrain.verify.digests import digest_samples, digest_tensor
from unitrain.verify.record import TENSORS_FILE, RankRecord, RecordRequest, StepRecord

if TYPE_CHECKING:
    from unitrain.backends.base import Backend
    from unitrain.data.order import MicroBatch
    from unitrain.optim.loss_weighting import Loss
    from unitrain.trainer import Trainer


def create_recorder(folder: str) -> Recorder:
    """Create the recorder of a run started by `unitrain verify` with `folder`. See `trainer_overrides`."""
    return Recorder(Path(folder))


class Recorder(Callback):
    """The last callback of a verified run, so that the record includes the effects of other callbacks.

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

        The length of the run is unchanged, because learning-rate schedules depend on it.
        """
        config, model = arguments.config, arguments.model
        loss_fn, forward = arguments.loss_fn, arguments.forward
        changes: dict[str, Any] = {"max_seconds": None}
        if config.output_dir is not None:
            changes["output_dir"] = self._folder / "output"
        self._has_fixed_global_batch_size = config.global_batch_size is not None
        if not self._has_fixed_global_batch_size and backend.size < self._request.emulated_ranks:
            # SyncBatchNorm normalizes over the samples of all ranks, so a single process needs them in one micro-batch.
            in_one_batch = config.batch_size is not None and (
                config.sync_batch_norm or _batch_statistics(model) == "all"
            )
            name = "batch_size" if in_one_batch else "gradient_accumulation_steps"
            changes[name] = (getattr(config, name) or 1) * self._request.emulated_ranks // backend.size
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

    def on_fit_start(self, trainer: Trainer) -> None:
        self._start = _parameter_digests(trainer)
        self._start_values = {name: _copy_to_cpu(parameter) for name, parameter in _parameters(trainer).items()}
        self._initial_rng_digests = _rng_digests(trainer.backend.device)

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: MicroBatch, loss: Loss) -> None:
        self._samples.append(micro_batch.samples)
        if not micro_batch.samples:  # a dummy batch
            return
        value = float(loss.value.detach())
        self._losses.append(value * micro_batch.samples if loss.tokens is None else value)
        self._weights.append(float(micro_batch.samples if loss.tokens is None else loss.tokens))
        self._digest += digest_samples(map_tensors(Tensor.cpu, batch), micro_batch.samples)

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self._learning_rates[:] = [float(group["lr"]) for group in trainer.optimizer.param_groups if "lr" in group]

    def on_step_end(self, trainer: Trainer) -> None:
        self._steps.append(
            StepRecord(
                loss=sum(self._losses),
                weight=sum(self._weights),
                samples=self._samples,
                digest=self._digest,
                learning_rates=self._learning_rates,
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
        self._weights: list[float] = []
        self._samples: list[int] = []
        self._learning_rates: list[float] = []
        self._digest = 0

    def _finish(self, trainer: Trainer) -> NoReturn:
        self._is_written = True
        backend = trainer.backend
        before, after = self._initial_rng_digests, _rng_digests(backend.device)
        record = RankRecord(
            rank=backend.rank,
            size=backend.size,
            backend=backend.name,
            transport=backend.transport,
            device=str(backend.device),
            optimizer=type(trainer.optimizer).__name__,
            steps=self._steps,
            start=self._start,
            end=_parameter_digests(trainer),
            max_change={
                name: _largest_difference(_copy_to_cpu(parameter), self._start_values[name])
                for name, parameter in _parameters(trainer).items()
            },
            used_rngs=[name for name in before if before[name] != after[name]],
            has_fixed_global_batch_size=self._has_fixed_global_batch_size,
            batch_statistics=_batch_statistics(backend.unwrap(trainer.model)),
            compression_dtype=compression
            if (compression := trainer.config.compression) in ("fp16", "bf16")
            else "none",
        )
        tensors = _copy_tensors(trainer) if backend.rank == 0 or trainer.config.shard != "none" else {}
        if backend.rank == 0:
            save_file(tensors, self._folder / TENSORS_FILE)
        record.write(self._folder)
        backend.barrier()
        atexit.register(backend.shutdown)
        raise SystemExit(0)


def _parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Return the complete parameters by name. All ranks call it if parameters are sharded."""
    named = trainer.backend.unwrap(trainer.model).named_parameters()
    return {name: complete_tensor(parameter, trainer.backend) for name, parameter in named}


def _batch_statistics(model: nn.Module) -> Literal["none", "rank", "all"]:
    """Return the samples of a micro-batch that BatchNorm normalizes over: "none", "rank" or "all"."""
    layers = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    if not layers:
        return "none"
    return "all" if all(isinstance(layer, SyncedForward | nn.SyncBatchNorm) for layer in layers) else "rank"


def _parameter_digests(trainer: Trainer) -> dict[str, str]:
    return {name: digest_tensor(parameter) for name, parameter in _parameters(trainer).items()}


def _rng_digests(device: torch.device) -> dict[str, str]:
    """Return a digest of the RNG state per random generator of this process."""
    states = randomness.capture_generators(device)
    return {
        name: digest_tensor(state) if isinstance(state, Tensor) else hashlib.sha256(repr(state).encode()).hexdigest()
        for name, state in states.items()
    }


def _copy_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of the parameters ("parameter NAME") and of the optimizer state ("state NAME KEY")."""
    parameters = _parameters(trainer)
    found = {f"parameter {name}": _copy_to_cpu(parameter) for name, parameter in parameters.items()}
    state = trainer.optimizer.state_dict()["state"]  # complete, even if the optimizer state is sharded
    names = {parameter: name for name, parameter in trainer.backend.unwrap(trainer.model).named_parameters()}
    for index, parameter in enumerate(optimizer_parameters(trainer.optimizer)):
        name = names[parameter]
        for key, value in state.get(index, {}).items():
            if isinstance(value, Tensor):
                found[f"state {name} {key}"] = _copy_to_cpu(value)
            elif isinstance(value, int | float):
                found[f"state {name} {key}"] = torch.tensor(value, dtype=torch.float64)
    return found


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _largest_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest |left - right| in double precision: 0 for empty tensors, NaN if a value is NaN."""
    return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0


def _convert_to_double(
    model: nn.Module, loss_fn: Callable[..., Any], forward: Callable[..., Any] | None
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Convert `model` to double precision. Return wrapped loss and forward functions that convert their inputs."""
    model.double()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (map_tensors(_to_double, args), map_tensors(_to_double, kwargs)), with_kwargs=True
    )
    if isinstance(loss_fn, nn.Module):
        loss_fn.double()
    return (
        lambda output, target: loss_fn(output, map_tensors(_to_double, target)),
        None if forward is None else lambda model, batch: forward(model, map_tensors(_to_double, batch)),
    )


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor

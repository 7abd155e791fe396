"""Measure the memory of a training process, and end it after the measured steps.

The recorder uses torch's global hooks for modules and optimizers, so it also records loops without the Trainer. Memory
is measured after the warm-up steps, in which optimizers create their state and DDP arranges its buckets.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.callbacks.callback import Callback
from unitrain.config import CHECKPOINT_SETTINGS, TrainConfig
from unitrain.memory.process_memory import ProcessMemory, process_memory
from unitrain.memory.record import BlockRecord, MemoryRequest, RankMemory
from unitrain.memory.saved_tensors import SavedStorage, SavedTensorTracker, checkpointing_by_class
from unitrain.memory.tensor_bytes import (
    element_bytes,
    formula_state_bytes,
    is_state_complete,
    state_tensors,
    storage_bytes,
    storages_of,
)
from unitrain.torch_compat import bucket_bytes
from unitrain.trainer_arguments import TrainerArguments

if TYPE_CHECKING:
    from unitrain.backends.base import Backend
    from unitrain.trainer import Trainer

# Settings of the Trainer that the report needs.
_SETTINGS = ("shard", "precision", "batch_size", "gradient_accumulation_steps", "checkpoint_activations")
_FUSION_VARIABLE = "HOROVOD_FUSION_THRESHOLD"

_active: MemoryRecorder | None = None


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """The bytes of saved tensors and of gradients at one point in time."""

    activations: int
    gradients: int
    storages: Sequence[SavedStorage] = ()


def start_recorder(folder: Path) -> MemoryRecorder:
    """Start recording this process, as specified by the MemoryRequest in `folder`."""
    global _active
    _active = MemoryRecorder(folder)
    _active.start()
    return _active


def active_recorder(folder: str) -> MemoryRecorder:
    """Return the recorder of this process, which `run_script` has started. See `bootstrap.overrides`."""
    assert _active is not None, f"run_script has not started the recorder for {folder}"
    return _active


class MemoryRecorder(Callback):
    """Records the memory of this process. After the measured steps, it writes the record and raises SystemExit, so that
    the rest of the script does not use a partially trained model.

    A step is a `step` call of the first optimizer that is stepped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._request = folder, MemoryRequest.read(folder)
        self._saved_tensors = SavedTensorTracker(self._update_snapshots, self._add_model)
        self._models: list[nn.Module] = []
        self._module_ids: set[int] = set()
        self._optimizers: list[Optimizer] = []
        self._averaged_model: nn.Module | None = None
        self._settings: dict[str, Any] = {}
        self._backend = ""
        self._memory: ProcessMemory | None = None
        self._steps, self._depth, self._is_written = 0, 0, False
        self._gradient_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gradient_element_bytes = self._gradient_storage_bytes = 0
        self._is_state_complete = True
        self._largest_snapshot: _Snapshot | None = None  # with the largest activations
        self._peak_snapshot: _Snapshot | None = None  # with the largest sum of activations and gradients
        self._other_bytes = self._startup_peak = 0
        self._forward_backward_peak = self._step_peak = 0

    def start(self) -> None:
        """Register the hooks."""
        self._saved_tensors.start()
        self._handles = [
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ]

    # --- called by the Trainer ---

    def override(self, arguments: TrainerArguments, backend: Backend) -> TrainerArguments:
        """Return `arguments` modified for the recorded run: without checkpoints, output or a time limit."""
        changes: dict[str, Any] = {"max_seconds": None, "output_dir": None, "resume": False, "dry_run": False}
        changes |= {name: getattr(TrainConfig, name) for name in CHECKPOINT_SETTINGS}  # no checkpoints are written
        self._settings = {name: getattr(arguments.config, name) for name in _SETTINGS}
        self._backend = backend.name
        config = dataclasses.replace(arguments.config, progress="off", **changes)
        return dataclasses.replace(arguments, config=config, callbacks=[*arguments.callbacks, self])

    def on_fit_start(self, trainer: Trainer) -> None:
        self._averaged_model = trainer.averaged_model

    # --- called in each forward pass and optimizer step ---

    def _add_model(self, model: nn.Module) -> None:
        """Record a model at its outermost forward pass.

        The recomputation of a checkpointed module is also an outermost forward pass, but the module belongs to a known
        model, and is not recorded.
        """
        if id(model) not in self._module_ids:
            self._module_ids.update(map(id, model.modules()))
            self._models.append(model)
        self._exclude_parameters()

    def _exclude_parameters(self) -> None:
        self._saved_tensors.excluded_addresses = set(storages_of(chain(self._parameters(), self._buffers())))

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # a nested step, such as super().step()
            return
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        storages = storages_of(gradients)
        self._gradient_element_bytes = max(self._gradient_element_bytes, element_bytes(gradients))
        self._gradient_storage_bytes = max(
            self._gradient_storage_bytes, sum(storage.nbytes() for storage in storages.values())
        )
        self._gradient_storages = {address: weakref.ref(storage) for address, storage in storages.items()}
        if self._memory is not None:
            self._forward_backward_peak = max(self._forward_backward_peak, self._memory.peak())
            self._update_snapshots()
            self._memory.reset_peak()

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._is_state_complete &= is_state_complete(optimizer)
        if self._memory is not None:
            self._step_peak = max(self._step_peak, self._memory.peak())
            self._memory.reset_peak()
        if optimizer is not self._optimizers[0]:
            return
        self._steps += 1
        self._exclude_parameters()  # the forward pass of a compiled model does not call `_add_model`
        if self._steps == self._request.warmup_steps:
            self._begin_measurement()
        elif self._steps == self._request.warmup_steps + self._request.steps:
            self.write()
            raise SystemExit(0)

    def _begin_measurement(self) -> None:
        device = next((parameter.device for parameter in self._parameters()), torch.device("cpu"))
        memory = process_memory(device)
        self._startup_peak = memory.peak()
        gc.collect()
        memory.reset_peak()
        gradients = sum(storage.nbytes() for storage in self._live_gradient_storages())
        self._other_bytes = max(
            0, memory.current() - self._persistent_bytes() - gradients - self._saved_tensors.total_bytes
        )
        self._memory = memory

    def _update_snapshots(self) -> None:
        """Store a snapshot if the memory of the saved tensors, or its sum with the memory of the gradients, is the
        largest so far."""
        if self._memory is None:
            return
        gradients = sum(storage.nbytes() for storage in self._live_gradient_storages())
        saved = self._saved_tensors.update_sizes()
        if self._largest_snapshot is None or self._saved_tensors.total_bytes > self._largest_snapshot.activations:
            self._largest_snapshot = _Snapshot(self._saved_tensors.total_bytes, gradients, saved)
        if (
            self._peak_snapshot is None
            or self._saved_tensors.total_bytes + gradients
            > self._peak_snapshot.activations + self._peak_snapshot.gradients
        ):
            self._peak_snapshot = _Snapshot(self._saved_tensors.total_bytes, gradients)

    def _live_gradient_storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield the memory of the last step's gradients that is still in use, and the memory of gradients created
        since."""
        live_storages = {
            address: storage for address, reference in self._gradient_storages.items() if (storage := reference())
        }
        new = (parameter.grad for parameter in self._parameters() if parameter.grad is not None)
        yield from {**live_storages, **storages_of(new)}.values()

    # --- the record ---

    def write(self) -> None:
        """Write the record, unless it has already been written. Does nothing if no step was measured."""
        steps = self._steps - self._request.warmup_steps
        largest, peak = self._largest_snapshot, self._peak_snapshot
        if self._is_written or steps < 1 or largest is None or peak is None:
            return
        self._is_written = True
        rank_info = environment.detect()
        parameters = self._parameters()
        formulas = [formula_state_bytes(optimizer) for optimizer in self._optimizers]
        backend = self._backend or environment.get_variable("UNITRAIN_BACKEND") or ""
        tunables = registry.load(backend).tunables if backend and rank_info.size > 1 else ()
        has_fusion = any(tunable.variable == _FUSION_VARIABLE for tunable in tunables)
        RankMemory(
            rank=rank_info.rank,
            size=rank_info.size,
            backend=backend,
            device=str(parameters[0].device),
            optimizers=[type(optimizer).__name__ for optimizer in self._optimizers],
            settings=self._settings,
            steps=steps,
            parameters=element_bytes(parameters),
            trained=element_bytes(parameter for parameter in parameters if parameter.requires_grad),
            buffers=storage_bytes(self._buffers()),
            gradients=self._gradient_element_bytes,
            gradient_storages=self._gradient_storage_bytes,
            buckets=sum(map(bucket_bytes, self._models)),
            fusion_buffer=int(environment.get_variable(_FUSION_VARIABLE) or 0) if has_fusion else 0,
            state=self._state_bytes(),
            is_state_complete=self._is_state_complete,
            formula_state=None if None in formulas else sum(formula or 0 for formula in formulas),
            average=self._averaged_model_bytes(),
            activations=largest.activations,
            float32_activations=sum(storage.size_bytes for storage in largest.storages if storage.is_float32),
            early_gradients=largest.gradients,
            activations_at_peak=peak.activations,
            gradients_at_peak=peak.gradients,
            blocks=[BlockRecord(**dataclasses.asdict(block)) for block in checkpointing_by_class(largest.storages)],
            other=self._other_bytes,
            forward_backward_peak=self._forward_backward_peak,
            step_peak=self._step_peak,
            startup_peak=self._startup_peak,
        ).write(self._folder)

    def _parameters(self) -> list[nn.Parameter]:
        parameters = (
            parameter
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        model_parameters = chain.from_iterable(model.parameters() for model in self._models)
        return list({id(parameter): parameter for parameter in chain(model_parameters, parameters)}.values())

    def _buffers(self) -> list[Tensor]:
        return [buffer for model in self._models for buffer in model.buffers()]

    def _state_bytes(self) -> int:
        return storage_bytes(tensor for optimizer in self._optimizers for tensor in state_tensors(optimizer))

    def _averaged_model_bytes(self) -> int:
        return 0 if self._averaged_model is None else storage_bytes(self._averaged_model.state_dict().values())

    def _persistent_bytes(self) -> int:
        """Return the bytes of parameters, buffers, optimizer state, averaged weights and separate buckets."""
        return (
            storage_bytes(chain(self._parameters(), self._buffers()))
            + self._state_bytes()
            + self._averaged_model_bytes()
            + sum(map(bucket_bytes, self._models))
        )

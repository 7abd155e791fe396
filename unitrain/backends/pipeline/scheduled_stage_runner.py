"""Run the micro-batches of a batch through several stages, with torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from unitrain.backends.checks import DTYPES
from unitrain.backends.gradients.end_of_backward import do_not_wait
from unitrain.backends.pipeline.micro_batches import (
    LossFunction,
    WeightedTargets,
    checksum,
    specification,
    weighted_loss,
)
from unitrain.backends.pipeline.stage_runner import StageModule, StageRunner
from unitrain.backends.pipeline.stages import ShapedStage, TensorShape
from unitrain.backends.rank_groups import Subgroup
from unitrain.errors import DataError, ModelError
from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.torch_compat import has_torch

# Before torch 2.10, a schedule keeps the outputs until the end of the step. Torch 2.6 does not scale gradients.
_STEP_OPTIONS: dict[str, Any] = {"return_outputs": False} if has_torch("2.10") else {}
_SCHEDULE_OPTIONS: dict[str, Any] = {"scale_grads": False} if has_torch("2.7") else {}
_STEP, _FORWARD = "pipeline step", "pipeline forward"
_PHASES = (_STEP, _FORWARD)
_MAX_DIMS = 8
_HEADER_LENGTH = 3 + _MAX_DIMS  # checksum, dtype, number of dims, dims
_BATCH_LENGTH = 5 + _MAX_DIMS  # checksum, phase, dtype, autocast, number of dims, dims
_HEADER_TAG, _BATCH_TAG = 0x756E6A, 0x756E6B  # activations and gradients have tag 0
_Shapes = tuple[TensorShape, TensorShape]
_FIX = "Load the data with unitrain.ShardedLoader(dataset, pipeline.replicas, ...)."


class ScheduledStageRunner(StageRunner):
    """Runs one of several stages. `group` contains the ranks of the replica in the order of the stages."""

    def __init__(
        self, module: StageModule, group: Subgroup, schedule_name: str, loss_fn: LossFunction, device: torch.device
    ) -> None:
        self._module, self._group, self._schedule_name = module, group, schedule_name
        self._loss_fn, self._device = loss_fn, device
        self._is_first, self._is_last = group.index == 0, group.index == group.size - 1
        # torch's stages and schedules are created for a fixed number of micro-batches, with or without backward passes.
        self._schedules: dict[tuple[int, bool], tuple[ShapedStage, Any]] = {}
        self._shapes: dict[object, _Shapes] = {}
        self._run_indices, self._owner = count(), group.monitor.new_pipeline_number()

    def forward_backward(self, inputs: Sequence[Tensor], targets: Sequence[WeightedTargets]) -> Tensor | None:
        losses: list[Tensor] = []
        with self._monitored_pass(_STEP, inputs):
            _, schedule = self._prepare(inputs, targets, has_backward=True)
            schedule.step(
                arg_mbs=self._arguments(inputs),
                target_mbs=list(targets) if self._is_last else None,
                losses=losses,
                **_STEP_OPTIONS,
            )
        return torch.stack([loss.detach() for loss in losses]).sum(dtype=torch.float64) if self._is_last else None

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        with self._monitored_pass(_FORWARD, inputs):
            stage, schedule = self._prepare(inputs, (), has_backward=False)
            output = schedule.step(arg_mbs=self._arguments(inputs))
            stage.release_activations()
            return self._broadcast_output(output)

    @contextmanager
    def _monitored_pass(self, phase: str, inputs: Sequence[Tensor]) -> Iterator[None]:
        with self._group.waiting(GradientPhase(phase, next(self._run_indices), self._owner, self._group.ranks)):
            wait_for_send = self._check_same_shapes(phase, inputs)
            yield
            wait_for_send()

    def _check_same_shapes(self, phase: str, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Compare the shapes of the micro-batches with those of the previous stage. All ranks of the replica must call
        this method.

        Each stage but the last starts to send a small message to the next one; the returned function waits until the
        message is sent. Raises DataError if the previous stage has different shapes, dtypes or autocast settings, or
        runs a different phase.
        """
        own = _encode_batch(phase, inputs)
        wait_for_send = do_not_wait if self._is_last else self._group.start_send(own, self._group.index + 1, _BATCH_TAG)
        if not self._is_first:
            other = torch.zeros_like(own)
            self._group.receive(other, self._group.index - 1, _BATCH_TAG)
            if other[0] != own[0]:
                ranks, index = self._group.ranks, self._group.index
                raise DataError(
                    f"Ranks {ranks[index - 1]} and {ranks[index]} compute the same replica of the pipeline, but rank "
                    f"{ranks[index - 1]} called {_format_batch(other)}, and rank {ranks[index]} {_format_batch(own)}. "
                    f"{_FIX}"
                )
        return wait_for_send

    def _arguments(self, inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        return [(micro_batch,) for micro_batch in inputs] if self._is_first else [()] * len(inputs)

    def _prepare(
        self, inputs: Sequence[Tensor], targets: Sequence[WeightedTargets], *, has_backward: bool
    ) -> tuple[ShapedStage, Any]:
        """Return the stage and the schedule for these micro-batches, with the shapes of the tensors between stages.

        For the first micro-batch of each shape, exchange these shapes with the neighboring stages.
        """
        key = (len(inputs), has_backward)
        if key not in self._schedules:
            stage = ShapedStage(self._module, self._group, self._device)
            # torch's 1F1B needs at least as many micro-batches as stages. With fewer micro-batches, GPipe holds no more
            # activations than 1F1B would.
            is_1f1b = has_backward and self._schedule_name == "1f1b" and len(inputs) >= self._group.size
            schedule_class = Schedule1F1B if is_1f1b else ScheduleGPipe
            self._schedules[key] = (
                stage,
                schedule_class(stage, len(inputs), self._loss if has_backward else None, **_SCHEDULE_OPTIONS),
            )
        stage, schedule = self._schedules[key]
        shapes = []
        for index, micro_batch in enumerate(inputs):
            actual = specification(micro_batch)
            if actual not in self._shapes:
                content = (micro_batch, targets[index].values) if targets else micro_batch
                self._shapes[actual] = self._exchange_shapes(micro_batch, checksum(content))
            shapes.append(self._shapes[actual])
        stage.inputs, stage.outputs = [shape for shape, _ in shapes], [shape for _, shape in shapes]
        return stage, schedule

    def _loss(self, output: Any, target: WeightedTargets) -> Tensor:
        with self._group.monitor.computing():
            return weighted_loss(self._loss_fn, output, target)

    def _exchange_shapes(self, micro_batch: Tensor, own_checksum: int) -> _Shapes:
        """Return the shapes of this stage's input and output for `micro_batch`. All ranks of the replica must call this
        method.

        Every stage runs one forward pass without gradients on a tensor with the shape of its input. Raises DataError if
        the previous stage has a different micro-batch.
        """
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64, device="cpu")
        inputs = micro_batch
        if not self._is_first:
            self._group.receive(header, self._group.index - 1, _HEADER_TAG)
            if int(header[0]) != own_checksum:
                first, own = self._group.ranks[0], self._group.ranks[self._group.index]
                raise DataError(
                    f"Rank {own} has a different batch from rank {first}, but both compute the same replica of the "
                    f"pipeline. {_FIX}"
                )
            inputs = torch.zeros_like(_read_shape(header).empty(self._device))
        with self._group.monitor.computing():
            output = self._run_without_side_effects(inputs)
        if not self._is_last:
            header[0] = own_checksum
            _write_shape(header, output)
            self._group.send(header, self._group.index + 1, _HEADER_TAG)
        return TensorShape(tuple(inputs.shape), inputs.dtype), TensorShape(tuple(output.shape), output.dtype)

    def _run_without_side_effects(self, inputs: Tensor) -> Tensor:
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            try:
                output = self._module(inputs)
            finally:
                for buffer, value in buffers:
                    buffer.copy_(value)
        if self._is_last:
            return output if isinstance(output, Tensor) else torch.empty(0, device="cpu")
        is_sent = isinstance(output, Tensor) and output.is_floating_point() and output.dtype in DTYPES
        if not is_sent or output.dim() > _MAX_DIMS:
            name = list(self._module.named_children())[-1][0]
            raise ModelError(
                f"Block {name!r}, the last one of stage {self._group.index}, returned {_describe_output(output)}, but "
                f"a stage of a Pipeline sends one floating-point tensor of up to {_MAX_DIMS} dims to the next stage. "
                "Divide the model after another block: Pipeline(balance=[...])."
            )
        return cast(Tensor, output)

    def _broadcast_output(self, output: Any) -> Tensor:
        """Return the output of the last stage on every rank of the replica."""
        last_stage = self._group.size - 1
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64, device="cpu")
        if self._is_last:
            if not isinstance(output, Tensor) or output.dtype not in DTYPES or output.dim() > _MAX_DIMS:
                raise ModelError(
                    f"Pipeline.forward broadcasts one tensor of up to {_MAX_DIMS} dims with a dtype that collectives "
                    f"support, but the model returned {_describe_output(output)}. Let the last block return such a "
                    "tensor, for example in float32."
                )
            output = output.contiguous()
            _write_shape(header, output)
        self._group.broadcast(header, last_stage)
        if not self._is_last:
            output = _read_shape(header).empty(self._device)
        self._group.broadcast(output, last_stage)
        return cast(Tensor, output)


def _describe_output(output: Any) -> str:
    return (
        f"{output.dtype} {list(output.shape)}"
        if isinstance(output, Tensor)
        else f"an object of class {type(output).__name__}"
    )


def _encode_batch(phase: str, inputs: Sequence[Tensor]) -> Tensor:
    """Return a checksum of the specifications of all micro-batches, and the values that `_format_batch` shows."""
    specifications = [specification(micro_batch) for micro_batch in inputs]
    _, dtype, autocast = specifications[0]
    shape = [sum(map(len, inputs)), *inputs[0].shape[1:_MAX_DIMS]]
    dtypes = [DTYPES.index(value) if value in DTYPES else -1 for value in (dtype, autocast)]
    values = [crc32(repr((phase, specifications)).encode()), _PHASES.index(phase), *dtypes, len(shape), *shape]
    return torch.tensor(values + [0] * (_BATCH_LENGTH - len(values)), dtype=torch.int64, device="cpu")


def _format_batch(description: Tensor) -> str:
    _, phase, dtype, autocast, dims, *shape = description.tolist()
    method = {_STEP: "forward_backward", _FORWARD: "forward"}[_PHASES[phase]]
    texts = [f"{method} with a batch of shape {shape[:dims]}"]
    texts += [f"and dtype {DTYPES[dtype]}"] if dtype >= 0 else []
    texts += [f"under autocast to {DTYPES[autocast]}"] if autocast >= 0 else []
    return " ".join(texts).replace("torch.", "")


def _write_shape(header: Tensor, output: Tensor) -> None:
    header[1], header[2] = DTYPES.index(output.dtype), output.dim()
    header[3 : 3 + output.dim()] = torch.tensor(output.shape, dtype=torch.int64, device="cpu")


def _read_shape(header: Tensor) -> TensorShape:
    _, dtype, dims, *sizes = header.tolist()
    return TensorShape(tuple(sizes[:dims]), DTYPES[dtype])

"""Overrides of Pipeline arguments by `unitrain verify`, and the interface through which it records the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.pipeline.micro_batches import LossFunction
from unitrain.bootstrap.overrides import load_tool_overrides


@dataclass(frozen=True, kw_only=True)
class PipelineArguments:
    """The arguments of a Pipeline that a tool may replace. A tool may also change `model` in place.

    This rank computes the batches of `replicas_per_rank` replicas.
    """

    model: nn.Sequential
    loss_fn: LossFunction
    stages: int
    replicas_per_rank: int = 1


class PipelineOverrides(Protocol):
    """The overrides of a tool. The Pipeline calls the methods on all ranks."""

    def override(self, arguments: PipelineArguments, backend: Backend) -> PipelineArguments:
        """Return the arguments of the pipeline. The user's arguments are not validated yet."""
        ...

    def on_pipeline_start(self, module: nn.Module, stages: int, backend: Backend) -> None:
        """Called after the model is divided into `stages` stages. `module` is the stage of this rank."""
        ...

    def on_batch_start(self) -> None:
        """Called before the forward and backward pass of each batch."""
        ...

    def on_batch_end(self, batch: Any, micro_batch_sizes: Sequence[int], loss_weight: float, loss: Tensor) -> None:
        """Called after the backward pass of `batch`, (inputs, targets). `micro_batch_sizes` are the numbers
        of samples of the micro-batches, and `loss` is the mean loss of all replicas."""
        ...


@runtime_checkable
class _SupportsPipelines(Protocol):
    """A tool that can change pipelines."""

    def pipeline_overrides(self) -> PipelineOverrides: ...


def load_pipeline_overrides() -> PipelineOverrides | None:
    """Return the overrides of the tool that started this process, or None."""
    tool = load_tool_overrides()
    return tool.pipeline_overrides() if isinstance(tool, _SupportsPipelines) else None

"""torch's PipelineStage with micro-batches of different shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from unitrain.backends.pipeline.stage_runner import StageModule
from unitrain.backends.rank_groups import Subgroup
from unitrain.torch_compat import release_receive_buffers, set_receive_shape, skip_shape_validation


class TensorShape(NamedTuple):
    """Shape and dtype of a tensor that is transferred between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class ShapedStage(PipelineStage):
    """A PipelineStage whose micro-batches may differ in shape. `inputs` and `outputs` are the shapes per micro-batch.

    torch's class allocates receive buffers of the same shape for all micro-batches, and keeps them. This class
    allocates each buffer when it is needed, and releases it after the backward pass. Without backward passes, call
    `release_activations` after each batch. Checked with torch 2.14.
    """

    def __init__(self, module: StageModule, group: Subgroup, device: torch.device) -> None:
        self.inputs: list[TensorShape] = []
        self.outputs: list[TensorShape] = []
        self._monitor = group.monitor
        # With these placeholders, torch does not infer shapes, and assumes that all transferred tensors require grad.
        placeholder = torch.empty(0, device=device, requires_grad=True)
        super().__init__(
            module, group.index, group.size, device, input_args=placeholder, output_args=placeholder,
            group=group.process_group,
        )  # fmt: skip
        skip_shape_validation(self)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        if not self.is_first:
            set_receive_shape(self.args_recv_info[fwd_chunk_id], *self.inputs[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            set_receive_shape(self.grad_recv_info[bwd_chunk_id], *self.outputs[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return _make_contiguous(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return _make_contiguous(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._monitor.computing():
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                if error.__cause__ is not None and "failed to run forward" in str(error):
                    raise error.__cause__ from None  # the block's original error, which torch has replaced
                raise

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:
            return None  # torch's GPipe calls this method even without backward passes
        with self._monitor.computing():
            result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first:
            release_receive_buffers(self.args_recv_info[bwd_chunk_id])
        if not self.is_last:
            release_receive_buffers(self.grad_recv_info[bwd_chunk_id])
        return result

    def release_activations(self) -> None:
        """Release the inputs and outputs of all micro-batches, which torch keeps until the next batch if there are no
        backward passes."""
        self.clear_runtime_states()
        if not self.is_first:
            for received in self.args_recv_info.values():
                release_receive_buffers(received)


def _make_contiguous(operations: list[Any]) -> list[Any]:
    for operation in operations:
        operation.tensor = operation.tensor.contiguous()
    return operations

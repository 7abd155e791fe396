"""Weights of micro-batch losses, so that a step's gradient is the gradient of the mean loss over its samples or
tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.backends.base import Communicator
from unitrain.backends.rank_groups import Subgroup
from unitrain.data.order import MicroBatch
from unitrain.errors import ModelError
from unitrain.monitoring.rank_status import format_ranks
from unitrain.optim.step import optimizer_parameters
from unitrain.torch_compat import foreach_mul_, local_shard

Count = Tensor | float

# With logical ranks, counts that are not integers, such as sums of class weights, are rounded to multiples of this
# number. Sums below 2**29 are then exact in float64, so they do not depend on the number of processes.
_COUNT_QUANTUM = 2.0**-24
_FIX = "Let loss_fn return the mean over the batch, loss.mean(), or a pair (loss.sum(), number of tokens)."


class LossKind(Enum):
    """The kind of a loss function's result: a mean over samples, or a sum with its number of tokens."""

    MEAN = "the mean over the batch"
    SUM = "a pair (sum, number of tokens)"


class Loss(NamedTuple):
    """The loss of one batch: the mean over its samples if `tokens` is None, otherwise the sum over `tokens` tokens.

    A loss function may return it. `tokens` may be any finite number of at least 0 by which the sum is to be divided,
    such as the sum of the class weights of the targets.
    """

    value: Tensor
    tokens: Count | None

    @property
    def kind(self) -> LossKind:
        """Whether the loss is a mean or a sum."""
        return LossKind.MEAN if self.tokens is None else LossKind.SUM


# A loss function returns the mean over the batch, or the sum and an integer number of tokens, or a Loss.
LossOutput = Tensor | tuple[Tensor, Tensor | int] | Loss


def check_one_loss_kind(kinds: Collection[LossKind]) -> None:
    """Raise ModelError if there are several `kinds` of losses: their mean would mix samples and tokens."""
    if len(kinds) > 1:
        raise ModelError(
            f"loss_fn returned {LossKind.MEAN.value} for some batches and {LossKind.SUM.value} for others. {_FIX} "
            "Return the same kind of loss for every batch, on every rank."
        )


def read_loss(output: LossOutput) -> Loss:
    """Convert the output of a loss function to a Loss.

    Raises ModelError unless the loss is one floating-point number, and the number of tokens is finite and above 0, or 0
    if the sum is 0. In a pair that is not a Loss, the number of tokens must be an integer, because a pair is also a
    common way to return a loss and a metric. The value of a number of tokens on a GPU is not checked.
    """
    value, tokens = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    if not (isinstance(value, Tensor) and value.dim() == 0):
        description = (
            f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"an object of class {type(value).__name__}"
        )
        raise ModelError(f"The loss must be one number, got {description}. {_FIX}")
    if not (tokens is None or isinstance(tokens, int | float) or (isinstance(tokens, Tensor) and tokens.dim() == 0)):
        description = (
            f"shape {list(tokens.shape)}"
            if isinstance(tokens, Tensor)
            else f"an object of class {type(tokens).__name__}"
        )
        raise ModelError(f"The number of tokens in a summed loss must be one number, got {description}. {_FIX}")
    if not (tokens is None or isinstance(output, Loss) or _is_integer(tokens)):
        raise ModelError(
            f"The second item of the pair that loss_fn returned must be an integer, the number of tokens by which the "
            f"sum of the losses is divided, got {_describe_number(tokens)}. If it is a metric, such as the accuracy, "
            "let loss_fn return the loss alone, and use Trainer(metrics=...). If the losses are to be divided by it, "
            "return unitrain.Loss(loss_sum, count)."
        )
    if not value.is_floating_point():
        dtype = str(value.dtype).removeprefix("torch.")
        raise ModelError(f"The loss must be a floating-point number, got one of dtype {dtype}. {_FIX}")
    if value.is_meta:
        raise ModelError(f"The loss must be one number, got a tensor on device meta, which has no values. {_FIX}")
    # Counts on a GPU are checked when the running loss is computed, to avoid a host-device synchronization here.
    if tokens is not None and not (isinstance(tokens, Tensor) and tokens.device.type != "cpu"):
        try:
            count = float(tokens)
        except OverflowError:  # an integer above the range of floats
            count = math.inf
        is_sum_without_tokens = count == 0 and value.device.type == "cpu" and bool(value.detach() != 0)
        if isinstance(tokens, bool) or not 0 <= count < math.inf or is_sum_without_tokens:
            raise ModelError(
                f"The number of tokens in a summed loss must be finite and above 0, or 0 if the sum is 0, got "
                f"{tokens if isinstance(tokens, bool) else f'{count:g}'}. {_FIX}"
            )
    return Loss(value, tokens)


def _is_integer(number: Count) -> bool:
    """Return whether `number` has an integer type. Does not read the value of a tensor."""
    if isinstance(number, Tensor):
        return not (number.is_floating_point() or number.is_complex() or number.dtype is torch.bool)
    return isinstance(number, int)


def _describe_number(number: Count) -> str:
    if not isinstance(number, Tensor):
        return repr(number)
    dtype = str(number.dtype).removeprefix("torch.")
    return f"{number.item()} (dtype {dtype})" if number.device.type == "cpu" else f"of dtype {dtype}"


def read_training_loss(output: LossOutput) -> Loss:
    """Convert the output of a loss function in training to a Loss, as `read_loss` does. Also raises ModelError if the
    loss does not require grad."""
    loss = read_loss(output)
    if not loss.value.requires_grad:
        raise ModelError(
            "The loss does not depend on a parameter that requires a gradient: it was detached, or computed outside of "
            "autograd. Compute it from the model's output without .detach(), .item(), .numpy() and torch.no_grad()."
        )
    return loss


class LossWeighting:
    """Weights the micro-batch losses of a step on all ranks. All ranks must make the same calls.

    Backends sum gradients over micro-batches and average them over ranks. The number of samples in a step is known in
    advance, so means over samples receive their final weight immediately. The number of tokens is known only after all
    ranks have computed their losses: an allreduce sums it while the gradients are reduced, and the gradients are then
    divided by the total. Until then, losses are divided by the approximate number of tokens per sample in the preceding
    step (in the first step, in its first micro-batch), because sums over many tokens may overflow in half precision.
    The factors of losses in float16 are not below the smallest normal number of this format.

    `num_ranks` is the number of ranks over which gradients are averaged, such as the number of logical ranks; the
    default is the number of ranks of the communicator. With local steps, `synchronous_ranks` is the group of ranks that
    average their gradients, or None if this rank trains independently. Gradients are then divided by the number of
    tokens of this group, or of this rank.
    """

    def __init__(self, communicator: Communicator, num_ranks: int | None = None) -> None:
        self._communicator, self._num_ranks = communicator, num_ranks or communicator.size
        self._local_tokens: Tensor | None = None  # number of tokens on this rank in the current step
        self._total_tokens: Tensor | None = None  # number of tokens on all ranks in a complete step
        self._tokens_per_sample: Tensor | None = None
        self._kind: LossKind | None = None
        self._is_float16 = False  # whether the losses of any rank are in float16
        self.synchronous_ranks: Communicator | Subgroup | None = communicator

    @property
    def counts_tokens(self) -> bool:
        """Whether the losses are sums over tokens."""
        return self._kind is LossKind.SUM

    def weight_loss(self, loss: Loss, micro_batch: MicroBatch) -> Tensor:
        """Return the weighted loss, to call backward on. The weight of a dummy batch is 0. Raises ModelError if the
        kind of the loss differs from the kind of earlier losses or, in the first call, between ranks."""
        if self._kind is None:
            self._exchange_kinds(loss)
            self._kind = loss.kind
        elif self._kind is not loss.kind:
            check_one_loss_kind({loss.kind, self._kind})
        weight = self._num_ranks / micro_batch.step_samples
        if loss.tokens is None:
            weight *= micro_batch.samples
            return loss.value if weight == 1.0 else loss.value * weight
        device = self._communicator.device
        if isinstance(loss.tokens, Tensor):  # a copy, because loss_fn may overwrite it in the next micro-batch
            local_tokens = loss.tokens.detach().to(device, torch.float64, copy=True)
        else:
            local_tokens = torch.tensor(loss.tokens, dtype=torch.float64, device=device)
        if micro_batch.logical_rank is not None:
            local_tokens = (local_tokens / _COUNT_QUANTUM).round() * _COUNT_QUANTUM
        tokens = local_tokens if micro_batch.samples else torch.zeros_like(local_tokens)
        self._local_tokens = tokens if self._local_tokens is None else self._local_tokens + tokens
        if self._tokens_per_sample is None:
            if micro_batch.logical_rank is None:
                approximate = self._sum_over_ranks(tokens)
            else:  # the tokens of logical rank 0, for any number of processes
                approximate = self._communicator.broadcast(tokens) * self._num_ranks
            self._tokens_per_sample = self._round_tokens_per_sample(approximate, micro_batch.step_samples)
        # A half-precision number cannot represent large numbers of tokens.
        value = loss.value.float() if loss.value.dtype in (torch.float16, torch.bfloat16) else loss.value
        return value * (weight if micro_batch.samples else 0.0) / self._tokens_per_sample.to(value.dtype)

    def _round_tokens_per_sample(self, tokens: Tensor, step_samples: int) -> Tensor:
        """Return the number of tokens per sample by which losses are divided, a power of two, for a step with `tokens`
        tokens."""
        tokens_per_sample = _power_of_two(tokens / step_samples)
        if self._is_float16:  # the gradient of the loss, num_ranks / step_samples / tokens_per_sample, has its dtype
            limit = self._num_ranks / step_samples / torch.finfo(torch.float16).tiny
            tokens_per_sample = tokens_per_sample.clamp(max=2.0 ** math.floor(math.log2(limit)))
        return tokens_per_sample

    def _exchange_kinds(self, loss: Loss) -> None:
        """Determine whether losses are in float16. Raise ModelError on every rank if the first losses of the ranks have
        different kinds. All ranks must call this method, only for the first loss, because later losses must have the
        same kind as the first loss."""
        own = [[loss.kind is LossKind.SUM, loss.value.dtype == torch.float16]]
        gathered = torch.tensor(own, dtype=torch.int64, device=self._communicator.device)
        sums, are_float16 = zip(*self._communicator.allgather(gathered).tolist(), strict=True)
        self._is_float16 = any(are_float16)
        kinds = [LossKind.SUM if is_sum else LossKind.MEAN for is_sum in sums]
        if len(set(kinds)) > 1:
            ranks_by_kind = {
                kind: [rank for rank, kind_of_rank in enumerate(kinds) if kind_of_rank is kind] for kind in LossKind
            }
            texts = [f"{kind.value} on {format_ranks(ranks)}" for kind, ranks in ranks_by_kind.items()]
            raise ModelError(
                f"loss_fn returned {' and '.join(texts)}. {_FIX} Return the same kind of loss on every rank."
            )

    def loss_scale(self) -> Tensor | None:
        """Return the factor by which gradients are scaled until `finish_step`; None if losses are means over samples,
        and before the first loss."""
        return None if self._tokens_per_sample is None else 1 / self._tokens_per_sample

    def overlapped_work(self) -> tuple[Callable[[], None], ...]:
        """Return the functions to call while gradients are reduced: one for losses over tokens, otherwise none."""
        return () if self._local_tokens is None else (self._sum_tokens,)

    def finish_step(self, optimizer: Optimizer, micro_batch: MicroBatch) -> None:
        """If losses are sums over tokens, divide the reduced gradients in `optimizer` by the number of tokens."""
        if self._total_tokens is None or self._tokens_per_sample is None:
            return
        tokens, self._total_tokens = self._total_tokens, None
        # A step without tokens has zero gradients: do not divide by 0.
        factor = torch.where(tokens > 0, micro_batch.step_samples * self._tokens_per_sample / tokens, 1.0)
        self._tokens_per_sample = torch.where(
            tokens > 0,
            self._round_tokens_per_sample(tokens, micro_batch.step_samples),
            self._tokens_per_sample,
        )
        gradients: dict[torch.dtype, list[Tensor]] = {}
        for parameter in optimizer_parameters(optimizer):
            if parameter.grad is not None:
                gradients.setdefault(parameter.grad.dtype, []).append(local_shard(parameter.grad))
        for dtype, same_dtype in gradients.items():
            # A factor of the same dtype lets one kernel process many gradients. A half-precision factor would be
            # rounded.
            foreach_mul_(same_dtype, factor.to(dtype) if dtype in (torch.float32, torch.float64) else factor)

    def discard_step(self) -> None:
        """Discard the counts of a step that was not completed."""
        self._local_tokens = self._total_tokens = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of tokens per sample by which losses are divided; empty if losses are means over
        samples."""
        return {} if self._tokens_per_sample is None else {"tokens_per_sample": self._tokens_per_sample.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of tokens per sample, so that rounding errors are the same as in an uninterrupted run."""
        if state:
            device = self._communicator.device
            self._tokens_per_sample = torch.tensor(state["tokens_per_sample"], dtype=torch.float64, device=device)

    def _sum_tokens(self) -> None:
        if self._local_tokens is not None:
            self._total_tokens, self._local_tokens = self._sum_over_ranks(self._local_tokens), None

    def _sum_over_ranks(self, tokens: Tensor) -> Tensor:
        """Return the number of tokens of all ranks, given the number of this rank. With local steps, all ranks, or all
        groups of ranks, are assumed to have the same number."""
        if isinstance(self.synchronous_ranks, Communicator):
            return self.synchronous_ranks.allreduce(tokens, "sum")
        mean = tokens if self.synchronous_ranks is None else self.synchronous_ranks.allreduce_mean(tokens)
        return mean * self._communicator.size


def _power_of_two(value: Tensor) -> Tensor:
    """Return the power of two nearest to `value`, or 1 if `value` is 0. Scaling by a power of two is exact."""
    return torch.where(value > 0, torch.exp2(torch.log2(value).round()), 1.0)

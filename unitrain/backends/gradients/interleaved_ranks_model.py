"""The module that `distributed_model(model, logical_ranks=V)` returns for a model with synchronized BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.backends.current_batches import CurrentBatch
from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward
from unitrain.backends.gradients.logical_ranks_model import LogicalRanksModel, has_synchronized_layers
from unitrain.backends.logical_ranks import TRAINER_REQUIRED_MESSAGE
from unitrain.backends.turns import Turns, layer_mismatch_error
from unitrain.errors import ModelError
from unitrain.monitoring.loop_counters import CountedForward
from unitrain.randomness import GeneratorStates, get_generator_states, set_generator_states
from unitrain.torch_compat import buffers_by_name, current_backward, disable_compile

ResultT = TypeVar("ResultT")


class InterleavedRanksModel(LogicalRanksModel):
    """A LogicalRanksModel whose logical ranks take turns, because its synchronized layers reduce values over all
    logical ranks during the forward and backward passes.

    The process interleaves one micro-batch of each of its logical ranks (see `run_in_turns`). When a logical rank
    reaches a synchronized layer, it waits for the others. `.grad`, the buffers and the random number generators are
    those of the logical rank whose turn it is, so every logical rank computes as if it were alone in the process.

    At the end of a step, each process has the buffers of its first logical rank.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, logical_ranks: int, **settings: Any) -> None:
        super().__init__(model, communicator, logical_ranks, **settings)
        self._shared_statistics: set[Any] = {
            module.shared_statistics for module in model.modules() if hasattr(module, "shared_statistics")
        }
        self._turns: Turns[Any] = Turns(self._sum_over_logical_ranks, self._switch, communicator.device)
        self._is_running = self._reduces = False
        self._batches_before_turns: tuple[CurrentBatch, ...] = ()

    @property
    def last_logical_rank(self) -> int:
        """The last logical rank of this process."""
        return self._local_logical_ranks[-1]

    def _discard_step(self) -> None:
        super()._discard_step()
        # For each logical rank except the active one, whose turn it is: its buffers, in the order of
        # _modules_with_buffers.
        self._inactive_buffers: dict[int, list[dict[str, Tensor | None]]] = {}
        # For each logical rank that has had a turn and is not active: its current batches and generators.
        self._inactive_states: dict[int, tuple[tuple[CurrentBatch, ...], GeneratorStates]] = {}
        self._modules_with_buffers: list[nn.Module] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager without effect: `run_in_turns` determines which backward pass reduces the gradients."""
        yield

    def run_in_turns(
        self, functions: Sequence[Callable[[], ResultT]], *, begins_step: bool, ends_step: bool
    ) -> list[ResultT]:
        """Run `functions` in turns, and return their results. Each function runs one micro-batch of a logical rank of
        this process; the functions are in the order of the logical ranks.

        All processes call this method once per accumulated micro-batch. `begins_step` and `ends_step` state whether the
        micro-batches are the first and the last ones of a step. With `ends_step`, the backward pass of the last
        function leaves the mean of the gradients over all logical ranks in every `.grad`. If a function raises an
        exception, the step is discarded, and the exception is re-raised. Raises CollectiveMismatchError if the logical
        ranks call different synchronized layers. If these logical ranks run in one process, only this process raises
        the error.
        """
        if begins_step:
            self._begin_step()
        self._is_running, self._reduces = True, ends_step
        self._inactive_states.clear()
        self._batches_before_turns = self._communicator.current_batches.entered
        for statistics in self._shared_statistics:
            statistics.sum_over_logical_ranks = self._turns.exchange
        try:
            return self._turns.run(functions)
        except BaseException:
            self._discard_interrupted_step()
            raise
        finally:
            self._is_running = self._reduces = False
            for statistics in self._shared_statistics:
                statistics.sum_over_logical_ranks = None
            self._communicator.current_batches.entered = self._batches_before_turns

    def _begin_step(self) -> None:
        if self._active_rank is not None:  # an exception between two micro-batches interrupted the last step
            self._discard_interrupted_step()
        if self._buffer_broadcaster is not None:
            self._buffer_broadcaster.broadcast()
        self._gradients_before_step, self._has_backward_started = self._take_gradients(), True
        self._modules_with_buffers = [module for module in self.module.modules() if buffers_by_name(module)]
        first, *others = self._local_logical_ranks
        self._inactive_buffers = {first: self._current_buffers(), **{rank: self._cloned_buffers() for rank in others}}

    def _discard_interrupted_step(self) -> None:
        self._install_buffers(self._local_logical_ranks[0])
        self._discard_step()

    # --- turns ---

    def _switch(self, index: int) -> None:
        """Store the gradients, buffers, current batches and generators of the active logical rank, and install those
        of the logical rank with index `index` among the logical ranks of this process."""
        rank, device = self._local_logical_ranks[index], self._communicator.device
        current = self._communicator.current_batches
        if rank != self._active_rank:
            if self._active_rank is not None:
                self._gradients_by_rank[self._active_rank] = self._take_gradients()
                self._inactive_buffers[self._active_rank] = self._current_buffers()
                self._inactive_states[self._active_rank] = current.entered, get_generator_states(device)
            for parameter, gradient in zip(self._all_parameters, self._gradients_by_rank.pop(rank, []), strict=False):
                parameter.grad = gradient
            self._install_buffers(rank)
            self._active_rank, current.entered = rank, self._batches_before_turns
        if rank in self._inactive_states:  # otherwise the function has not started; it will seed the generators
            current.entered, generators = self._inactive_states.pop(rank)
            set_generator_states(generators, device)

    def _current_buffers(self) -> list[dict[str, Tensor | None]]:
        return [dict(buffers_by_name(module)) for module in self._modules_with_buffers]

    def _cloned_buffers(self) -> list[dict[str, Tensor | None]]:
        clones: dict[int, Tensor] = {}  # modules may share buffers

        def clone(buffer: Tensor | None) -> Tensor | None:
            return None if buffer is None else clones.setdefault(id(buffer), buffer.detach().clone())

        return [{name: clone(buffer) for name, buffer in buffers.items()} for buffers in self._current_buffers()]

    def _install_buffers(self, rank: int) -> None:
        """Install the stored buffers of a logical rank. The active one has none, because its buffers are installed."""
        for module, buffers in zip(self._modules_with_buffers, self._inactive_buffers.pop(rank, []), strict=False):
            buffers_by_name(module).update(buffers)

    @torch.no_grad()
    def _sum_over_logical_ranks(self, rows: list[Tensor]) -> Tensor:
        """Return the sum over all logical ranks. `rows` contains one tensor per logical rank of this process. All
        processes must call this method.

        Each process sums a table with the rows of all logical ranks, so the result does not depend on the number of
        processes.
        """
        shape = rows[0].shape
        if any(row.shape != shape for row in rows):
            raise layer_mismatch_error()
        table = rows[0].new_zeros(self._logical_ranks, *shape)
        ranks = self._local_logical_ranks
        table[ranks.start : ranks.stop] += torch.stack(rows)  # adding 0 turns -0 into 0
        if self._communicator.size > 1:  # exact, because all other processes add 0
            table = self._communicator.allreduce(table, "sum")
        return table.sum(0)

    # --- forward and backward passes ---

    @disable_compile
    def _before_forward(self, inputs: Any) -> None:
        if not self._is_running:
            raise ModelError(f"The model has layers that sync_batch_norm has synchronized. {TRAINER_REQUIRED_MESSAGE}")

    @disable_compile
    def _prepare_backward(self, forward: CountedForward | None, gradient: Tensor) -> None:
        if forward is not None:
            forward.mark_used()
        backward = current_backward()
        if not self._reduces or self._active_rank != self.last_logical_rank:
            return
        if backward == self._last_backward or self._has_left_group or not self._is_any_parameter_reached():
            return
        self._last_backward = backward
        if self._reducer_group is not None:
            self._reducer_group.expect_backward()
        end_of_backward.add(BackwardStage.REDUCE_BUCKETS, self._reduce, self._model_number)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce the gradients at the end of the last backward pass of the step. The backward passes of the other
        logical ranks of this process must have ended."""
        self._turns.check_others_have_ended()
        other_gradients = [self._gradients_by_rank[rank] for rank in self._local_logical_ranks[:-1]]
        self._reduction.begin(other_gradients, all_ranks_have_run=True)
        self._install_buffers(self._local_logical_ranks[0])
        super()._reduce()


def create_logical_ranks_model(
    model: nn.Module, communicator: Communicator, logical_ranks: int, **settings: Any
) -> LogicalRanksModel:
    """Return the module for `distributed_model(model, logical_ranks=...)`. All ranks must call this function."""
    model_class = InterleavedRanksModel if has_synchronized_layers(model) else LogicalRanksModel
    return model_class(model, communicator, logical_ranks, **settings)

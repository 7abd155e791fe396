"""Low-communication training: local steps on every rank, and an outer step that synchronizes the ranks.

`backends/local_sgd_config.py` specifies the formulas. This module uses only the interface of a backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain import validation
from unitrain.backends import checks
from unitrain.backends.base import Backend, Communicator
from unitrain.backends.gradients.forward_buffers import split_running_statistics
from unitrain.backends.local_sgd_config import LocalSGDConfig, parse_local_sgd
from unitrain.backends.objects import broadcast_in_parts, broadcast_tensors, broadcast_with_tensors
from unitrain.backends.optimizer_loading import load_optimizer_state
from unitrain.backends.rank_groups import Subgroup
from unitrain.backends.sharding.state_format import keeps_shards
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.backends.tensors import copy_into
from unitrain.errors import CheckpointError, ModelError
from unitrain.optim.fragments import create_fragments
from unitrain.optim.local_sgd_state import check_state, copy_to_host, mean_of_ranks, shapes_of
from unitrain.optim.outer_groups import OuterGroups, outer_weight
from unitrain.optim.parameter_bucket import real_shape
from unitrain.optim.step import optimizer_parameters
from unitrain.output import get_logger
from unitrain.torch_compat import tensor_version

_log = get_logger(__name__)


class LocalSGD:
    """Local SGD and DiLoCo: every rank trains its own copy of `model`, and the ranks synchronize periodically.

        local = unitrain.LocalSGD(model, optimizer, backend, unitrain.LocalSGDConfig(steps=25))
        for inputs, targets in loader:
            (loss_fn(model(inputs), targets) * loader.loss_weight).backward()
            local.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        local.synchronize()

    `model` is the user's module on `backend.device`, not a module that `distributed_model` returned, and `optimizer`
    contains its parameters. `local_sgd` is a LocalSGDConfig object or a number of steps, which is short for
    LocalSGDConfig(steps=number). The constructor broadcasts parameters, buffers and optimizer state from rank 0. All
    ranks must make the same calls.

    Only parameters that are in `optimizer` and require grad are synchronized. Each rank keeps its own optimizer state.
    Whenever `step` returns a number above 0, the running statistics of normalization layers are averaged, and their
    counts of batches are broadcast from rank 0. The other buffers are also broadcast, unless `broadcast_buffers` is
    False.

    Raises ConfigError or ModelError on every rank for invalid arguments, and if the arguments differ between ranks.
    Raises UnsupportedError if the backend does not support `synchronous_ranks`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        backend: Backend,
        local_sgd: LocalSGDConfig | int,
        *,
        broadcast_buffers: bool = True,
    ) -> None:
        fix = "Use the backend that unitrain.init() returned: with unitrain.init() as backend"
        validation.check_instance("LocalSGD(backend)", backend, Backend, "a backend", fix)
        backend.check_running("LocalSGD")

        def check() -> LocalSGDConfig:
            settings = parse_local_sgd(local_sgd, "LocalSGD(local_sgd)")
            validation.check_boolean("LocalSGD(broadcast_buffers=...)", broadcast_buffers)
            checks.check_unwrapped_model("LocalSGD(model)", model)
            checks.check_trainable_model(model, "none", backend.device)
            checks.check_optimizer_of_model(optimizer, model)
            checks.check_no_shared_memory(dict(checks.named_tensors(model)), "local SGD")
            return settings

        self.settings = call_on_all_ranks(backend, check)
        checks.check_same_settings(
            backend,
            "LocalSGD",
            local_sgd=self.settings,
            optimizer=type(optimizer).__name__,
            parameters_by_group=[len(group["params"]) for group in optimizer.param_groups],
            broadcast_buffers=broadcast_buffers,
        )
        checks.check_same_model(backend, model)
        self._model, self._optimizer, self._backend = model, optimizer, backend
        self._broadcasts_buffers = broadcast_buffers
        broadcast_in_parts(backend, [parameter.data for parameter in model.parameters()])
        broadcast_tensors(backend, [buffer.data for buffer in model.buffers()])
        _broadcast_optimizer_state(optimizer, backend)
        optimizer_parameters_set = set(optimizer_parameters(optimizer))
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter in optimizer_parameters_set and parameter.requires_grad
        }
        self._synchronized_parameters = set(self._parameters.values())
        self._groups = OuterGroups(backend, self.settings)
        self._fragments = create_fragments(self._parameters, self._groups, self.settings)
        self._buckets = [bucket for fragment in self._fragments for bucket in fragment.buckets]
        self._steps = 0  # completed steps, including the warm-up
        # `_steps_since_synchronization` is the position between two synchronizations, and `_synchronized_at` is the
        # value of `_steps` after the last synchronization. `_steps - _synchronized_at` is larger than the position if
        # the run has resumed with fewer local steps.
        self._steps_since_synchronization = self._synchronized_at = 0
        self._are_weights_equal = True
        # The mean over ranks of the weights and buffers; inside `averaged_weights`, this rank's weights and buffers.
        self._other_weights: list[Tensor] | None = None
        self._versions: list[int] = []
        self._averaging_depth = 0

    @property
    def is_warming_up(self) -> bool:
        """Whether the current step is one of the first `warmup_steps` steps, in which gradients are averaged."""
        return self._steps < self.settings.warmup_steps

    @property
    def synchronous_ranks(self) -> Communicator | Subgroup | None:
        """The ranks that average their gradients in the current step, or None if this rank trains independently: all
        ranks in the warm-up, and afterwards the ranks of this rank's synchronous group."""
        return self._backend if self.is_warming_up else self._groups.synchronous

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Replace each `.grad` with its mean over the ranks that train synchronously: all ranks in the first
        `warmup_steps` steps, and afterwards the ranks of this rank's synchronous group.

        Call it after the last backward pass of each step, before gradients are clipped. If this rank trains
        independently after the warm-up, the method does nothing.
        """
        ranks = self.synchronous_ranks
        if ranks is None or self._backend.size == 1:
            return
        for bucket in self._buckets:
            bucket.reduce_gradients(ranks.allreduce if isinstance(ranks, Communicator) else ranks.allreduce_mean)

    @torch.no_grad()
    def step(self) -> int:
        """Count a step of the optimizer, and synchronize the ranks if a synchronization is due. Call it after
        `optimizer.step()`.

        Return the number of steps since the previous synchronization if the ranks are synchronized, otherwise 0. It is
        1 in the first `warmup_steps` steps, and `settings.steps` afterwards, except directly after a resume with other
        settings. With fragments, the result is above 0 once per `settings.steps` steps, when the last fragment is due.
        Raises ModelError, on this rank only, if the optimizer contains a parameter that requires grad but is not
        synchronized.
        """
        self._check_parameters()
        is_warm_up = self.is_warming_up
        self._steps += 1
        self._other_weights = None
        if is_warm_up:
            self._average_buffers()
            if not self.is_warming_up:
                self._start_from_weights()
            return self._count_since_synchronization()
        self._steps_since_synchronization += 1
        self._are_weights_equal = False
        for fragment in self._fragments:
            fragment.step(self._steps_since_synchronization)
        if self._steps_since_synchronization < self.settings.steps:
            return 0
        self._average_buffers()
        self._steps_since_synchronization, self._are_weights_equal = 0, not self.settings.is_streaming
        return self._count_since_synchronization()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context manager in which the model has the mean over ranks of the weights and buffers. All ranks must call
        this method.

        Use it to evaluate or save the model between two synchronizations. Training is not affected: at the end, each
        rank has its own weights again. If the weights of all ranks are equal, as directly after a synchronization of
        all parameters, this method does not communicate.
        """
        if self._are_weights_equal or self._averaging_depth:
            yield
            return
        self._compute_means()
        self._swap_weights()
        self._averaging_depth += 1
        try:
            yield
        finally:
            self._averaging_depth -= 1
            self._swap_weights()
            self._versions = self._weight_versions()

    @contextmanager
    def synchronized_weights(self) -> Iterator[None]:
        """Context manager in which the model has the weights after the last synchronization of each parameter. They are
        equal on all ranks, so this method does not communicate. Call it directly after `step` returned a number
        above 0, when the buffers are also equal."""
        if self._are_weights_equal or not self.settings.is_streaming:
            yield
            return
        own = [bucket.swap_weights(bucket.anchor) for bucket in self._buckets]
        try:
            yield
        finally:
            for bucket, weights in zip(self._buckets, own, strict=True):
                bucket.swap_weights(weights)

    def synchronize(self) -> None:
        """Replace the weights and buffers on all ranks with their mean, without a step of the outer optimizer.

        Call it at the end of training. This method waits for overlapped transfers, but does not merge their results. If
        the last step made the weights equal on all ranks, the weights do not change. Training can continue afterwards.
        """
        for fragment in self._fragments:
            fragment.finish_transfer()
        if not self._are_weights_equal:
            self._compute_means()
            self._swap_weights()
            self._other_weights, self._are_weights_equal = None, True

    def restart(self) -> None:
        """Continue from the current weights, as after a synchronization. Call it after loading other weights, which
        must be equal on all ranks. Overlapped transfers are discarded."""
        for fragment in self._fragments:
            fragment.discard_transfer()
        self._steps_since_synchronization, self._are_weights_equal, self._other_weights = 0, True, None
        self._synchronized_at = self._steps
        self._start_from_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain types and CPU tensors. It is complete on rank 0 only. All ranks
        must call this method, between steps.

        It contains the state of the outer optimizer, the results of overlapped transfers, which this method waits for,
        and each rank's optimizer state, compression error and, between two synchronizations, weights and buffers. Each
        rank broadcasts its own state, except for a sharded checkpoint: the entry "own" then contains this rank's state.
        """
        own: dict[str, Any] = {"optimizer": self._optimizer.state_dict()["state"]}
        if not self._are_weights_equal:
            swapped = self._averaging_depth > 0 and self._other_weights is not None
            weights = self._other_weights if swapped else self._weights()
            assert weights is not None
            own["weights"] = dict(zip(self._weight_names(), weights, strict=True))
        own["errors"] = self._parts_by_name([bucket.outer_mean.error for bucket in self._buckets])
        # Transfers are finished before the slice errors are read, because a transfer changes the slice errors.
        pending = {name: part for fragment in self._fragments for name, part in fragment.finish_transfer().items()}
        outer = {
            "anchors": self._parts_by_name([bucket.anchor for bucket in self._buckets]),
            "momentum": self._parts_by_name([bucket.momentum for bucket in self._buckets]),
            "pending": pending,
            "slice_errors": self._parts_by_name([bucket.outer_mean.gather_slice_error() for bucket in self._buckets]),
        }
        state: dict[str, Any] = {
            "steps": self._steps,
            "steps_since_synchronization": self._steps_since_synchronization,
            "synchronized_at": self._synchronized_at,
            "is_warming_up": self.is_warming_up,
            "groups": self._groups.ranks_by_group,
            "merges_in": {
                name: fragment.steps_until_merge
                for fragment in self._fragments
                if fragment.steps_until_merge
                for name in fragment.names
            },
            "outer": copy_to_host(outer),
            "ranks": [],
        }
        if keeps_shards():
            return {**state, "own": copy_to_host(own)}
        for rank in range(self._backend.size):  # one rank at a time, to limit memory usage
            sent = copy_to_host(own) if rank == self._backend.rank else None
            received = broadcast_with_tensors(self._backend, sent, rank)
            if self._backend.rank == 0:
                state["ranks"].append(received)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load rank 0's `state`; the arguments of other ranks are ignored. All ranks must call this method. An empty
        state has no effect.

        Load the state dicts of the model and the optimizer first. If the number of ranks is unchanged, and the ranks of
        each synchronous group were also in one group when the state was saved, each rank restores its own weights, its
        optimizer state, and the error of its group. With unchanged groups, the run is bit-identical to an uninterrupted
        one. Otherwise, and if the next step is a warm-up step in this run but not in the saved run, every rank loads
        the mean of the saved weights, optimizer states and errors. Raises CheckpointError on every rank if the state
        belongs to a different model or is not a result of `state_dict`.
        """
        backend, is_rank_zero = self._backend, self._backend.rank == 0
        if not is_rank_zero:
            state = {}
        call_on_all_ranks(backend, lambda: check_state(state))
        ranks: Sequence[Mapping[str, Any]] = state.get("ranks", ())
        header = {name: value for name, value in state.items() if name not in ("ranks", "own", "outer")}
        shapes = [shapes_of(state.get("outer", {})), *map(shapes_of, ranks[:1])] if is_rank_zero else []
        header, shapes, count = backend.broadcast_object((header, shapes, len(ranks)))
        if not header:
            return
        for rank_shapes in shapes:
            self._check_shapes(rank_shapes)
        self._steps = header["steps"]
        self._steps_since_synchronization = min(header["steps_since_synchronization"], self.settings.steps - 1)
        self._synchronized_at = header.get("synchronized_at", self._steps - header["steps_since_synchronization"])
        outer = broadcast_with_tensors(backend, dict(state["outer"]) if is_rank_zero else None)
        groups = header.get("groups", [[rank] for rank in range(count)])
        was_warming_up = header.get("is_warming_up", False)
        begins_warmup = self.is_warming_up and not was_warming_up
        if count == backend.size and self._groups.are_within(groups) and not begins_warmup:
            own: Any = None
            errors: Mapping[str, Tensor] = {}
            saved_group = next(ranks_of_group for ranks_of_group in groups if backend.rank in ranks_of_group)
            for rank in range(count):
                received = broadcast_with_tensors(backend, dict(ranks[rank]) if is_rank_zero else None)
                if rank == backend.rank:
                    own = received
                if rank == saved_group[0]:
                    errors = received["errors"]
            scale = self._groups.weight / outer_weight(saved_group, groups)
            if scale != 1:
                errors = {name: error * scale for name, error in errors.items()}
            own = {**own, "errors": errors}
        else:
            if is_rank_zero:
                _log.warning(
                    "The checkpoint was written by %d ranks with local steps in %d groups, and this run has %d ranks "
                    "in %d groups%s. Every rank continues with the mean of the saved weights, optimizer states and "
                    "errors.",
                    count, len(groups), backend.size, len(self._groups.ranks_by_group),
                    " and continues with warm-up steps" if begins_warmup else "",
                )  # fmt: skip
            own = broadcast_with_tensors(backend, mean_of_ranks(ranks) if is_rank_zero else None)
        self._load(outer, own, header.get("merges_in", {}))
        if begins_warmup:
            self.synchronize()  # every rank has loaded the same mean of the weights
        if was_warming_up != self.is_warming_up:
            self.restart()  # outer gradients contain only the later changes of the weights

    @torch.no_grad()
    def _load(
        self, outer: Mapping[str, Any], own: Mapping[str, Any], steps_until_merge_by_name: Mapping[str, int]
    ) -> None:
        weights = own.get("weights")
        self._are_weights_equal, self._other_weights = weights is None, None
        if weights is not None:
            for name, tensor in zip(self._weight_names(), self._weights(), strict=True):
                copy_into(tensor, weights[name])
        groups = self._optimizer.state_dict()["param_groups"]
        defaults = dict(self._optimizer.defaults)
        load_optimizer_state(self._optimizer, {"state": own["optimizer"], "param_groups": groups})
        self._optimizer.defaults = defaults
        for fragment in self._fragments:
            fragment.discard_transfer()
            fragment.load(outer, own["errors"], steps_until_merge_by_name)
        if not self.settings.averages_weights and not outer["anchors"]:  # the saved run averaged weights
            self.synchronize()
            self.restart()

    def _count_since_synchronization(self) -> int:
        """Return the number of steps since the previous synchronization. The current step is a synchronization."""
        count, self._synchronized_at = self._steps - self._synchronized_at, self._steps
        return count

    def _check_parameters(self) -> None:
        """Raise ModelError if the optimizer contains a parameter that requires grad but is not synchronized."""
        for parameter in optimizer_parameters(self._optimizer):
            if parameter.requires_grad and parameter not in self._synchronized_parameters:
                name = next(
                    (name for name, named_parameter in self._model.named_parameters() if named_parameter is parameter),
                    "a parameter",
                )
                raise ModelError(
                    f"Parameter {name!r} was unfrozen, or added to the optimizer, after LocalSGD was built, so "
                    "the ranks would train different values of it. Build LocalSGD while this parameter is trainable "
                    "and in the optimizer, or call local.synchronize() and build another LocalSGD."
                )

    def _start_from_weights(self) -> None:
        for bucket in self._buckets:
            bucket.start_from_weights()

    def _weight_names(self) -> list[str]:
        """Return the names of the synchronized parameters and of the buffers."""
        return [*self._parameters, *(name for name, _ in self._model.named_buffers())]

    def _weights(self) -> list[Tensor]:
        """Return the synchronized parameters, and the buffers."""
        # The buffers are looked up each time, because a forward pass may assign different tensors.
        return [
            *(parameter.data for parameter in self._parameters.values()),
            *(buffer.data for buffer in self._model.buffers()),
        ]

    def _weight_versions(self) -> list[int]:
        return [tensor_version(parameter) for parameter in self._parameters.values()]

    @torch.no_grad()
    def _compute_means(self) -> None:
        """Set `_other_weights` to the mean over ranks of the weights and buffers, unless the mean was already computed
        since the last step. All ranks must call this method."""
        if self._other_weights is not None and self._versions == self._weight_versions():
            return
        own = [tensor.clone() for tensor in self._weights()]
        for bucket in self._buckets:
            bucket.average_weights()
        self._average_buffers()
        means = [tensor.clone() for tensor in self._weights()]
        for tensor, value in zip(self._weights(), own, strict=True):
            copy_into(tensor, value)
        self._other_weights = means

    @torch.no_grad()
    def _swap_weights(self) -> None:
        """Swap the values of the weights and buffers with `_other_weights`, on this rank."""
        assert self._other_weights is not None
        for tensor, other_weight in zip(self._weights(), self._other_weights, strict=True):
            before = tensor.clone()
            copy_into(tensor, other_weight)
            copy_into(other_weight, before)

    def _average_buffers(self) -> None:
        """Average running statistics over ranks, and broadcast their integer counts and, if configured, the other
        buffers from rank 0."""
        statistics, other_buffers = split_running_statistics(self._model)
        averaged = [buffer for buffer in statistics if buffer.is_floating_point()]
        counts = [buffer for buffer in statistics if not buffer.is_floating_point()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in averaged):
            same_dtype = [buffer for buffer in averaged if buffer.dtype == dtype]
            mean = self._backend.allreduce(torch.cat([buffer.reshape(-1) for buffer in same_dtype]))
            for buffer, values in zip(same_dtype, mean.split([buffer.numel() for buffer in same_dtype]), strict=True):
                copy_into(buffer, values.view(buffer.shape))
        broadcast_tensors(self._backend, [*counts, *(other_buffers if self._broadcasts_buffers else ())])

    def _parts_by_name(self, vectors: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Return the parts of the `vectors` of all buckets by parameter name. Vectors that are None are skipped."""
        return {
            name: part
            for bucket, vector in zip(self._buckets, vectors, strict=True)
            if vector is not None
            for name, part in bucket.parts(vector).items()
        }

    def _check_shapes(self, shapes_by_table: Mapping[str, Mapping[str, list[int]]]) -> None:
        real_shapes = {name: real_shape(parameter) for name, parameter in self._parameters.items()}
        weight_shapes = {
            name: list(weight.shape) for name, weight in zip(self._weight_names(), self._weights(), strict=True)
        }
        for table_name, shapes in shapes_by_table.items():
            expected_shapes = weight_shapes if table_name == "weights" else real_shapes
            is_complete = table_name in ("anchors", "weights")  # other state exists after the first use only
            different = (
                shapes.keys() ^ expected_shapes.keys()
                if is_complete and shapes
                else shapes.keys() - expected_shapes.keys()
            )
            for name in different:
                raise CheckpointError(
                    f"The LocalSGD state in the checkpoint {'lacks' if name in expected_shapes else 'contains'} "
                    f"tensor {name!r}, which this run "
                    f"{'synchronizes' if name in expected_shapes else 'does not synchronize'}. Train the same "
                    "parameters as the run that wrote it."
                )
            for name, shape in shapes.items():
                if shape != expected_shapes[name]:
                    raise CheckpointError(
                        f"The LocalSGD state in the checkpoint contains {name!r} with shape {shape}, but this model "
                        f"has {expected_shapes[name]}. Use the same model as the run that wrote it."
                    )


def _broadcast_optimizer_state(optimizer: Optimizer, backend: Backend) -> None:
    state = broadcast_with_tensors(backend, optimizer.state_dict())
    if backend.rank != 0:
        defaults = dict(optimizer.defaults)
        load_optimizer_state(optimizer, state, keeps_dtypes=True)
        # load_state_dict adds entries to `defaults`. Groups that are added later would have them on this rank only.
        optimizer.defaults = defaults

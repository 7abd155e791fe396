"""Gradients that are global when `backward` returns: torch's DistributedDataParallel, with its gaps against the
contract closed.

DDP brings bucketing and overlap of communication with backward on any process group. Added here: models that differ
between ranks and unused parameters are told by name, on all ranks alike; a second backward through a retained graph is
reduced too (DDP leaves those gradients local, and the replicas drift apart); an optimizer step on gradients that were
not reduced raises an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from unitrain.backends.base import Communicator
from unitrain.backends.capabilities import Tunable
from unitrain.backends.gradients.compression import Compressor, compress_buckets
from unitrain.backends.gradients.forward_buffers import ForwardBuffers
from unitrain.backends.gradients.local_gradients import LocalGradients
from unitrain.backends.gradients.outputs import gradient_tensors
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.gradients.unused_parameters import watch_first_backward
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.bootstrap import environment
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import ConfigError, EnvironmentVariableError, ModelError
from unitrain.monitoring.loop_counters import CountedForward

BUCKETS = Tunable(
    "UNITRAIN_BUCKETS_MB",
    "gradients travel in buckets: MiB of the first, and of the rest",
    "1,25",
    ("25,25", "1,5", "5,5", "1,100", "100,100"),
)
BUCKET_VIEW = Tunable("UNITRAIN_BUCKET_VIEW", "gradients lie in the buckets (1), or are copied (0)", "1", ("0",))

_wrapped_models = 0


@dataclass(slots=True)
class _Passes:
    """The forwards with gradients that no backward has followed yet, and the last backward; apart from the module, for
    which setting an attribute takes microseconds.

    `armed` is the number of forwards after which DDP has prepared the backward: those outside of `no_sync`, except
    where it needs the outputs and does not find them.
    """

    forwards: int = 0
    armed: int = 0
    backward: int = -1
    shares_buffers: bool = True  # whether the next forward begins by sharing buffers


class GlobalGradients(DistributedDataParallel):
    """DDP that keeps unitrain's contract; `module` is the user's model, and gradients travel in `group`.

    The reducer sends them in `sent_in`, which does so in `group`. `buffers` are shared before the forwards in which DDP
    would broadcast them.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        rendezvous: Rendezvous,
        *,
        find_unused_parameters: bool,
        compressor: Compressor,
        sent_in: ReducerGroup,
        buffers: ForwardBuffers | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._sent_in = sent_in
        super().__init__(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=group,
            find_unused_parameters=find_unused_parameters,
            **_bucketing(),
        )
        # Shared above, as the contract says. Later on DDP would broadcast all of them in every forward.
        self.broadcast_buffers = False
        self._forward_buffers = buffers
        if compressor != "none":
            compress_buckets(self, compressor, sent_in)
        self._everything = list(model.parameters())
        self._trains = [parameter.requires_grad for parameter in self._everything]
        self._passes = _Passes()
        self._left = False
        self._local = LocalGradients(getattr(model, "_orig_mod", model))
        self._local.reduce_only(self._trained())
        sent_in.on_reduced = self._local.reduced
        global _wrapped_models
        _wrapped_models += 1
        self._rendezvous, self._key, self._changes = rendezvous, f"model/{_wrapped_models}", 0
        if not find_unused_parameters:
            # Over the store, because ranks that wait for a missing gradient have collectives of this backward in
            # flight.
            watch_first_backward(
                self,
                model,
                lambda names: rendezvous.allgather(f"{self._key}/unused", names),
                lambda: self.require_backward_grad_sync,
            )

    def leave_group(self) -> None:
        """Let go of the process group; from here on calling the model calls the user's, and gradients stay local."""
        if not self._left:
            self._left = True
            self._local.stop()
            del self.reducer, self.logger, self.process_group, self._sent_in, self._forward_buffers

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._left:
            return self.module(*inputs, **kwargs)
        trains_now, syncs, passes = torch.is_grad_enabled(), self.require_backward_grad_sync, self._passes
        if trains_now and syncs:
            trains = [parameter.requires_grad for parameter in self._everything]
            if trains != self._trains and any(trains):  # a model that is all frozen has no gradients to reduce
                self._follow_freezing(trains)
        if trains_now and self._forward_buffers is not None:
            if passes.shares_buffers:  # else the step goes on, and its first forward has shared them
                self._forward_buffers.share()
            passes.shares_buffers = syncs
        try:
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            _explain(error)
            raise
        if trains_now:
            tensors, sent_in = gradient_tensors(output), self._sent_in
            passes.forwards += 1
            if syncs:
                passes.armed += not self.find_unused_parameters or _all_found(tensors, output)
                sent_in.expect_backward()
            if tensors:
                prepare = partial(self._prepare_backward, sent_in.loop_counters.count_forward())
                for tensor in tensors:
                    tensor.register_hook(prepare)
        return output

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        group, self.process_group = self.process_group, self._sent_in
        try:
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.process_group = group

    def check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError unless the gradients of all parameters that `optimizer` holds are global.

        It is also raised after another rank has failed with a ModelError, such as that of this check: then neither
        steps. Nothing is communicated.
        """
        if not self._left:
            self._sent_in.check_other_ranks()
            self._sent_in.loop_counters.count_step()
            try:
                self.reducer._check_reducer_finalized()
            except RuntimeError as error:
                _explain(error)
                raise
            self._local.check(optimizer)

    @_disable_dynamo
    def _follow_freezing(self, trains: list[bool]) -> None:
        """Reduce the gradients of those parameters that the user trains from now on, and wait for no others.

        DDP knows those that required a gradient when it was made; of one that does so later, each rank would keep its
        own. All ranks come here; raises ModelError on all where they do not train the same.
        """
        if self.find_unused_parameters and not any(
            now and not then for now, then in zip(trains, self._trains, strict=True)
        ):
            return  # what was frozen counts as unused, until it is trained again
        self._changes += 1
        told = self._rendezvous.allgather(f"{self._key}/trains/{self._changes}", trains)
        names = [name for name, _ in self.module.named_parameters()]
        for rank, other in enumerate(told):
            if other != told[0]:
                name = next(name for name, one, two in zip(names, told[0], other, strict=True) if one != two)
                state, opposite = ("trained", "frozen") if told[0][names.index(name)] else ("frozen", "trained")
                raise ModelError(
                    f"Parameter {name!r} is {state} on rank 0 and {opposite} on rank {rank}. "
                    "Freeze and unfreeze alike on every rank: parameter.requires_grad_(...)."
                )
        self._trains = trains
        self._local.reduce_only(self._trained())
        # As when a wrapped model is unpickled; the reducer before goes, and its hooks with it.
        parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, sparse, {}, self.static_graph)
        for hook, hook_state in self._comm_hooks:
            dist._register_comm_hook(self.reducer, hook_state, hook)
        if self.find_unused_parameters:
            self._mark_used()

    def _mark_used(self) -> None:
        """Mark the parameters with local gradients as used in a new reducer.

        The reducer records which parameters backwards inside `no_sync` use, and does not reduce the gradients of those
        that no rank has used. A new one lacks the record of its predecessor, and only a backward can write it: one that
        adds zeros to these gradients. The hooks of the user are not called for it.
        """
        for parameter in self._local.with_local_gradients():
            if parameter.requires_grad and parameter.grad is not None:
                with _without_hooks(parameter):
                    torch.autograd.backward([parameter], [torch.zeros_like(parameter.grad)])

    def _prepare_backward(self, forward: CountedForward, gradient: Tensor) -> None:
        """Arm the reducer for the backward that reaches an output first, where DDP has not.

        DDP arms it in a forward outside of `no_sync`, for one backward that uses what this forward used. A retained
        graph runs another one without a forward, several forwards may share one, and a backward outside of `no_sync`
        may follow a forward inside of it.
        """
        forward.mark_used()
        passes, backward = self._passes, torch._C._current_graph_task_id()
        if backward == passes.backward:
            return
        forwards, armed = passes.forwards, passes.armed
        passes.forwards, passes.armed, passes.backward = 0, 0, backward
        if not (armed or self.require_backward_grad_sync):
            return
        self._sent_in.expect_backward()
        if armed == 0:
            self.reducer._rebuild_buckets()  # as forward would, after the first backward
        if self.find_unused_parameters and not forwards == armed == 1:
            if reached := self._reached():
                self.reducer.prepare_for_backward(reached)
        elif armed == 0:
            self.reducer.prepare_for_backward([])

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._everything if parameter.requires_grad]

    def _reached(self) -> list[Tensor]:
        """Return a view of each parameter that the running backward will reach; none if it is not one of this model."""
        try:
            with torch.enable_grad():
                return [
                    parameter.view_as(parameter)
                    for parameter in self._everything
                    if parameter.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
                ]
        except RuntimeError:  # torch.autograd.grad with respect to parameters, which leaves every .grad alone
            return []


@contextmanager
def _without_hooks(parameter: Tensor) -> Iterator[None]:
    """Call none of the hooks that are registered on `parameter` inside of the context."""
    hooks = [known for known in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if known]
    removed = [known.copy() for known in hooks]
    for known in hooks:
        known.clear()  # in place, because autograd has a reference to the same dictionary
    try:
        yield
    finally:
        for known, own in zip(hooks, removed, strict=True):
            known.update(own)


def _all_found(tensors: list[Tensor], output: Any) -> bool:
    """Return whether DDP finds all `tensors` in `output`. Otherwise it takes used parameters for unused ones."""
    return set(map(id, tensors)) <= set(map(id, _find_tensors(output)))


def _bucketing() -> dict[str, Any]:
    """Return how DDP is to put gradients together, which changes no more than rounding; `unitrain tune` tries it."""
    chosen: dict[str, Any] = {"gradient_as_bucket_view": environment.setting(BUCKET_VIEW.variable) != "0"}
    text = environment.setting(BUCKETS.variable)
    if text is None:
        return chosen
    try:
        first, rest = (int(part) for part in text.split(","))
        if min(first, rest) < 1:
            raise ValueError
    except ValueError:
        raise EnvironmentVariableError(
            f"UNITRAIN_BUCKETS_MB must be the MiB of the first bucket of gradients and of the rest, got {text!r}. "
            "Use UNITRAIN_BUCKETS_MB=1,25"
        ) from None
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        return {**chosen, "bucket_cap_mb_list": [first, rest]}
    return {**chosen, "bucket_cap_mb": rest}  # before torch 2.14 the first bucket is as it is


def _explain(error: RuntimeError) -> None:
    """Say in our words what DDP says of a backward that has left buckets unfinished."""
    if "Expected to have finished reduction in the prior iteration" in str(error):
        raise ModelError(
            "In the last backward, parameters that earlier ones used got no gradient on this rank, so its gradients "
            "differ from the others'. Use all of them in every loss, or allow it: "
            "backend.distributed_model(model, find_unused_parameters=True)."
        ) from error


def check_same_settings(communicator: Communicator, **settings: object) -> None:
    """Raise ConfigError on every rank when arguments of distributed_model differ between ranks. All call it."""
    of_all_ranks = gather_if_different(communicator, settings) or []
    for rank, found in enumerate(of_all_ranks):
        for name, value in of_all_ranks[0].items():
            if found[name] != value:
                raise ConfigError(
                    f"distributed_model was called with {name}={value!r} on rank 0 and {name}={found[name]!r} on rank "
                    f"{rank}. Give every rank the same."
                )


def check_same_model(communicator: Communicator, model: nn.Module) -> None:
    """Raise ModelError on every rank when parameters or buffers differ in name, shape or dtype between ranks. All call
    it."""
    own = {name: (str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in _tensors(model)}
    tables: list[dict[str, tuple[str, list[int]]]] = gather_if_different(communicator, own) or []
    for rank, table in enumerate(tables):
        for name in dict.fromkeys([*tables[0], *table]):
            expected, found = tables[0].get(name), table.get(name)
            if expected != found:
                raise ModelError(
                    f"The model differs between ranks: {name!r} is {_show(expected)} on rank 0 and {_show(found)} "
                    f"on rank {rank}. Build it from the same arguments on every rank."
                )
    if any(list(table) != list(tables[0]) for table in tables):
        raise ModelError(
            "The model's parameters are in a different order on some ranks. Build it by the same steps on every rank."
        )


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _show(entry: tuple[str, list[int]] | None) -> str:
    return "missing" if entry is None else f"{entry[0]} {entry[1]}"

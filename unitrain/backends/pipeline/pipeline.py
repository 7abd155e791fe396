"""Pipeline: the stages of a sequential model on different ranks, combined with data parallelism."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unitrain import validation
from unitrain.backends import checks
from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPointToPoint, require_capability
from unitrain.backends.gradients.unused_parameters import unused_error
from unitrain.backends.objects import broadcast_tensors
from unitrain.backends.pipeline.arguments import Balance, ScheduleName, check_pipeline_arguments
from unitrain.backends.pipeline.complete_state import (
    gather_model_state,
    gather_optimizer_state,
    load_model_state,
    load_optimizer_state,
)
from unitrain.backends.pipeline.measurement import create_memory_cost, create_time_cost, measure_blocks
from unitrain.backends.pipeline.micro_batches import (
    LossFunction,
    WeightedTargets,
    order_by_replica,
    split_batch,
    split_targets,
)
from unitrain.backends.pipeline.overrides import PipelineArguments, load_pipeline_overrides
from unitrain.backends.pipeline.partition import partition
from unitrain.backends.pipeline.replicas import Replicas
from unitrain.backends.pipeline.stage_runner import SingleStageRunner, StageModule, StageRunner
from unitrain.backends.rank_groups import Subgroup
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.errors import ModelError
from unitrain.torch_compat import foreach_copy_

# Gradients are reduced in buckets of about this size. A reduction needs additional memory for a contiguous copy of the
# bucket and for the mean, which is computed in float32 for half precision.
_BUCKET_BYTES = 25 * 2**20
_MAX_LISTED = 4

_pipeline_numbers = itertools.count()  # all ranks create pipelines in the same order

ResultT = TypeVar("ResultT")


class Pipeline:
    """A sequential model whose blocks are divided into stages on different ranks (pipeline parallelism).

        pipeline = unitrain.Pipeline(model, backend, loss_fn, stages=2, micro_batches=4, example_inputs=inputs)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        loader = unitrain.ShardedLoader(dataset, pipeline.replicas, batch_size=32)
        for inputs, targets in loader:
            loss = pipeline.forward_backward(inputs, targets, loss_weight=loader.loss_weight)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    The ranks 0 to `stages` - 1 compute the stages of replica 0, the next `stages` ranks compute those of replica 1, and
    so on. Each rank keeps the blocks of its stage, and trains them with a separate optimizer. Every batch is divided
    into micro-batches, which the stages process concurrently. Gradients are computed for the mean loss over the samples
    of all replicas.

    All ranks must create the pipeline with the same model and arguments. Parameters and buffers are broadcast from rank
    0. The blocks of a rank's stage are moved to the rank's device, and the blocks of other stages to the device "meta".

    Args:
        model: A torch.nn.Sequential. Its direct children are the blocks, and are never divided.
        backend: The backend that `unitrain.init` returned. With several stages, it must support point-to-point
            communication, as the ddp and horovod backends do.
        loss_fn: A function `loss_fn(output, targets)` that returns the mean loss over the samples of a micro-batch.
        stages: The number of stages. It must divide the number of ranks. A single stage runs on any backend.
        micro_batches: Micro-batches per batch. The fraction of time in which a stage waits for others is about
            (stages - 1) / (micro_batches + stages - 1).
        schedule: "1f1b", in which a stage holds the activations of at most `stages` micro-batches, or "gpipe", in which
            a stage holds the activations of all micro-batches.
        balance: How to divide the blocks: "time" minimizes the time of the slowest stage, "memory" minimizes the memory
            of the largest stage, and a list specifies the number of blocks per stage. Time and memory are measured on
            rank 0, in a forward and backward pass of each block.
        example_inputs: A batch of a replica, for this measurement.

    Raises, on every rank: UnsupportedError for several stages on a backend without point-to-point communication;
    ConfigError for invalid arguments; TensorError for invalid `example_inputs`; ModelError for a model that is not
    sequential, for a block that fails in the measurement, for stages without trainable parameters, and for parameters
    that are shared by different stages.
    """

    def __init__(
        self,
        model: nn.Sequential,
        backend: Backend,
        loss_fn: LossFunction,
        *,
        stages: int,
        micro_batches: int = 4,
        schedule: ScheduleName = "1f1b",
        balance: Balance | Sequence[int] = "time",
        example_inputs: Tensor | None = None,
    ) -> None:
        fix = "Use the backend that unitrain.init() returned: with unitrain.init() as backend"
        validation.check_instance("Pipeline(backend)", backend, Backend, "a backend", fix)
        backend.check_running("Pipeline")
        replicas_per_rank = 1
        self._overrides = load_pipeline_overrides()  # of `unitrain verify`
        if self._overrides is not None:
            arguments = self._overrides.override(
                PipelineArguments(model=model, loss_fn=loss_fn, stages=stages), backend
            )
            model, loss_fn, stages = arguments.model, arguments.loss_fn, arguments.stages
            replicas_per_rank = arguments.replicas_per_rank
        settings = {"stages": stages, "micro_batches": micro_batches, "schedule": schedule, "balance": balance}
        call_on_all_ranks(
            backend, lambda: check_pipeline_arguments(model, backend, loss_fn, example_inputs, **settings)
        )
        checks.check_same_settings(backend, "Pipeline", **settings)
        checks.check_same_model(backend, model)
        self._backend, self._micro_batches = backend, micro_batches
        self._names = list(model.state_dict())
        self._blocks_per_stage = _choose_blocks_per_stage(
            model, backend, stages, micro_batches, schedule, balance, example_inputs
        )
        self._stages, self._stage = stages, backend.rank % stages
        self._replicas = Replicas(backend, stages, replicas_per_rank)
        blocks = _named_blocks(model)
        _check_stages(blocks, self._blocks_per_stage)
        start = sum(self._blocks_per_stage[: self._stage])
        self._module = _take_stage(blocks, start, start + self._blocks_per_stage[self._stage], backend)
        self._module.train(model.training)
        checks.forbid_embedding_renorm(self._module)
        self._replica_group, self._stage_group = self._create_groups()
        self._pipeline_number, self._call_counts = next(_pipeline_numbers), Counter[str]()
        self._runner = _create_runner(self._module, self._replica_group, schedule, loss_fn, backend.device)
        if self._overrides is not None:
            self._overrides.on_pipeline_start(self._module, stages, backend)

    @property
    def stage(self) -> int:
        """The stage of this rank, from 0."""
        return self._stage

    @property
    def blocks_per_stage(self) -> list[int]:
        """The number of blocks of each stage."""
        return list(self._blocks_per_stage)

    @property
    def replicas(self) -> Replicas:
        """The replicas as a communicator for `ShardedLoader` and `MeanMetric`, so that all ranks of a replica read the
        same batches.
        """
        return self._replicas

    @property
    def module(self) -> nn.Sequential:
        """The blocks of this rank's stage. Parameters have the same names as in the complete model."""
        return self._module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's stage, for its optimizer."""
        return self._module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank's stage, with their names in the complete model."""
        return self._module.named_parameters()

    def forward_backward(self, inputs: Tensor, targets: Any, *, loss_weight: float = 1.0) -> Tensor:
        """Add the gradients of the mean loss, averaged over replicas, to `.grad`, and return this loss. All ranks must
        call this method.

        All ranks of a replica pass the same batch: `inputs`, [samples, ...], and `targets`, a tensor [samples, ...] or
        a tuple, list or dictionary of such tensors. Batches may differ in shape, even between replicas. A batch is
        divided into micro-batches whose sizes differ by at most one sample; a batch with fewer samples than
        `micro_batches` has fewer micro-batches. `loss_weight` is the attribute `loss_weight` of the ShardedLoader. The
        loss is a float64 scalar tensor, and is the same on every rank.

        With several stages, the first micro-batch of each shape takes an additional forward pass, in which the stages
        exchange the shapes of their outputs. Raises TensorError and ConfigError for invalid arguments, and ModelError
        if `loss_fn` does not return one floating-point number, or if a trainable parameter of this stage has received
        no gradient and there are several replicas. With several stages, raises DataError if the ranks of a replica have
        micro-batches of different shapes, or, for the first micro-batch of each shape, different values. An error that
        does not occur on all ranks then terminates the other ranks within seconds, even if the caller handles it,
        because their stages cannot continue.
        """
        self._backend.check_collective_allowed("Pipeline.forward_backward")

        def split() -> tuple[list[Tensor], list[WeightedTargets]]:
            fix = "Use loss_weight=loader.loss_weight"
            validation.check_non_negative("Pipeline.forward_backward(loss_weight=...)", loss_weight, fix)
            parts = split_batch(inputs, self._micro_batches, self._replicas.replicas_per_rank)
            return parts, split_targets(targets, [len(values) for values in parts], loss_weight)

        if self._overrides is not None:
            self._overrides.on_batch_start()
        if self._replicas.replicas_per_rank > 1:
            inputs, targets = order_by_replica((inputs, targets), self._replicas.replicas_per_rank)
        micro_batches, weighted_targets = self._check_arguments("forward_backward", split, range(self._backend.size))
        sizes = [len(values) for values in micro_batches]
        with self._reporting_errors():
            loss = self._runner.forward_backward(micro_batches, weighted_targets)
            self._reduce_gradients()
            total = torch.zeros((), dtype=torch.float64, device=self._backend.device) if loss is None else loss
            mean = self._backend.allreduce(total, "sum") / self._replicas.size
        if self._overrides is not None:
            self._overrides.on_batch_end((inputs, targets), sizes, loss_weight, mean)
        return mean

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the model for a batch, without gradients. All ranks of a replica must call this method
        with the same batch, and receive the same output. Other replicas need not call it.

        Call `eval()` first, as for any model. Raises the same errors as `forward_backward`.
        """
        self._backend.check_collective_allowed("Pipeline.forward")
        group = self._replica_group
        if group is None:
            return self._runner.forward(split_batch(inputs, self._micro_batches))
        micro_batches = self._check_arguments("forward", lambda: split_batch(inputs, self._micro_batches), group.ranks)
        with self._reporting_errors():
            return self._runner.forward(micro_batches)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients such that their norm over all stages is at most `max_norm`, and return the original norm.
        All ranks must call this method, after `forward_backward`.

        Equivalent to torch.nn.utils.clip_grad_norm_ for the complete model.
        """
        name, fix = "Pipeline.clip_grad_norm_(max_norm)", "Use max_norm=1.0"
        check = partial(validation.check_positive, name, max_norm, fix)
        self._check_arguments("clip_grad_norm_", check, range(self._backend.size))
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients).double().to(self._backend.device)
        # The gradients of all replicas are equal.
        total = (self._backend.allreduce(norm.square(), "sum") / self._replicas.size).sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def train(self, mode: bool = True) -> None:
        """Set the training mode of all blocks. All ranks must call this method.

        On a change to eval mode, buffers such as running statistics are broadcast from replica 0 to the other replicas.
        """
        if self._module.training and not mode and self._replicas.size > 1:
            buffers = [buffer.data for buffer in self._module.buffers()]
            if self._stage_group is None:
                broadcast_tensors(self._backend, buffers)
            else:
                self._stage_group.broadcast_tensors(buffers, 0)
        self._module.train(mode)

    def eval(self) -> None:
        """Set eval mode: `train(False)`. All ranks must call this method."""
        self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the complete model on every rank, on the CPU. All ranks must call this method.

        It has the keys of the model that was passed to `Pipeline`, so this model can load it in one process.
        """
        state = gather_model_state(self._backend, self._stages, self._module)
        return {name: state[name] for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load `state`, a state dict of the complete model. All ranks must call this method, with equal states.

        Raises CheckpointError on every rank if a tensor is missing, unknown or of a different shape.
        """
        call_on_all_ranks(self._backend, lambda: load_model_state(self._module, self._names, state))

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer of the complete model, on every rank. All ranks must call this method,
        each with the optimizer of its stage.

        It equals the state dict of the same optimizer in one process. Except for their parameters, the parameter groups
        must be equal on all stages.
        """
        call_on_all_ranks(
            self._backend, lambda: checks.check_is_optimizer("optimizer_state_dict(optimizer)", optimizer)
        )
        return gather_optimizer_state(self._backend, self._stages, self._module, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this stage's part of `state`, an optimizer state dict for the complete model, into `optimizer`. All
        ranks must call this method.

        Raises CheckpointError on every rank if `state` is not the state of such an optimizer.
        """
        call_on_all_ranks(
            self._backend, lambda: checks.check_is_optimizer("load_optimizer_state_dict(optimizer)", optimizer)
        )
        load_optimizer_state(self._backend, self._stages, self._module, optimizer, state)

    def _check_arguments(self, method: str, check: Callable[[], ResultT], ranks: Sequence[int]) -> ResultT:
        """Return the result of `check`, which raises an error for invalid arguments.

        With one stage, an error on any rank is raised on all ranks. With several stages, valid arguments require no
        communication, because an exchange between all ranks in each step would take too long. Instead, if `check`
        raises an error on only some of `ranks`, the other ranks terminate.
        """
        if self._replica_group is None:
            return call_on_all_ranks(self._backend, check)
        self._call_counts[method] += 1
        try:
            return check()
        except Exception as error:
            key = f"pipeline/{self._pipeline_number}/{method}/{ranks[0]}-{ranks[-1]}/{self._call_counts[method]}"
            self._replica_group.monitor.report_unless_shared(error, key, ranks)
            raise

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Context manager that reports an error to the other ranks if other stages wait for this one."""
        try:
            yield
        except Exception as error:
            if self._replica_group is not None:
                self._backend.report_failure(error)
            raise

    def _create_groups(self) -> tuple[Subgroup | None, Subgroup | None]:
        """Return the group of this rank's replica, and the group of this stage in all replicas.

        A group is None if it would have only one member. With one stage, both are None, because the group of the stage
        would contain all ranks.
        """
        if self._stages == 1:
            return None, None
        replicas, stages = range(self._replicas.size), range(self._stages)
        point_to_point = require_capability(self._backend, SupportsPointToPoint, f"Pipeline(stages={self._stages})")
        groups = [[replica * self._stages + stage for stage in stages] for replica in replicas]
        if self._replicas.size == 1:
            return point_to_point.create_rank_groups(groups)[0], None
        groups += [[replica * self._stages + stage for replica in replicas] for stage in stages]
        replica_group, stage_group = point_to_point.create_rank_groups(groups)
        return replica_group, stage_group

    def _reduce_gradients(self) -> None:
        """Replace every gradient with its mean over the replicas."""
        if self._replicas.size == 1:
            return
        compute_mean = self._backend.allreduce if self._stage_group is None else self._stage_group.allreduce_mean
        for gradients in _iterate_buckets(self._gradients()):
            reduced = compute_mean(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            pieces = reduced.split([gradient.numel() for gradient in gradients])
            foreach_copy_(
                gradients, [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]
            )

    def _gradients(self) -> list[Tensor]:
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        unused = [name for name, parameter in trained if parameter.grad is None]
        if unused:
            raise unused_error(unused, f"stage {self._stage}", suggests_find_unused=False)
        return [parameter.grad for _, parameter in trained if parameter.grad is not None]


def _create_runner(
    module: StageModule, group: Subgroup | None, schedule: str, loss_fn: LossFunction, device: torch.device
) -> StageRunner:
    if group is None:
        return SingleStageRunner(module, loss_fn)
    # This imports torch's pipelining, which takes seconds.
    from unitrain.backends.pipeline.scheduled_stage_runner import ScheduledStageRunner

    return ScheduledStageRunner(module, group, schedule, loss_fn, device)


def _named_blocks(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the children of `model` with their names. A module that occurs twice counts as two blocks."""
    modules = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in modules if name and "." not in name]


def _iterate_buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of gradients of one dtype with about _BUCKET_BYTES."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    num_bytes = Counter[torch.dtype]()
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
        num_bytes[gradient.dtype] += gradient.nbytes
        if num_bytes[gradient.dtype] >= _BUCKET_BYTES:
            yield by_dtype.pop(gradient.dtype)
            num_bytes[gradient.dtype] = 0
    yield from by_dtype.values()


def _choose_blocks_per_stage(
    model: nn.Sequential,
    backend: Backend,
    stages: int,
    micro_batches: int,
    schedule: str,
    balance: Balance | Sequence[int],
    example_inputs: Tensor | None,
) -> list[int]:
    """Return the number of blocks of each stage, the same on every rank. All ranks must call this function."""
    blocks = _named_blocks(model)
    if stages == 1:
        return [len(blocks)]
    if not isinstance(balance, str):
        return list(balance)

    def measure() -> list[Any]:
        if backend.rank:
            return []
        inputs = split_batch(example_inputs, micro_batches)[0].to(backend.device)
        return measure_blocks(blocks, inputs, backend.device)

    costs = backend.broadcast_object(call_on_all_ranks(backend, measure))
    cost = create_time_cost(costs) if balance == "time" else create_memory_cost(costs, stages, micro_batches, schedule)
    blocks_per_stage = partition(len(blocks), stages, cost)
    if blocks_per_stage is None:
        raise ModelError(
            f"The model cannot be divided into {stages} stages. Each needs trainable parameters, and each except the "
            "first must begin with a block whose input is one tensor that requires a gradient. Use fewer than "
            f"{stages} stages."
        )
    return blocks_per_stage


def _check_stages(blocks: Sequence[tuple[str, nn.Module]], blocks_per_stage: Sequence[int]) -> None:
    """Raise ModelError if a stage has no trainable parameter, or if two stages share a parameter or buffer."""
    owners: dict[int, tuple[int, str]] = {}
    start = 0
    for stage, count in enumerate(blocks_per_stage):
        names = [name for name, _ in blocks[start : start + count]]
        is_trained = False
        for name, block in blocks[start : start + count]:
            for key, tensor in [*block.named_parameters(prefix=name), *block.named_buffers(prefix=name)]:
                is_trained = is_trained or tensor.requires_grad
                owner_stage, owner_key = owners.setdefault(id(tensor), (stage, key))
                if owner_stage != stage:
                    raise ModelError(
                        f"{owner_key!r} in stage {owner_stage} and {key!r} in stage {stage} are the same tensor, but "
                        "stages are on different ranks. Use separate parameters, or put both blocks into one stage: "
                        "Pipeline(balance=[...])."
                    )
        if not is_trained:
            raise ModelError(
                f"Stage {stage}, with blocks {', '.join(map(repr, names[:_MAX_LISTED]))}, has no trainable parameters. "
                'Use balance="time", which gives every stage trainable parameters, or change the blocks per stage.'
            )
        start += count


def _take_stage(blocks: Sequence[tuple[str, nn.Module]], start: int, stop: int, backend: Backend) -> StageModule:
    """Return the module of the blocks [start, stop), with rank 0's values, and release the memory of the other blocks.
    All ranks must call this function."""
    for index, (_, block) in enumerate(blocks):
        with torch.no_grad():
            broadcast_tensors(backend, [tensor.data for tensor in [*block.parameters(), *block.buffers()]])
        block.to(backend.device if start <= index < stop else "meta")
    module = StageModule()
    for name, block in blocks[start:stop]:
        module.add_module(name, block)
    return module

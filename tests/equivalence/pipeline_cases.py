"""Cases that run on the ranks of test_pipeline.py: training with a Pipeline compared with plain torch."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.bootstrap.overrides import OVERRIDES_VARIABLE, overrides_setting
from unitrain.testing.cases import assert_same_on_every_rank, raises
from unitrain.verify.record import RECORDER

FEATURES, CLASSES = 6, 3
loss_fn = nn.CrossEntropyLoss()


class Residual(nn.Module):
    """A block with several layers, whose output may be a non-contiguous tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs + self.inner(inputs)).T.contiguous().T


def build_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a model that is the same on every rank. The computational costs of its blocks differ."""
    torch.manual_seed(0)
    shared = nn.Tanh()  # a module without parameters may occur in several stages
    layers = (nn.Linear(FEATURES, 8), shared, Residual(8), nn.ReLU(inplace=True), nn.Linear(8, 16), shared)
    return nn.Sequential(*layers, nn.Linear(16, CLASSES)).to(dtype)


def data(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def build_pipeline(backend: Backend, model: nn.Sequential, stages: int, **settings: Any) -> unitrain.Pipeline:
    inputs = next(model.parameters()).new_ones(8, FEATURES)
    return unitrain.Pipeline(model, backend, loss_fn, stages=stages, **{"example_inputs": inputs, **settings})


def train_step_in_one_process(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, max_norm: float
) -> tuple[float, float]:
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def trains_like_one_process(
    backend: Backend, stages: int, schedule: str, micro_batches: int, dtype: torch.dtype
) -> None:
    """Train 4 steps. In the last step, the batches of all replicas together have only one sample."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    replicas = backend.size // stages
    dataset, batch_size = data(3 * 10 * replicas + 1, dtype), 10
    model = build_model(dtype)
    if backend.rank:
        nn.init.zeros_(model[0].weight)  # the pipeline broadcasts rank 0's values
    pipeline = build_pipeline(backend, model, stages, schedule=schedule, micro_batches=micro_batches)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.02)
    loader = unitrain.ShardedLoader(dataset, pipeline.replicas, batch_size=batch_size)
    found = []
    for inputs, targets in loader:
        loss = pipeline.forward_backward(inputs, targets, loss_weight=loader.loss_weight)
        found.append((loss.item(), pipeline.clip_grad_norm_(0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    assert len(found) == 4
    assert_same_on_every_rank(backend, found)

    twin = build_model(dtype)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.02)
    order = unitrain.ShardedLoader(dataset, OneProcess(), batch_size=batch_size * replicas)
    expected = [train_step_in_one_process(twin, twin_optimizer, *batch, 0.5) for batch in order]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=10 * tolerance)
    state, optimizer_state = pipeline.state_dict(), pipeline.optimizer_state_dict(optimizer)
    torch.testing.assert_close(state, dict(twin.state_dict()), rtol=0, atol=tolerance)
    assert optimizer_state["param_groups"] == twin_optimizer.state_dict()["param_groups"]
    torch.testing.assert_close(optimizer_state["state"], twin_optimizer.state_dict()["state"], rtol=0, atol=tolerance)
    assert_same_on_every_rank(backend, {name: value.sum().item() for name, value in state.items()})

    # Compare the output of the model for batches that are larger and smaller than the number of micro-batches.
    for samples in (7, 1):
        inputs = dataset.tensors[0][:samples]
        pipeline.eval()
        torch.testing.assert_close(pipeline.forward(inputs), twin(inputs).detach(), rtol=0, atol=tolerance)
        pipeline.train()

    # Resume with different stage boundaries: every layout can load the state of the complete model and optimizer.
    other = build_pipeline(backend, build_model(dtype), stages, balance={1: [7], 2: [1, 6], 3: [2, 1, 4]}[stages])
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    other.load_state_dict(state)
    other.load_optimizer_state_dict(other_optimizer, copy.deepcopy(optimizer_state))
    inputs, targets = data(9, dtype).tensors
    other.forward_backward(inputs, targets)
    other.clip_grad_norm_(0.5)
    other_optimizer.step()
    train_step_in_one_process(twin, twin_optimizer, inputs, targets, 0.5)
    torch.testing.assert_close(other.state_dict(), dict(twin.state_dict()), rtol=0, atol=tolerance)


class OneProcess(unitrain.Communicator):
    """A communicator that contains only this process."""

    rank, size, device = 0, 1, torch.device("cpu")

    def allreduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return tensor.clone()

    def allgather(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape or (1,)).clone()

    def reducescatter(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return tensor.clone()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return tensor.clone()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return obj

    def allgather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def barrier(self) -> None:
        pass


class Block(nn.Module):
    """A convolution block with running statistics and dropout."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.dropout = nn.BatchNorm2d(channels), nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(self.norm(self.convolution(inputs)).relu())


def build_convolutions(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Conv2d(1, 4, 3), *(Block(4, dropout) for _ in range(3)), nn.Flatten(), nn.Linear(64, CLASSES))
    return nn.Sequential(*blocks).double().to(memory_format=torch.channels_last)


def images(samples: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    inputs = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def checkpointed_batch_norm_equals_micro_batches_of_one_process(backend: Backend, stages: int) -> None:
    """BatchNorm normalizes each micro-batch separately. The saved running statistics are those of replica 0."""
    model, twin = build_convolutions(), build_convolutions()
    unitrain.checkpoint_activations(model, "Block")
    pipeline = build_pipeline(backend, model, stages, balance="memory", example_inputs=images(8, 0)[0], micro_batches=3)
    inputs, targets = images(8, pipeline.replicas.rank)
    for _ in range(2):
        pipeline.forward_backward(inputs, targets)
    gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    for replica in reversed(range(pipeline.replicas.size)):
        statistics = {name: buffer.clone() for name, buffer in build_convolutions().named_buffers()}
        twin.load_state_dict(statistics, strict=False)
        for _ in range(2):
            for values, labels in zip(*(part.split([3, 3, 2]) for part in images(8, replica)), strict=True):
                share = len(values) / 8 / pipeline.replicas.size
                (loss_fn(twin(values), labels) * share).backward()
    for name, parameter in twin.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)
    pipeline.eval()
    torch.testing.assert_close(pipeline.state_dict(), dict(twin.state_dict()), rtol=0, atol=1e-12)
    assert_same_on_every_rank(backend, pipeline.forward(images(5, 9)[0]).sum().item())


def dropout_is_the_same_with_checkpointing(backend: Backend, stages: int) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = build_convolutions(dropout=0.5)
        if checkpointed:
            unitrain.checkpoint_activations(model, Block)
        pipeline = build_pipeline(backend, model, stages, balance=[2] * (stages - 1) + [6 - 2 * (stages - 1)])
        torch.manual_seed(backend.rank)
        pipeline.forward_backward(*images(8, pipeline.replicas.rank))
        gradients.append([parameter.grad for parameter in pipeline.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def autocast_keeps_the_dtype_of_parameters(backend: Backend, stages: int) -> None:
    """The stages send bfloat16 activations."""
    inputs, targets = data(8, torch.float32).tensors
    losses = []
    for count in (1, stages):
        pipeline = build_pipeline(backend, build_model(torch.float32), count, balance="memory")
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(pipeline.forward_backward(inputs, targets).item())
        assert all(parameter.grad.dtype == torch.float32 for parameter in pipeline.parameters())
    assert abs(losses[0] - losses[1]) < 1e-12


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


class ReturnPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(inputs), inputs


class AddPair(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0] + inputs[1]


def rejects_invalid_models_and_settings(backend: Backend, stages: int) -> None:
    """Assert that each error is raised on every rank. Requires at least two stages."""

    def build_linear(count: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(count)))

    def create(model: Any = None, **settings: Any) -> unitrain.Pipeline:
        defaults = {"stages": stages, "balance": "time", "example_inputs": torch.ones(4, FEATURES)}
        return unitrain.Pipeline(model or build_linear(4), backend, loss_fn, **{**defaults, **settings})

    def rejects(error_class: type[Exception], text: str, model: Any = None, **settings: Any) -> None:
        assert_same_on_every_rank(backend, raises(error_class, text, lambda: create(model, **settings)))

    rejects(unitrain.ConfigError, f"by {backend.size + 1}, but this job has {backend.size}.", stages=backend.size + 1)
    rejects(
        unitrain.ModelError, f"at least one block per stage, but the model has {stages - 1}.", build_linear(stages - 1)
    )
    rejects(unitrain.ModelError, "divides a torch.nn.Sequential into stages, got Linear.", nn.Linear(3, 3))
    rejects(unitrain.ConfigError, "example_inputs is None", example_inputs=None)
    rejects(unitrain.ConfigError, "Pipeline(balance=[4, 4]) must be", balance=[4, 4])
    rejects(unitrain.ConfigError, "Did you mean 'gpipe'?", schedule="gpip")
    rejects(
        unitrain.ConfigError, "micro_batches=2 on rank 0 and micro_batches=3", micro_batches=2 + (backend.rank == 1)
    )
    rejects(unitrain.ModelError, "Block '0' failed on a micro-batch of example_inputs", example_inputs=torch.ones(4, 2))

    weight = nn.Parameter(torch.eye(FEATURES))
    tied = nn.Sequential(Tied(weight), *build_linear(2), Tied(weight))
    text = f"'0.weight' in stage 0 and '3.weight' in stage {stages - 1} are the same tensor"
    rejects(unitrain.ModelError, text, tied, balance=[1] * (stages - 1) + [5 - stages])
    frozen = build_linear(4)
    frozen[-1].requires_grad_(False)
    rejects(unitrain.ModelError, f"Stage {stages - 1}, with blocks '3', has no trainable parameters.", frozen,
            balance=[5 - stages] + [1] * (stages - 1))  # fmt: skip
    rejects(unitrain.ModelError, f"cannot be divided into {stages} stages", nn.Sequential(
        ReturnPair(), AddPair(), *(nn.Tanh() for _ in range(stages))))  # fmt: skip
    synchronized = nn.Sequential(*build_linear(3), nn.SyncBatchNorm(FEATURES))
    rejects(unitrain.ModelError, "Module '3' is a synchronized BatchNorm", synchronized)

    pipeline = create()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for model in (pipeline, pipeline.module):
        for action in (
            lambda model=model: backend.distributed_model(model, compression="bf16"),
            lambda model=model: backend.distributed_optimizer(optimizer, model, shard="state"),
            lambda model=model: unitrain.Trainer(
                model, optimizer, loss_fn, backend=backend, config=unitrain.TrainConfig(max_steps=1)
            ),
        ):
            text = raises(unitrain.UnsupportedError, "neither gradient compression nor a sharded optimizer", action)
            assert_same_on_every_rank(backend, text)
    raises(unitrain.TensorError, "targets of a Pipeline have shape [3], but there are 4",
           lambda: pipeline.forward_backward(torch.ones(4, FEATURES), torch.zeros(3)))  # fmt: skip
    raises(unitrain.TensorError, "must be one tensor [samples, ...], got shape []",
           lambda: pipeline.forward_backward(torch.tensor(1.0), torch.zeros(3)))  # fmt: skip
    state = pipeline.state_dict()
    del state["1.bias"]
    text = raises(unitrain.CheckpointError, "1 of its 8 tensors are missing and 0 are unknown: 1.bias.",
                  lambda: pipeline.load_state_dict(state))  # fmt: skip
    assert_same_on_every_rank(backend, text)


def tied_parameters_in_one_stage_are_allowed(backend: Backend, stages: int) -> None:
    def build_tied() -> nn.Sequential:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.float64))
        blocks = (Tied(weight), nn.Tanh(), Tied(weight), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
        return nn.Sequential(*blocks).double()

    inputs, targets = data(7).tensors
    twin = build_tied()
    loss_fn(twin(inputs), targets).backward()
    pipeline = build_pipeline(backend, build_tied(), stages, balance=[3] + [1] * (stages - 2) + [4 - stages])
    pipeline.forward_backward(inputs, targets)
    expected = dict(twin.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=1e-12)


def frozen_blocks_join_a_trained_stage(backend: Backend, stages: int) -> None:
    model = build_model()
    model[0].requires_grad_(False)
    pipeline = build_pipeline(backend, model, stages, balance="memory")
    inputs, targets = data(7).tensors
    pipeline.forward_backward(inputs, targets)
    trained = [name for name, parameter in pipeline.named_parameters() if parameter.grad is not None]
    assert trained
    assert not any(name.startswith("0.") for name in trained)


def forward_keeps_no_activations(backend: Backend, stages: int) -> None:
    """After a forward pass, no stage keeps inputs or outputs of its blocks, even if the batch has fewer
    micro-batches."""
    model = build_model()
    pipeline = build_pipeline(backend, model, stages, balance="memory")
    activations: list[weakref.ref[Tensor]] = []
    for block in model:
        block.register_forward_hook(lambda _, inputs, output: activations.extend(map(weakref.ref, (*inputs, output))))
    pipeline.eval()
    for samples in (8, 3):
        output = pipeline.forward(data(samples).tensors[0])
        assert len(output) == samples
    assert activations
    assert not any(reference() is not None for reference in activations)


class ShortIntegers(nn.Module):
    """A block whose output has a dtype that no collective supports."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.argmax(1).to(torch.int16)


def forward_returns_an_unsupported_dtype(backend: Backend, stages: int) -> str:
    pipeline = build_pipeline(backend, build_model().append(ShortIntegers()), stages)
    pipeline.forward(data(8).tensors[0])
    return "not raised"


def different_batches_in_one_replica_raise(backend: Backend, stages: int) -> str:
    pipeline = build_pipeline(backend, build_model(), stages)
    inputs, targets = data(8 * backend.size).tensors
    own = slice(8 * backend.rank, 8 * backend.rank + 8)
    pipeline.forward_backward(inputs[own], targets[own])
    return "not raised"


def different_shapes_in_one_replica_raise(backend: Backend, stages: int, difference: str) -> str:
    """All ranks process two batches of different shapes. Then rank 1 passes a batch of another shape than the other
    ranks, or calls a different method."""
    pipeline = build_pipeline(backend, build_model(), stages)
    inputs, targets = data(8).tensors
    for samples in (8, 6):
        pipeline.forward_backward(inputs[:samples], targets[:samples])
    if difference == "forward" and backend.rank == 1:
        pipeline.forward(inputs)
    else:
        samples = 6 if difference == "shape" and backend.rank == 1 else 8
        pipeline.forward_backward(inputs[:samples], targets[:samples])
    return "not raised"


def invalid_values_on_the_last_rank_raise_on_every_rank(backend: Backend, stages: int) -> None:
    """Assert that inputs without data, a loss weight that is not a number, and states that cannot be loaded raise
    errors. If only the last rank cannot load a state, every rank raises the error."""
    inputs = torch.ones(4, FEATURES, dtype=torch.float64)
    for invalid, text in ((inputs.to("meta"), "is on the device 'meta'"), (inputs.to_sparse(), "torch.sparse_coo")):
        found = raises(
            unitrain.TensorError,
            text,
            lambda: build_pipeline(backend, build_model(), stages, example_inputs=invalid),  # noqa: B023
        )
        assert_same_on_every_rank(backend, found)
    pipeline = build_pipeline(backend, build_model(), stages)
    batch: Any = data(4)[:]
    raises(
        unitrain.ConfigError,
        "must be a number of at least 0",
        lambda: pipeline.forward_backward(*batch, loss_weight=""),
    )
    is_last = backend.rank == backend.size - 1
    state: Any = pipeline.state_dict()
    for other, text in (
        (None, "of the complete model, got None."),
        (dict.fromkeys(state, 1), "does not fit the model"),
    ):
        found = raises(
            unitrain.CheckpointError,
            text,
            lambda: pipeline.load_state_dict(other if is_last else state),  # noqa: B023
        )
        assert_same_on_every_rank(backend, found)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    state = pipeline.optimizer_state_dict(optimizer)
    for other in (None, {}, {"state": {}, "param_groups": ["group"]}, state | {"state": None}):
        found = raises(
            unitrain.CheckpointError,
            "The optimizer state cannot be loaded: ",
            lambda: pipeline.load_optimizer_state_dict(optimizer, other if is_last else state),  # noqa: B023
        )
        assert_same_on_every_rank(backend, found)
    found = raises(
        unitrain.ModelError,
        "load_optimizer_state_dict(optimizer) must be a torch.optim.Optimizer, got ",
        lambda: pipeline.load_optimizer_state_dict(state if is_last else optimizer, state),
    )
    assert_same_on_every_rank(backend, found)
    pipeline.load_optimizer_state_dict(optimizer, state)


def handle_an_error_on_the_last_rank(backend: Backend, fault: str) -> str:
    """Raise and handle an error on the last rank, and return its text. Without error propagation, the other ranks would
    wait for the last rank."""
    is_last = backend.rank == backend.size - 1
    model = build_model()
    if fault == "block":
        model.append(Failing() if is_last else nn.Identity())
    norm = nn.BatchNorm1d(CLASSES).double()
    if fault == "shapes":
        model.extend([norm, FailingAlways() if is_last else nn.Identity()])
    pipeline = build_pipeline(backend, model, 2)
    inputs, targets = data(8)[:]
    try:
        if fault == "forward":
            pipeline.forward(None if is_last else inputs)  # type: ignore[arg-type]
        broken = inputs[0, 0] if is_last and fault == "inputs" else inputs
        pipeline.forward_backward(broken, targets[:3] if is_last and fault == "targets" else targets)
        pipeline.clip_grad_norm_(float("nan") if is_last and fault == "max_norm" else 1.0)
    except (unitrain.TensorError, unitrain.ConfigError, ZeroDivisionError) as error:
        assert norm.num_batches_tracked == 0  # determining the shapes does not update statistics
        return f"{type(error).__name__}: {error}"
    return "no error"


class Failing(nn.Module):
    """A block whose forward pass raises an error during training."""

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.training and inputs.requires_grad and inputs.abs().sum():
            raise ZeroDivisionError("of a block")
        return inputs


class FailingAlways(nn.Module):
    """A block whose forward pass always raises an error, even when the pipeline determines the shapes."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise ZeroDivisionError("of a block")


def train_as_verified_script(backend: Backend, folder: str, stages: int, replicas: int, wrong: bool) -> None:
    """Train like a script under `unitrain verify`, which ends the run after 6 steps. The last batch of each epoch is
    uneven. If `wrong` is true, one gradient is 1% too large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OVERRIDES_VARIABLE, overrides_setting(RECORDER, folder))
        torch.manual_seed(0)
        layers = (nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
        balance = {1: [4], 2: [2, 2], 3: [1, 1, 2]}[stages]
        pipeline = unitrain.Pipeline(
            nn.Sequential(*layers), backend, loss_fn, stages=stages, micro_batches=2, balance=balance
        )
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.02)
        dataset = data((10 + 5) * replicas - 1, torch.float32)
        loader = unitrain.ShardedLoader(dataset, pipeline.replicas, batch_size=10)

        def train() -> None:
            for _ in range(4):
                for inputs, targets in loader:
                    pipeline.forward_backward(inputs, targets, loss_weight=loader.loss_weight)
                    if wrong and backend.rank == backend.size - 1:
                        next(pipeline.parameters()).grad.mul_(1.01)  # type: ignore[union-attr]
                    optimizer.step()
                    optimizer.zero_grad()

        with pytest.raises(SystemExit):
            train()

"""Training with sharded parameters gives the same results as replicated training. Checkpoints can be loaded with any
sharding, backend and number of ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsShardedParameters, require_capability
from unitrain.backends.sharding.forward_passes import align_forward_passes
from unitrain.errors import ConfigError
from unitrain.testing import RankError, RankGroup

INPUTS, WIDTH, CLASSES = 8, 10, 4


def data(samples: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, INPUTS, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.linear(self.norm(inputs).relu())


@dataclass(frozen=True)
class BatchInfo:
    samples: int


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from data(5)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES)).double()


def make_trainer(backend: Backend, settings: dict[str, Any]) -> Trainer:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    config = TrainConfig(
        global_batch_size=12, gradient_accumulation_steps=2, sync_batch_norm=True, max_grad_norm=0.5, ema_decay=0.5,
        eval_batch_size=4, progress="off", **settings,
    )  # fmt: skip
    return Trainer(
        model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, scheduler=scheduler,
        forward=lambda model, batch: (model(batch[0].double()), batch[1]),
    )  # fmt: skip


def train(backend: Backend, settings: dict[str, Any]) -> tuple[list[Any], dict[str, float]]:
    """Train for `max_steps`. Return the weights, their average, predictions and results."""
    run = make_trainer(backend, settings)
    results = run.fit(data(), data(11))
    assert run.averaged_model is not None
    # Evaluate fewer samples than ranks, and a stream of unknown length.
    results |= {
        f"{name}_{key}": value
        for name, some in (("one", data(1)), ("stream", Stream()))
        for key, value in run.evaluate(some).items()
    }
    states = [*backend.unwrap(run.model).state_dict().values(), *run.averaged_model.state_dict().values()]
    if "output_dir" in settings:  # the checkpoint has the weights of the last step
        for module in (backend.unwrap(run.model), run.averaged_model):
            module.load_state_dict({name: torch.zeros_like(value) for name, value in module.state_dict().items()})
        run.load_weights(settings["output_dir"])
    return [*states, run.predict(data(2)), run.predict(data(7))], results


def assert_equal(one: tuple[list[Any], dict[str, float]], other: tuple[list[Any], dict[str, float]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-10)
    assert one[1] == pytest.approx(other[1], abs=1e-10)


def test_sharded_parameters_train_and_resume_like_replicated_parameters(tmp_path: Path) -> None:
    """Resume one run with 2, 3 and 1 ranks on both backends, with and without sharding."""
    with RankGroup("local", 1) as group:
        expected = {steps: group.run(train, {"max_steps": steps})[0] for steps in (3, 5, 7, 9, 10)}
    parts = [
        ("ddp", 2, 3, {"shard": "parameters", "checkpoint_format": "full"}),
        ("horovod", 3, 5, {"shard": "parameters", "shard_blocks": ("Block",), "checkpoint_activations": ("Block",)}),
        ("horovod", 2, 7, {"shard": "gradients"}),
        ("ddp", 3, 9, {"shard": "parameters"}),
        ("local", 1, 10, {"shard": "parameters"}),
    ]
    for backend, size, steps, settings in parts:
        with RankGroup(backend, size) as group:
            settings = {**settings, "output_dir": tmp_path, "resume": True, "max_steps": steps}
            for found in group.run(train, settings):
                assert_equal(found, expected[steps])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"compile": True}, "compile=True is not supported"),
        ({"channels_last": True}, "channels_last=True is not supported"),
        ({"find_unused_parameters": True}, "find_unused_parameters=True is not supported"),
        ({"compression": "fp16"}, "compression='fp16' is not supported"),
        ({"shard_blocks": "Block"}, "shard_blocks must be a tuple of class names"),
        ({"shard": "state", "shard_blocks": ("Block",)}, "but shard is 'state'"),
        ({"shard": "gradients", "compression": "powersgd"}, "because PowerSGD compresses complete gradients"),
    ],
)
def test_settings_that_do_not_support_sharded_parameters_raise(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**{"max_steps": 1, "shard": "parameters", **settings})


def fail_on_last_rank(backend: Backend) -> str:
    """Raise an exception on the last rank between the forward and the backward pass. The other ranks wait in the
    backward pass."""
    model = backend.distributed_model(build_model().to(backend.device), shard="parameters")
    loss = model(torch.ones(2, INPUTS, device=backend.device).double()).sum()
    if backend.rank == backend.size - 1:
        error = ValueError("broken sample")
        backend.report_failure(error)
        raise error
    loss.backward()
    return "completed"


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_failing_rank_ends_a_backward_pass_of_sharded_parameters(backend: str) -> None:
    with RankGroup(backend, 2) as group, pytest.raises(RankError, match="broken sample"):
        group.run(fail_on_last_rank, timeout_seconds=60)


class ReversedBlocks(nn.Module):
    """A model that calls its blocks in the reverse order of their definition."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            inputs = block(inputs)
        return inputs


def evaluate_on_first_rank(backend: Backend, runs_backward: bool) -> None:
    """Run two forward passes without gradients in which only rank 0 has a batch. If `runs_backward`, run a forward
    and a backward pass first."""
    torch.manual_seed(0)
    model = ReversedBlocks()
    plain_model, average = copy.deepcopy(model), copy.deepcopy(model)
    distributed = backend.distributed_model(model, shard="parameters", shard_blocks=("Block",))
    require_capability(backend, SupportsShardedParameters, "this test").shard_copy(average, distributed)
    inputs = torch.randn(4, WIDTH)
    if runs_backward:
        distributed(inputs).sum().backward()
    for sharded in (model, average):
        sharded.eval()
        plain_model.load_state_dict(sharded.state_dict())
        expected = plain_model.eval()(inputs)
        batches = [(inputs, BatchInfo(4))] * 2 if backend.rank == 0 else []
        with torch.no_grad():
            outputs = [sharded(batch) for batch, _ in align_forward_passes(sharded, batches, backend)]
        torch.testing.assert_close(outputs, [expected] * len(batches))


def test_a_rank_without_a_batch_gathers_blocks_in_the_order_of_the_forward_pass() -> None:
    with RankGroup("ddp", 2) as group:
        group.run(evaluate_on_first_rank, True)
        group.run(evaluate_on_first_rank, False)

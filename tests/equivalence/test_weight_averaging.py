"""Averaged weights equal torch's AveragedModel. They are evaluated, saved and restored on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import GROUPS_ON_DDP
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.order import epoch_order
from unitrain.errors import CheckpointError, ModelError
from unitrain.optim.ema import WeightAverage
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
DECAY, SAMPLES, GLOBAL_BATCH, EPOCHS = 0.9, 50, 12, 4


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_trainer(backend: Backend, model: nn.Module, **settings: Any) -> Trainer:
    config = TrainConfig(
        **{
            "max_epochs": EPOCHS,
            "batch_size": GLOBAL_BATCH // backend.size,
            "ema_decay": DECAY,
            "sync_batch_norm": True,
            "progress": "off",
            **settings,
        }
    )
    return Trainer(model, optimizer_of(model), nn.functional.cross_entropy, backend=backend, config=config)


def compute_loss(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        inputs, targets = data().tensors
        return nn.functional.cross_entropy(model(inputs), targets).item()


def train_in_plain_loop(epochs: int = EPOCHS) -> tuple[nn.Module, nn.Module]:
    """Train in a plain loop in one process. Return the model and its AveragedModel."""
    model = network()
    optimizer = optimizer_of(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    inputs, targets = data().tensors
    for epoch in range(epochs):
        for part in epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True).split(GLOBAL_BATCH):
            nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    module: nn.Module = average.module
    return model, module


def train_and_return_states(
    backend: Backend, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Train and evaluate. Return the states of the model and of its average, and the validation loss."""
    trainer = make_trainer(backend, network(), **settings)
    results = trainer.fit(data(), data())
    assert trainer.averaged_model is not None
    raw = backend.unwrap(trainer.model).state_dict()
    assert trainer.evaluate(data())["loss"] == results["val_loss"]
    return raw, trainer.averaged_model.state_dict(), results["val_loss"]


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.fixture(scope="module", params=GROUPS_ON_DDP, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


def test_average_equals_averaged_model_of_torch_and_is_evaluated(group: RankGroup) -> None:
    model, average = train_in_plain_loop()
    for raw, averaged, loss in group.run(train_and_return_states, {}, timeout_seconds=120):
        assert_near(raw, model.state_dict())
        assert_near(averaged, average.state_dict())
        assert loss == pytest.approx(compute_loss(average), abs=1e-6)
    assert abs(compute_loss(model) - compute_loss(average)) > 1e-3, (
        "the model and the average must have different losses"
    )


def test_average_resumes_on_another_backend(group: RankGroup, tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), "resume": True}
    make_trainer(LOCAL, network(), **settings, max_epochs=2).fit(data())
    _, average = train_in_plain_loop()
    results = group.run(train_and_return_states, settings, timeout_seconds=120)
    for _, averaged, _ in results:
        assert_near(averaged, average.state_dict())
    back = make_trainer(LOCAL, network(), **settings)
    assert back.averaged_model is not None
    assert_near(back.averaged_model.state_dict(), results[0][1], 0)


def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    uninterrupted = train_and_return_states(LOCAL, {})
    settings = {"output_dir": tmp_path, "resume": True}
    train_and_return_states(LOCAL, {**settings, "max_epochs": 2})
    resumed = train_and_return_states(LOCAL, settings)
    assert_near(resumed[0], uninterrupted[0], 0)
    assert_near(resumed[1], uninterrupted[1], 0)


def test_average_is_initialized_from_the_model_in_new_and_resumed_runs(tmp_path: Path) -> None:
    trainer = make_trainer(LOCAL, network())
    assert trainer.averaged_model is not None
    assert_near(trainer.averaged_model.state_dict(), network().state_dict(), 0)
    settings = {"output_dir": tmp_path, "resume": True}
    raw = make_trainer(LOCAL, network(), **settings, ema_decay=None, max_epochs=2)
    assert raw.averaged_model is None
    raw.fit(data())
    begins = make_trainer(LOCAL, network(), **settings)
    assert begins.averaged_model is not None
    assert_near(begins.averaged_model.state_dict(), raw.model.state_dict(), 0)


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_loading_averaged_weights_from_a_checkpoint_without_an_average_raises(
    checkpoint_format: str, tmp_path: Path
) -> None:
    make_trainer(
        LOCAL, network(), output_dir=tmp_path, ema_decay=None, max_epochs=1, checkpoint_format=checkpoint_format
    ).fit(data())
    trainer = make_trainer(LOCAL, network())
    with pytest.raises(CheckpointError, match=r"has no averaged weights, because its run had no ema_decay\. Leave"):
        trainer.load_weights(tmp_path)
    assert_near(trainer.model.state_dict(), network().state_dict(), 0)


class Overflowing(nn.Module):
    """A model whose gradient is infinite in the selected steps."""

    def __init__(self, overflows: set[int]) -> None:
        super().__init__()
        self.inner, self.overflows, self.backwards = nn.Linear(6, 3), overflows, 0
        nn.init.constant_(self.inner.weight, 0.1)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        if output.requires_grad:
            output.register_hook(self._overflow)
        return output

    def _overflow(self, gradient: Tensor) -> Tensor | None:
        self.backwards += 1
        return gradient * float("inf") if self.backwards - 1 in self.overflows else None


@pytest.mark.parametrize("fused", [False, True])
def test_step_skipped_by_fp16_does_not_change_the_average(fused: bool) -> None:
    model = Overflowing({2, 3})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    config = TrainConfig(max_steps=6, batch_size=8, precision="fp16", ema_decay=0.5, progress="off")
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, backend=LOCAL, config=config)
    average, steps = trainer._weight_average, []
    assert average is not None
    update = average.update

    def counted() -> None:
        steps.append(trainer.progress.step)
        update()

    average.update = counted  # type: ignore[method-assign]
    trainer.fit(data())
    assert steps == [0, 1, 4, 5]


class Quantized(nn.Module):
    """A model with a frozen integer parameter, like a quantized model. The parameter is registered before (`first`) or
    after the trained weights."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        codes = nn.Parameter(torch.arange(1, 13).reshape(2, 6), requires_grad=False)
        if first:
            self.codes = codes
        self.inner = nn.Linear(2, 3)
        if not first:
            self.codes = codes

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(nn.functional.linear(x, self.codes * 0.1))
        return output


@pytest.mark.parametrize("first", [True, False])
def test_frozen_integer_parameters_are_copied(first: bool) -> None:
    model = Quantized(first=first)
    trained = torch.optim.SGD(model.inner.parameters(), lr=0.05)
    config = TrainConfig(max_steps=4, batch_size=8, ema_decay=DECAY, progress="off")
    trainer = Trainer(model, trained, nn.functional.cross_entropy, backend=LOCAL, config=config)
    trainer.fit(data())
    averaged = trainer.averaged_model
    assert isinstance(averaged, Quantized)
    assert averaged.codes.equal(model.codes)
    assert not averaged.inner.weight.equal(model.inner.weight)


class Half(nn.Module):
    """A model with weights in half precision and a head in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(6, 8).to(dtype), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.to(self.body.weight.dtype)).float().tanh()
        output: Tensor = self.head(hidden.to(self.head.weight.dtype)).float()
        return output


def train_half(backend: Backend, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Train with a slow average. Return its stored state, and the maximum difference of an exact average."""
    is_sharded = settings.get("shard") == "parameters"  # then all parameters of a block need one dtype
    model = Half(dtype).to(dtype) if is_sharded else Half(dtype)
    trainer = make_trainer(backend, model, **{"ema_decay": 0.995, "sync_batch_norm": False, **settings})
    average = trainer._weight_average
    assert average is not None
    exact = [full(parameter).double() for parameter in average.stored_model.parameters()]
    update = average.update
    is_first = trainer.progress.step == 0

    def updated() -> None:
        nonlocal exact, is_first
        weights = [full(parameter).double() for parameter in backend.unwrap(trainer.model).parameters()]
        if is_first:
            exact, is_first = weights, False
        exact = [0.995 * mean + 0.005 * weight for mean, weight in zip(exact, weights, strict=True)]
        update()

    average.update = updated  # type: ignore[method-assign]
    results = trainer.fit(data(), data())
    assert trainer.averaged_model is not None
    stored = [full(parameter) for parameter in average.stored_model.parameters()]
    for evaluated, mean in zip(trainer.averaged_model.parameters(), stored, strict=True):
        assert full(evaluated).equal(mean.to(evaluated.dtype))
    dtypes = [dtype] * 4 if is_sharded else [dtype, dtype, torch.float32, torch.float32]
    assert [parameter.dtype for parameter in trainer.averaged_model.parameters()] == dtypes
    assert trainer.evaluate(data())["loss"] == results["val_loss"]
    difference = max(float((mean - want).abs().max()) for mean, want in zip(stored, exact, strict=True))
    return average.stored_model.state_dict(), difference


def full(parameter: Any) -> Tensor:
    complete: Tensor = parameter.detach()
    return complete.full_tensor() if hasattr(complete, "full_tensor") else complete.clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("dtype", "checkpoint_format", "shard"),
    [
        (torch.bfloat16, "full", "none"),
        (torch.float16, "sharded", "none"),
        (torch.bfloat16, "full", "parameters"),
        (torch.bfloat16, "sharded", "parameters"),
    ],
    ids=str,
)
def test_averages_of_half_precision_weights_have_float32_precision_and_resume(
    group: RankGroup, dtype: torch.dtype, checkpoint_format: str, shard: str, tmp_path: Path
) -> None:
    sharding: dict[str, Any] = {"shard": shard}
    uninterrupted = group.run(train_half, dtype, sharding, timeout_seconds=120)
    settings = {**sharding, "output_dir": str(tmp_path), "checkpoint_format": checkpoint_format, "resume": True}
    group.run(train_half, dtype, {**settings, "max_epochs": 2}, timeout_seconds=120)
    for (found, difference), (wanted, other) in zip(
        group.run(train_half, dtype, settings, timeout_seconds=120), uninterrupted, strict=True
    ):
        assert max(difference, other) < 1e-6
        assert_near(found, wanted, 0)


def test_average_of_an_earlier_version_in_half_precision_is_loaded() -> None:
    model = Half(torch.bfloat16)
    average = WeightAverage(model, 0.999)
    average.start()
    state = {name: value + 1 for name, value in model.state_dict().items()}
    average.load_state_dict({"steps": 3, "pending_steps": 0, "model": state})
    assert_near(average.model.state_dict(), state, 0)
    for _ in range(100):
        average.update()
    change = average.stored_model.get_parameter("body.weight") - model.body.weight.float()
    torch.testing.assert_close(change, torch.full_like(change, 0.999**100), rtol=0, atol=0.01)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it holds a file")


def test_uncopyable_model_is_rejected() -> None:
    with pytest.raises(
        ModelError, match=r"Uncopyable cannot be copied: it holds a file\. Make the model copyable by copy\.deepcopy"
    ):
        make_trainer(LOCAL, Uncopyable(6, 3))

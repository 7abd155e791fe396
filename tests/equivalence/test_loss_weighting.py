"""Training with a summed loss over tokens equals training in one process with the mean over all tokens of a step."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain.backends.base import Backend, ReduceOp
from unitrain.backends.local import LocalBackend
from unitrain.callbacks.callback import Callback
from unitrain.config import TrainConfig
from unitrain.data.order import epoch_order
from unitrain.errors import ModelError
from unitrain.optim.loss_weighting import Loss, read_loss
from unitrain.testing import run_ranks
from unitrain.trainer import Trainer

LOCAL = LocalBackend(torch.device("cpu"))
IGNORED = -100


def sequences(count: int = 10) -> TensorDataset:
    """Return inputs of shape [count, 5 tokens, 4] and their classes. Sample i has i % 6 unmasked tokens."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 3, (count, 5), generator=generator)
    for sample in range(count):
        targets[sample, sample % 6 :] = IGNORED
    return TensorDataset(torch.randn(count, 5, 4, generator=generator), targets)


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, int((target != IGNORED).sum())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def make_trainer(model: nn.Module, loss_fn: Any = sum_and_count, **settings: object) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = TrainConfig(**{"max_epochs": 2, "progress": "off", **settings})  # type: ignore[arg-type]
    return Trainer(model, optimizer, loss_fn, backend=LOCAL, config=config)


def test_loss_is_the_mean_over_the_tokens_of_a_step() -> None:
    data = sequences()
    found = network()
    results = make_trainer(found, batch_size=2, gradient_accumulation_steps=2).fit(data, data)

    by_hand, last = network(), 0.0
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    inputs, targets = data.tensors
    for epoch in range(2):
        losses, tokens = 0.0, 0
        for chosen in epoch_order(len(data), seed=0, epoch=epoch, shuffle=True).split(4):
            total, count = sum_and_count(by_hand(inputs[chosen]), targets[chosen])
            losses, tokens = losses + total.item(), tokens + count
            if count:
                (total / count).backward()
                optimizer.step()
                optimizer.zero_grad()
        last = losses / tokens
    for one, other in zip(found.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert results["train_loss"] == pytest.approx(last, rel=1e-6)
    total, count = sum_and_count(by_hand(inputs), targets)
    assert results["val_loss"] == pytest.approx(total.item() / count, rel=1e-5)


class AddsFirstLayer(Callback):
    """Adds the parameters of the first layer to the optimizer after the second step."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 2:
            trainer.optimizer.add_param_group(
                {"params": list(unwrap_layers(trainer.model)[0].parameters()), "lr": 0.25}
            )


def test_tokens_may_be_counted_in_the_same_tensor_for_each_batch() -> None:
    data, counter = sequences(), torch.zeros((), dtype=torch.int64)

    def sum_and_counter(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = sum_and_count(output, target)
        return total, counter.fill_(count)

    expected, found = network(), network()
    settings = {"batch_size": 2, "gradient_accumulation_steps": 2}
    results = make_trainer(expected, **settings).fit(data, data)
    assert make_trainer(found, sum_and_counter, **settings).fit(data, data) == results
    assert torch.equal(found.weight, expected.weight)


def unwrap_layers(model: Any) -> nn.Sequential:
    layers: nn.Sequential = getattr(model, "module", model)
    return layers


def deeper_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def fit_with_added_group(backend: Backend) -> list[Tensor]:
    model = deeper_network()
    trainer = Trainer(
        model,
        torch.optim.SGD(model[1].parameters(), lr=0.5),
        sum_and_count,
        backend=backend,
        config=TrainConfig(
            batch_size=4 // backend.size, max_grad_norm=0.3, max_epochs=2, progress="off", shuffle=False
        ),
        callbacks=[AddsFirstLayer()],
    )
    trainer.fit(sequences(12))
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_parameters_that_join_an_optimizer_are_weighted_and_clipped_like_the_others() -> None:
    by_hand = deeper_network()
    optimizer = torch.optim.SGD(by_hand[1].parameters(), lr=0.5)
    inputs, targets = sequences(12).tensors
    for step in range(6):
        chosen = slice(4 * (step % 3), 4 * (step % 3) + 4)
        by_hand.zero_grad()
        total, count = sum_and_count(by_hand(inputs[chosen]), targets[chosen])
        (total / count).backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.3)
        optimizer.step()
        if step == 1:
            optimizer.add_param_group({"params": list(by_hand[0].parameters()), "lr": 0.25})
    expected = list(by_hand.parameters())
    for found in [fit_with_added_group(LOCAL), *run_ranks(fit_with_added_group, 2)]:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_step_without_tokens_does_not_change_parameters() -> None:
    inputs, targets = sequences().tensors
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    results = make_trainer(model, batch_size=4, max_epochs=1).fit(
        TensorDataset(inputs, torch.full_like(targets, IGNORED))
    )
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert results == {"train_loss": 0.0}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((torch.tensor(1.0), torch.ones(4)), r"^The number of tokens in a summed loss must be one number, got"),
        ((torch.tensor(1.0), "4"), r"must be one number, got an object of class str\. Let loss_fn return"),
        ((torch.tensor(1.0), 0.85), r"must be an integer, .* got 0\.85\. .*unitrain\.Loss\("),
        ((torch.tensor(1.0), 4.0), r"must be an integer, .* got 4\.0\."),
        ((torch.tensor(1.0), torch.tensor(0.5, dtype=torch.float64)), r"must be an integer.*0\.5 \(dtype float64\)\."),
        ((torch.tensor(1.0), torch.tensor(True)), r"must be an integer, .* got True \(dtype bool\)\."),
        (namedtuple("Result", "loss accuracy")(torch.tensor(1.0), 1.0), r"must be an integer, .* got 1\.0\."),
        ((torch.tensor(1.0), 2, 3), r"^The loss must be one number, got an object of class tuple\. Let loss_fn return"),
        (1.5, r"^The loss must be one number, got an object of class float\."),
    ],
)  # fmt: skip
def test_invalid_losses_are_rejected(returned: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_loss(returned)


def test_pair_of_loss_and_accuracy_is_rejected_in_training_and_evaluation() -> None:
    data = sequences()
    for read_only in (False, True):
        trainer = make_trainer(network(), lambda output, target: (output.square().mean(), output.mean()), batch_size=4)
        with pytest.raises(ModelError, match=r"must be an integer, the number of tokens .* return the loss alone"):
            trainer.evaluate(data) if read_only else trainer.fit(data)


def test_loss_with_class_weights_equals_weighted_mean_of_torch() -> None:
    inputs, targets = sequences().tensors
    targets[:, 0] = 2
    class_weights = torch.tensor([0.5, 1.25, 0.1])

    def weighted(output: Tensor, target: Tensor, reduction: str = "sum") -> Tensor:
        return nn.functional.cross_entropy(
            output.flatten(0, 1), target.flatten(), class_weights, ignore_index=IGNORED, reduction=reduction
        )

    def sum_and_weight(output: Tensor, target: Tensor) -> Loss:
        return Loss(weighted(output, target), class_weights[target[target != IGNORED]].sum())

    found, by_hand = network(), network()
    settings: dict[str, Any] = {"batch_size": 2, "gradient_accumulation_steps": 5, "max_epochs": 3}
    make_trainer(found, sum_and_weight, **settings).fit(TensorDataset(inputs, targets))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        weighted(by_hand(inputs), targets, "mean").backward()
        optimizer.step()
    torch.testing.assert_close(found.weight, by_hand.weight, rtol=0, atol=1e-6)


def test_many_tokens_fit_into_half_precision() -> None:
    """The gradient of a sum over 40,000 tokens would overflow. The communicated gradient is close to the gradient of
    the mean."""
    model = network()
    seen: list[float] = []
    model.weight.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))
    inputs = torch.randn(4, 10_000, 4, generator=torch.Generator().manual_seed(3))
    make_trainer(model, batch_size=4, max_steps=3, max_epochs=None).fit(
        TensorDataset(inputs, torch.zeros(4, 10_000, dtype=torch.long))
    )
    assert all(0 < value < 2 for value in seen), seen


def test_loss_per_sample_is_rejected_with_a_suggestion() -> None:
    model = network()
    trainer = make_trainer(model, batch_size=4)
    trainer.loss_fn = lambda output, target: output.sum((1, 2))
    with pytest.raises(ModelError, match=r"must be one number, got shape \[4\]\. .*a pair \(loss\.sum\(\), number of"):
        trainer.fit(sequences())


def log_token_counting(backend: Backend) -> list[str]:
    """Return a log of the allreduces that count tokens and of the completed gradients of each step."""
    log: list[str] = []
    allreduce = backend.allreduce

    def record(tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        log.append(f"count in backward {torch._C._current_graph_task_id() != -1}")
        return allreduce(tensor, op)

    class Gradients(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            backend.allreduce = record  # type: ignore[method-assign]

        def on_before_optimizer_step(self, trainer: Trainer) -> None:
            log.append("gradients")

        def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
            backend.allreduce = allreduce  # type: ignore[method-assign]

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = TrainConfig(max_epochs=1, batch_size=2, gradient_accumulation_steps=2, progress="off")
    Trainer(model, optimizer, sum_and_count, backend=backend, config=config, callbacks=[Gradients()]).fit(sequences(16))
    return log


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_tokens_are_counted_while_gradients_are_reduced(backend: str) -> None:
    for log in run_ranks(log_token_counting, size=2, backend=backend):
        # Other allreduces run before the first backward pass, for example to estimate the number of tokens, and after
        # the last one.
        steps = ["count in backward True", "gradients"] * 2
        first = log.index(steps[0])
        assert log[first : first + 4] == steps
        assert {*log[:first], *log[first + 4 :]} == {"count in backward False"}

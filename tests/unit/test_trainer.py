"""The Trainer in one process: results that are bit-identical to plain torch, settings, errors and displays."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unitrain.backends.local import LocalBackend
from unitrain.callbacks.callback import Callback
from unitrain.config import TrainConfig
from unitrain.data.order import epoch_order
from unitrain.errors import CheckpointError, ConfigError, DataError, ModelError, NonFiniteLossError
from unitrain.output import plain_console
from unitrain.progress import display
from unitrain.trainer import Trainer

LOCAL = LocalBackend(torch.device("cpu"))
OptimizerFactory = Callable[[Any], Optimizer]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def samples(length: int = 22, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(length, 6, generator=generator), torch.randint(3, (length,), generator=generator))


def create_sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def create_adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def create_config(**more: Any) -> TrainConfig:
    length = {} if "max_steps" in more or "max_epochs" in more else {"max_epochs": 3}
    return TrainConfig(**{"batch_size": 4, "progress": "off", **length, **more})


def build_trainer(
    config: TrainConfig, model: nn.Module | None = None, optimizer: OptimizerFactory = create_sgd, **more: Any
) -> Trainer:
    model = network() if model is None else model
    return Trainer(model, optimizer(model.parameters()), nn.CrossEntropyLoss(), backend=LOCAL, config=config, **more)


def train_in_plain_torch(
    data: TensorDataset,
    optimizer_class: OptimizerFactory,
    *,
    max_epochs: int,
    batch_size: int,
    gradient_accumulation_steps: int,
    max_grad_norm: float | None,
    seed: int,
) -> tuple[nn.Module, list[float]]:
    """Train with a loop in plain torch on complete tensors. Return the model and the mean loss of each epoch."""
    model, losses = network(), []
    optimizer = optimizer_class(model.parameters())
    inputs, targets = data.tensors
    for epoch in range(max_epochs):
        order, total = epoch_order(len(data), seed=seed, epoch=epoch, shuffle=True), 0.0
        for step in order.split(batch_size * gradient_accumulation_steps):
            micro_steps = math.ceil(len(step) / batch_size)
            for part in step.tensor_split(micro_steps):
                loss = nn.functional.cross_entropy(model(inputs[part]), targets[part])
                (loss * (len(part) / len(step))).backward()
                total += loss.item() * len(part)
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total / len(data))
    return model, losses


@pytest.mark.parametrize("optimizer", [create_sgd, create_adamw])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("length", [21, 24])
def test_trainer_is_bit_identical_to_a_plain_torch_loop(
    optimizer: OptimizerFactory, accumulate: int, clip_norm: float | None, length: int
) -> None:
    given = {
        "max_epochs": 3,
        "batch_size": 4,
        "gradient_accumulation_steps": accumulate,
        "max_grad_norm": clip_norm,
        "seed": 5,
    }
    expected, losses = train_in_plain_torch(samples(length), optimizer, **given)
    trainer = build_trainer(create_config(**given), optimizer=optimizer)
    results = trainer.fit(samples(length))
    for name, value in expected.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    assert results == {"train_loss": pytest.approx(losses[-1], rel=1e-12)}


def test_accumulation_equals_the_global_batch_up_to_rounding() -> None:
    models = []
    for batch_size, accumulate in ((12, 1), (4, 3), (1, 12)):
        trainer = build_trainer(
            create_config(batch_size=batch_size, gradient_accumulation_steps=accumulate, max_epochs=4)
        )
        trainer.fit(samples(29))
        models.append(trainer.model.state_dict())
    for other in models[1:]:
        for name, value in models[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)


def test_dataloader_and_its_dataset_give_equal_training() -> None:
    opaque: Any = DataLoader(samples(), batch_size=4, shuffle=True, num_workers=1)
    plain, loaded = build_trainer(create_config()), build_trainer(create_config(batch_size=None))
    plain.fit(samples())
    loaded.fit(opaque)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)


@pytest.mark.parametrize(("unit", "expected"), [("step", 18), ("epoch", 3)])
def test_scheduler_steps_once_per_optimizer_step_or_epoch(unit: Any, expected: int) -> None:
    model = network()
    optimizer = create_sgd(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    config = create_config(scheduler_interval=unit, gradient_accumulation_steps=1)
    Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, config=config, scheduler=scheduler).fit(samples())
    assert scheduler.last_epoch == expected
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**expected)


def test_epoch_scheduler_steps_at_the_end_of_the_epoch() -> None:
    model = network()
    optimizer = create_sgd(model.parameters())
    scheduler = StepLR(optimizer, 1)
    config = create_config(scheduler_interval="epoch", max_steps=8)  # an epoch has 6 steps
    Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, config=config, scheduler=scheduler).fit(samples())
    assert scheduler.last_epoch == 1


def test_plateau_scheduler_uses_the_validation_loss() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=1e-12)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
    plateau = {"backend": LOCAL, "scheduler": scheduler}
    Trainer(model, optimizer, nn.CrossEntropyLoss(), config=create_config(scheduler_interval="epoch"), **plateau).fit(
        samples(), samples(9)
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-14)
    with pytest.raises(
        ConfigError, match=r"^ReduceLROnPlateau needs the results of an epoch.*scheduler_interval=\"epoch\""
    ):
        Trainer(model, optimizer, nn.CrossEntropyLoss(), config=create_config(), **plateau)


def test_max_steps_counts_optimizer_steps() -> None:
    trainer = build_trainer(create_config(max_steps=8, gradient_accumulation_steps=2))
    trainer.fit(samples())  # an epoch has 3 steps
    assert (trainer.progress.epoch, trainer.progress.step, trainer.progress.sample) == (2, 8, 16)
    complete_epochs = build_trainer(create_config(max_steps=6, gradient_accumulation_steps=2))
    complete_epochs.fit(samples())
    assert (complete_epochs.progress.epoch, complete_epochs.progress.sample) == (2, 0)


def test_second_fit_of_a_finished_run_does_not_train() -> None:
    trainer = build_trainer(create_config(max_epochs=1))
    trainer.fit(samples())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.fit(samples()) == {}
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("log_every", [2, 1000])
def test_non_finite_loss_ends_the_run_before_a_checkpoint(tmp_path: Path, log_every: int) -> None:
    inputs, targets = samples().tensors
    broken = inputs.clone()
    broken[epoch_order(22, seed=0, epoch=1, shuffle=True)[13]] = float("inf")  # each epoch uses this sample
    trainer = build_trainer(create_config(output_dir=tmp_path, log_every_n_steps=log_every))
    with pytest.raises(
        NonFiniteLossError, match=r"^The mean loss became nan in epoch 1, by step \d+\. Lower the learning"
    ):
        trainer.fit(TensorDataset(broken, targets))
    assert list(tmp_path.glob("step-*")) == []
    assert not (tmp_path / "history.jsonl").exists()


def test_non_finite_loss_is_detected_at_the_next_sync_point() -> None:
    inputs, targets = samples().tensors
    trainer = build_trainer(create_config(log_every_n_steps=2))
    with pytest.raises(NonFiniteLossError, match=r"in epoch 1, by step 2\."):
        trainer.fit(TensorDataset(inputs * float("nan"), targets))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_of_parameters_without_an_optimizer_are_ignored(precision: str) -> None:
    """These gradients neither accumulate over steps nor change the norm for gradient clipping."""
    results = []
    for frozen in (True, False):
        model = network()
        model[0].requires_grad_(not frozen)  # type: ignore[index]
        optimizer = create_sgd(model[3].parameters())  # type: ignore[index]
        Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL,
            config=create_config(max_grad_norm=0.05, find_unused_parameters=True, precision=precision),
        ).fit(samples())  # fmt: skip
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_interrupted_fit_continues_with_complete_steps(precision: str) -> None:
    given = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "precision": precision, "shuffle": False}
    uninterrupted = build_trainer(create_config(**given))
    results = uninterrupted.fit(samples())
    stopped, calls, loss_fn = build_trainer(create_config(**given)), 0, nn.CrossEntropyLoss()

    def interrupted(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        loss: Tensor = loss_fn(output, target)
        return loss

    stopped.loss_fn = interrupted
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(samples())
    assert stopped.progress.step == 1
    assert stopped.fit(samples())["train_loss"] == results["train_loss"]
    for one, two in zip(uninterrupted.model.parameters(), stopped.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("given", "data"),
    [
        ({"global_batch_size": 8, "batch_size": 2}, samples()),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 4, "batch_size": None}, samples()),
        ({"global_batch_size": 8, "batch_size": None}, DataLoader(samples(), batch_size=2, shuffle=True)),
        ({"gradient_accumulation_steps": 4, "batch_size": 2}, samples()),
    ],
)
def test_batch_settings_with_equal_global_batches_give_equal_training(given: dict[str, Any], data: Any) -> None:
    first, other = (
        build_trainer(create_config(batch_size=2, gradient_accumulation_steps=4)),
        build_trainer(create_config(**given)),
    )
    first.fit(samples())
    other.fit(data)
    for one, two in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_plateau_scheduler_uses_the_monitored_result() -> None:
    def trainer(monitor: str | None) -> Trainer:
        model = network()
        optimizer = create_sgd(model.parameters())
        return Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, metrics={"zero": lambda output, target: 0.0},
            config=create_config(max_epochs=4, scheduler_interval="epoch", monitor=monitor),
            scheduler=ReduceLROnPlateau(optimizer, patience=0, threshold=0.0),
        )  # fmt: skip

    constant, falling = trainer("val_zero"), trainer("train_loss")
    for one in (constant, falling):
        one.fit(samples(), samples(9))
    assert constant.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    assert falling.optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ConfigError, match=r"monitor 'val_zer' is not .* Did you mean 'val_zero'\? Available: train"):
        trainer("val_zer").fit(samples(), samples(9))
    with pytest.raises(ConfigError, match=r"monitor 'val_loss' is used only by ReduceLROnPlateau, which this run does"):
        build_trainer(create_config(monitor="val_loss"))


def test_history_has_one_row_per_epoch(tmp_path: Path) -> None:
    model = network()
    optimizer = create_sgd(model.parameters())
    trainer = Trainer(
        model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL,
        config=create_config(output_dir=tmp_path, log_every_n_steps=1),
        scheduler=StepLR(optimizer, 6), metrics={"accuracy": lambda output, target: output.argmax(1) == target},
    )  # fmt: skip
    results = trainer.fit(samples(), samples(9))
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 6), (2, 12), (3, 18)]
    assert {name: rows[-1][name] for name in results} == results
    assert list(results) == ["train_loss", "val_loss", "val_accuracy"]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.01, 0.001, 0.0001])
    assert all(row["samples_per_second"] == pytest.approx(22 / row["seconds"]) for row in rows)


def test_evaluation_is_exact_and_does_not_change_the_model() -> None:
    class RecordingModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.frozen = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
            self.head = nn.Linear(6, 3)
            self.modes: set[tuple[bool, bool]] = set()

        def forward(self, inputs: Tensor) -> Tensor:
            self.modes.add((self.training, torch.is_grad_enabled()))
            return self.head(self.frozen(self.norm(inputs)))  # type: ignore[no-any-return]

    model = RecordingModel()
    model.frozen.eval()
    per_sample: Callable[[Any, Any], Tensor] = lambda output, target: output.argmax(1) == target  # noqa: E731
    mean: Callable[[Any, Any], Tensor] = lambda output, target: (output.argmax(1) == target).float().mean()  # noqa: E731
    trainer = build_trainer(create_config(), model, metrics={"accuracy": per_sample, "mean": mean})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    results = trainer.evaluate(samples(23))
    assert model.modes == {(False, False)}
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    inputs, targets = samples(23).tensors
    with torch.no_grad():
        output = model.eval()(inputs)
    right = int((output.argmax(1) == targets).sum())
    assert results["accuracy"] == right / 23
    assert results["mean"] == pytest.approx(right / 23, rel=1e-6)
    assert results["loss"] == pytest.approx(nn.functional.cross_entropy(output, targets).item(), rel=1e-6)


class BatchSizeRecorder(nn.Linear):
    """A model that records the batch sizes of an evaluation."""

    seen: list[int]

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            self.seen.append(len(inputs))
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("val_data", "given", "expected"),
    [
        (samples(9), {"batch_size": None}, [5, 4]),
        (samples(9), {"batch_size": 5}, [5, 4]),
        (samples(9), {"batch_size": None, "eval_batch_size": 7}, [7, 2]),
        (DataLoader(samples(9), batch_size=6), {"batch_size": 5}, [6, 3]),
        (DataLoader(samples(9), batch_size=6), {"batch_size": 5, "eval_batch_size": 6}, [6, 3]),
    ],
)
def test_batch_size_of_the_training_loader_is_the_default_for_evaluation(
    val_data: Any, given: dict[str, Any], expected: list[int]
) -> None:
    model = BatchSizeRecorder(6, 3)
    model.seen = []
    trainer = build_trainer(create_config(max_epochs=1, **given), model)
    trainer.fit(DataLoader(samples(), batch_size=5), val_data)
    assert model.seen == expected
    model.seen.clear()
    trainer.evaluate(val_data)
    assert model.seen == expected


def test_evaluation_without_a_batch_size_names_eval_batch_size() -> None:
    with pytest.raises(
        ConfigError, match=r"^TensorDataset was given without a batch size\. Use TrainConfig\(eval_batch_size=32\)"
    ):
        build_trainer(create_config(batch_size=None)).evaluate(samples())


def test_inputs_may_be_nested_structures() -> None:
    class Pairs(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return {"left": torch.ones(2) * index, "both": (torch.ones(1), torch.ones(1))}, index % 3

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, inputs: dict[str, Any]) -> Tensor:
            return self.head(torch.cat([inputs["left"], *inputs["both"]], dim=1))  # type: ignore[no-any-return]

    assert build_trainer(create_config(batch_size=2), Joined()).fit(Pairs(), Pairs()).keys() == {
        "train_loss",
        "val_loss",
    }


def test_invalid_trainer_arguments_are_rejected() -> None:
    inputs, targets = samples().tensors
    with pytest.raises(
        DataError, match=r"^A batch must be a pair \(inputs, targets\) or a mapping .*, got a list of 3\."
    ):
        build_trainer(create_config()).fit(TensorDataset(inputs, inputs, targets))
    model = network()
    trainer = Trainer(
        model,
        create_sgd(model.parameters()),
        nn.CrossEntropyLoss(reduction="none"),
        backend=LOCAL,
        config=create_config(),
    )
    with pytest.raises(ModelError, match=r"^The loss must be one number, got shape \[4\]\. .*loss\.mean\(\), or a"):
        trainer.fit(samples())
    with pytest.raises(ModelError, match="1 of the optimizer's 1 parameters do not belong to Sequential"):
        Trainer(
            network(),
            create_sgd([nn.Parameter(torch.ones(1))]),
            nn.CrossEntropyLoss(),
            backend=LOCAL,
            config=create_config(),
        )
    with pytest.raises(DataError, match=r"^The evaluation data is empty\."):
        build_trainer(create_config()).fit(samples(), samples(0))
    with pytest.raises(ConfigError, match="without a batch size"):
        build_trainer(create_config(batch_size=None)).fit(samples())


def test_history_that_cannot_be_written_raises(tmp_path: Path) -> None:
    trainer = build_trainer(create_config(output_dir=tmp_path))
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"^Cannot write .*history\.jsonl' is not a regular file"):
        trainer.fit(samples())


def test_optimizer_state_loaded_before_training_is_kept() -> None:
    first = build_trainer(create_config(max_epochs=1))
    first.fit(samples())
    model = network()
    model.load_state_dict(first.model.state_dict())
    optimizer = create_sgd(model.parameters())
    optimizer.load_state_dict(first.optimizer.state_dict())
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, config=create_config(max_epochs=1))
    assert trainer.optimizer is optimizer
    states = (made.state_dict()["state"] for made in (first.optimizer, optimizer))
    for left, right in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(left["momentum_buffer"], right["momentum_buffer"])


def test_progress_prints_one_line_per_epoch_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    build_trainer(create_config(progress="auto")).fit(samples(), samples(9))
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert all("train_loss" in line and "val_loss" in line and "samples/s" in line for line in lines)
    build_trainer(create_config(progress="off")).fit(samples())
    assert capfd.readouterr() == ("", "")


def test_progress_draws_a_bar_on_a_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("unitrain.progress.display._Bar.interval_seconds", 0.0)
    build_trainer(create_config(max_steps=20, log_every_n_steps=1, progress="auto")).fit(samples())
    err = capfd.readouterr().err
    assert "20/20" in err
    assert "loss" in err
    assert "━" in err


@pytest.mark.parametrize("display_class", [display._Lines, display._Bar])
def test_progress_fits_80_columns(display_class: type[display._TimedDisplay]) -> None:
    screen = io.StringIO()
    shown = display_class(plain_console(file=screen, force_terminal=True, width=80, color_system=None))
    shown.interval_seconds = -1.0
    with shown:
        shown.start(12_345, 100)
        shown.set_loss(1234.5678)
        shown.show_slow_ranks("rank 2 is slow: data 41 ms a step, others 6 ms")
        for _ in range(3):
            shown.count_step(99, 100_000)
        shown.show_epoch(99, {f"val_metric_{number}": number / 3 for number in range(9)})
    lines = re.sub(r"\x1b\[[\d;?]*\w", "", screen.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80, lines
    text = "\n".join(lines)
    for expected in ("3/12345", "loss 1234.5678", "samples/s", "rank 2 is slow: data 41 ms a step, others 6 ms"):
        assert expected in text
    assert all(f"val_metric_{number} {number / 3:.4f}" in text for number in range(9))


@pytest.mark.parametrize("display_class", [display._Lines, display._Bar])
def test_brackets_in_messages_and_names_are_not_markup(display_class: type[display._TimedDisplay]) -> None:
    screen = io.StringIO()
    with display_class(plain_console(file=screen, width=80, color_system=None)) as shown:
        shown.start(3, 1)
        shown.show_message("stopped after step 1: see [/tmp/x] and [red]")
        shown.show_validation(1, {"val_[bold]": 0.5})
    assert "see [/tmp/x] and [red]" in screen.getvalue()
    assert "val_[bold] 0.5000" in screen.getvalue()


def test_bar_is_drawn_on_the_terminal_of_the_launch_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard error of a rank may be a pipe, as under horovodrun."""
    reading, writing = pty.openpty()
    monkeypatch.setenv("UNITRAIN_TERMINAL", os.ttyname(writing))
    with display.choose_display("auto", 0) as shown:
        assert isinstance(shown, display._Bar)
        shown.start(3, 1)
        shown._next_update_at = 0.0
        shown.count_step(1, 8)
    output = b""
    while b"1/3" not in output:  # a read may return only a part of the output
        assert select.select([reading], [], [], 10)[0], output
        output += os.read(reading, 10_000)
    assert isinstance(display.choose_display("lines", 0), display._Lines)
    assert type(display.choose_display("auto", 1)) is display.ProgressDisplay
    monkeypatch.setenv("UNITRAIN_TERMINAL", "/dev/null")
    assert isinstance(display.choose_display("auto", 0), display._Lines)
    monkeypatch.setenv("UNITRAIN_TERMINAL", "/dev/pts/absent")
    assert isinstance(display.choose_display("auto", 0), display._Lines)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("restores", [False, True])
def test_eval_mode_that_a_callback_leaves_on_is_reported_once(restores: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Evaluates(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 2:
                trainer.model.eval()
                if restores:
                    trainer.model.train()

    model = network()
    config = TrainConfig(max_epochs=2, batch_size=4, progress="off", log_every_n_steps=1)
    trainer = Trainer(
        model, SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), backend=LOCAL, config=config,
        callbacks=[Evaluates()],
    )  # fmt: skip
    trainer.fit(samples())
    messages = [message for message in caplog.messages if "the model is in eval mode" in message]
    assert [message[:13] for message in messages] == ([] if restores else ["After step 2,"])

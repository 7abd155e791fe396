"""Callbacks: order of the hooks, errors, EarlyStopping, GradientWatch, Profiler and MemorySnapshot."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import GROUPS_ON_DDP, nightly
from launches import running_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import Callback, EarlyStopping, GradientWatch, MemorySnapshot, Profiler, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.order import MicroBatch
from unitrain.errors import CallbackError, ConfigError, DataError, ModelError, NonFiniteGradientError
from unitrain.optim.loss_weighting import Loss
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
STEPS_PER_EPOCH = 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator))


def make_trainer(backend: Backend, callbacks: list[Callback], **settings: Any) -> Trainer:
    """Return a trainer with four steps per epoch on any number of ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    metrics = settings.pop("metrics", None)
    loss_fn = settings.pop("loss_fn", nn.functional.cross_entropy)
    if "max_steps" not in settings:
        settings.setdefault("max_epochs", 2)
    config = TrainConfig(batch_size=12 // backend.size, progress="off", **settings)
    return Trainer(model, optimizer, loss_fn, backend=backend, config=config, metrics=metrics, callbacks=callbacks)


def parameters(trainer: Trainer) -> Tensor:
    return nn.utils.parameters_to_vector(trainer.backend.unwrap(trainer.model).parameters()).detach()


class Journal(Callback):
    """Records the calls of its hooks."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.lines.append(f"start {trainer.progress.step}")

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: MicroBatch, loss: Loss) -> None:
        assert [len(tensor) for tensor in batch] == [micro_batch.samples] * 2
        assert (loss.value is trainer.last_loss, loss.tokens) == (True, None)
        self.lines.append(f"micro-step {trainer.progress.step}")

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        assert all(parameter.grad is not None for parameter in trainer.model.parameters())
        self.lines.append(f"gradients {trainer.progress.step}")

    def on_step_end(self, trainer: Trainer) -> None:
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        self.lines.append(f"step {trainer.progress.step}")

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        assert set(results) == set(trainer.result_names)
        self.lines.append(f"epoch {trainer.progress.epoch}")

    def on_fit_end(self, trainer: Trainer) -> None:
        self.lines.append(f"end {trainer.progress.step}")


def metric_with_values(values: list[float]) -> dict[str, Any]:
    """Return a metric that has the given values in consecutive evaluations of one batch each."""
    left = iter(values)
    return {"scripted": lambda output, target: next(left)}


def test_hooks_are_called_in_order() -> None:
    journal = Journal()
    make_trainer(LOCAL, [journal], gradient_accumulation_steps=2).fit(data(), data())  # two steps per epoch
    steps = [[*[f"micro-step {done}"] * 2, f"gradients {done}", f"step {done + 1}"] for done in range(4)]
    assert journal.lines == ["start 0", *steps[0], *steps[1], "epoch 1", *steps[2], *steps[3], "epoch 2", "end 4"]


def test_a_hook_may_be_assigned_to_an_instance() -> None:
    callback, steps = Callback(), []
    callback.on_step_end = lambda trainer: steps.append(trainer.progress.step)  # type: ignore[method-assign]
    make_trainer(LOCAL, [callback], max_steps=2).fit(data())
    assert steps == [1, 2]


def test_on_before_optimizer_step_receives_unclipped_gradients() -> None:
    class Norm(Callback):
        def on_before_optimizer_step(self, trainer: Trainer) -> None:
            self.norm = float(nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]))

    norms = Norm()
    make_trainer(LOCAL, [norms], max_steps=1, max_grad_norm=1e-3).fit(data())
    assert norms.norm > 0.1


def test_an_error_names_the_callback_and_the_hook() -> None:
    class Broken(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 3:
                raise ZeroDivisionError("by zero")

    journal = Journal()
    with pytest.raises(CallbackError, match=r"Broken\.on_step_end failed on rank 0, after step 3: ZeroDivi.*: by") as e:
        make_trainer(LOCAL, [Broken(), journal]).fit(data())
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert journal.lines[-1] == "end 3"  # on_fit_end is called


def test_an_error_in_on_fit_end_does_not_skip_other_callbacks() -> None:
    class Broken(Callback):
        def on_fit_end(self, trainer: Trainer) -> None:
            raise OSError("no space left")

    journal = Journal()
    with pytest.raises(CallbackError, match=r"Broken\.on_fit_end failed on rank 0, after step 8: OSError: no space"):
        make_trainer(LOCAL, [Broken(), journal]).fit(data())
    assert journal.lines[-1] == "end 8"


def test_an_error_in_on_fit_end_does_not_replace_the_error_that_ended_fit(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            raise DataError("the first error")

        def on_fit_end(self, trainer: Trainer) -> None:
            raise OSError("no space left")

    journal = Journal()
    with pytest.raises(DataError, match="the first error"):
        make_trainer(LOCAL, [Broken(), journal]).fit(data())
    assert "on_fit_end failed after DataError had ended fit: Broken.on_fit_end failed on rank 0" in caplog.text
    assert "OSError: no space left" in caplog.text
    assert journal.lines[-1] == "end 1"


class FailsOnce(Callback):
    """Raises an error in the first call of `hook` after `step` completed steps."""

    def __init__(self, hook: str, step: int) -> None:
        self.hook, self.step, self.failed = hook, step, False

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: MicroBatch, loss: Loss) -> None:
        self.fail(trainer, "on_micro_batch_end")

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.fail(trainer, "on_before_optimizer_step")

    def on_step_end(self, trainer: Trainer) -> None:
        self.fail(trainer, "on_step_end")

    def fail(self, trainer: Trainer, hook: str) -> None:
        if hook == self.hook and trainer.progress.step == self.step and not self.failed:
            self.failed = True
            raise DataError("once")


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("hook", ["on_micro_batch_end", "on_before_optimizer_step", "on_step_end"])
def test_a_step_interrupted_by_a_callback_error_is_counted_once(hook: str, tokens: bool) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        if not tokens:
            return nn.functional.cross_entropy(output, target)
        counted = target != 0
        return nn.functional.cross_entropy(output[counted], target[counted], reduction="sum"), counted.sum()

    settings = {"max_epochs": 1, "shuffle": False, "log_every_n_steps": 1, "loss_fn": loss_fn}
    uninterrupted, stopped = make_trainer(LOCAL, [], **settings), make_trainer(LOCAL, [FailsOnce(hook, 2)], **settings)
    results = uninterrupted.fit(data())
    with pytest.raises(DataError, match="once"):
        stopped.fit(data())
    assert stopped.progress.step == 2
    assert stopped.fit(data()) == results
    assert torch.equal(parameters(stopped), parameters(uninterrupted))


def test_a_unitrain_error_is_not_wrapped() -> None:
    class RaisesDataError(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            raise DataError("No such data. Give some.")

    with pytest.raises(DataError, match="No such data"):
        make_trainer(LOCAL, [RaisesDataError()]).fit(data())


def test_class_instead_of_an_instance_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"must be a unitrain\.Callback, got .*EarlyStopping"):
        make_trainer(LOCAL, [EarlyStopping])  # the class instead of an instance


def epochs_until_stopped(values: list[float], **settings: Any) -> int:
    stopping = EarlyStopping("val_scripted", **settings)
    trainer = make_trainer(
        LOCAL, [stopping], max_epochs=len(values), metrics=metric_with_values(values), eval_batch_size=48
    )
    trainer.fit(data(), data())
    return trainer.progress.epoch


@pytest.mark.parametrize(
    ("values", "settings", "epochs"),
    [
        ([3.0, 2.0, 1.0, 0.5, 0.4], {"patience": 1}, 5),
        ([3.0, 2.0, 2.0, 1.0, 0.5], {"patience": 1}, 3),
        ([3.0, 2.0, 2.5, 1.0, 1.5, 1.5, 0.0], {"patience": 2}, 6),
        ([1.0, 2.0, 3.0, 4.0, 4.0], {"patience": 1, "mode": "max"}, 5),
        ([1.0, 2.0, 1.0, 4.0, 4.0], {"patience": 1, "mode": "max"}, 3),
        ([3.0, 2.95, 2.91, 1.0], {"patience": 2, "min_delta": 0.1}, 3),
        ([3.0, math.nan, math.nan, 1.0], {"patience": 2}, 3),
        ([math.nan, 3.0, 2.0, 1.0], {"patience": 2}, 4),
    ],
)
def test_early_stopping_ends_the_run_after_patience_epochs_without_improvement(
    values: list[float], settings: dict[str, Any], epochs: int
) -> None:
    assert epochs_until_stopped(values, **settings) == epochs


def test_early_stopping_reports_the_reason_and_survives_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def resume_run(epochs: int, values: list[float], patience: int = 2) -> Trainer:
        stopping = EarlyStopping("val_scripted", patience=patience)
        settings: dict[str, Any] = {"output_dir": tmp_path, "resume": True, "eval_batch_size": 48}
        trainer = make_trainer(LOCAL, [stopping], max_epochs=epochs, metrics=metric_with_values(values), **settings)
        object.__setattr__(trainer.config, "progress", "lines")
        trainer.fit(data(), data())
        return trainer

    assert resume_run(2, [2.0, 2.5]).progress.epoch == 2  # one epoch without improvement before the interruption
    assert resume_run(9, [2.5, 0.0]).progress.epoch == 3  # the second epoch without improvement
    assert "stopped after step 12: val_scripted has not improved for 2 epochs; the best was 2" in (
        capsys.readouterr().err
    )
    assert resume_run(9, [0.0]).progress.epoch == 3  # the run remains stopped
    assert resume_run(5, [1.0, 1.0], patience=3).progress.epoch == 5  # with a larger patience, the run continues


def test_a_stop_within_an_epoch_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Enough(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            trainer.stop("enough")

    trainer = make_trainer(LOCAL, [Enough()], log_every_n_steps=2)
    object.__setattr__(trainer.config, "progress", "lines")
    trainer.fit(data())
    assert capsys.readouterr().err.count("stopped after step 1: enough") == 1


def test_early_stopping_rejects_invalid_arguments() -> None:
    with pytest.raises(ConfigError, match=r"'val_los' is not a result of this run\. Did you mean 'val_loss'\?"):
        make_trainer(LOCAL, [EarlyStopping("val_los")]).fit(data(), data())
    with pytest.raises(ConfigError, match=r"'val_loss' is not a result of this run\..*Available: train_loss"):
        make_trainer(LOCAL, [EarlyStopping()]).fit(data())
    for wrong in ({"patience": 0}, {"patience": 1.5}, {"mode": "least"}, {"min_delta": -1.0}, {"min_delta": math.nan}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EarlyStopping(**wrong)


def test_a_run_stopped_by_max_seconds_resumes_at_the_same_step(tmp_path: Path) -> None:
    class Slow(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            time.sleep(0.02)

    uninterrupted = make_trainer(LOCAL, [])
    uninterrupted.fit(data())
    settings: dict[str, Any] = {"output_dir": tmp_path, "resume": True, "log_every_n_steps": 1}
    first = make_trainer(LOCAL, [Slow()], max_seconds=0.05, **settings)
    first.fit(data())
    assert 0 < first.progress.sample < 48
    assert "max_seconds=0.05" in str(first.stop_reason)
    second = make_trainer(LOCAL, [], **settings)
    second.fit(data())
    assert second.progress.epoch == 2
    assert torch.equal(parameters(second), parameters(uninterrupted))
    with pytest.raises(ConfigError, match=r"TrainConfig\.max_seconds must be a number above 0, got 0"):
        TrainConfig(max_epochs=1, max_seconds=0)


def test_gradient_watch_names_the_first_non_finite_parameter() -> None:
    class Poison(Callback):
        def on_before_optimizer_step(self, trainer: Trainer) -> None:
            if trainer.progress.step == 2:
                list(trainer.model.parameters())[2].grad[0, 0] = math.inf

    with pytest.raises(NonFiniteGradientError, match=r"'2\.weight' is inf in step 3\. 1 of 4 parameters"):
        make_trainer(LOCAL, [Poison(), GradientWatch()]).fit(data())
    trainer = make_trainer(LOCAL, [Poison(), GradientWatch(every=2)])  # checks steps 2 and 4
    with pytest.raises(NonFiniteGradientError, match=r"'0\.weight' is nan in step 4"):
        trainer.fit(data())
    with pytest.raises(ConfigError, match=r"GradientWatch\.every"):
        GradientWatch(every=0)


def test_gradient_watch_with_local_steps_does_not_wait_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local gradients differ between ranks, so only a rank with an invalid gradient raises the error."""
    trainer = make_trainer(LOCAL, [], local_sgd=2)
    trainer.last_loss = torch.tensor(math.nan)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    monkeypatch.setattr(LOCAL, "allgather", lambda tensor: pytest.fail("the other ranks do not call it"))
    with pytest.raises(NonFiniteGradientError, match=r"4 of 4 parameters .* the loss was not finite on rank 0\."):
        GradientWatch().on_before_optimizer_step(trainer)


def test_gradient_watch_accepts_a_parameter_without_elements() -> None:
    trainer = make_trainer(LOCAL, [])
    trainer.model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    GradientWatch().on_before_optimizer_step(trainer)


def test_gradient_watch_permits_the_initial_overflows_of_fp16() -> None:
    class Poison(Callback):
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def on_before_optimizer_step(self, trainer: Trainer) -> None:
            if trainer.progress.step < self.steps:
                next(trainer.model.parameters()).grad[0, 0] = math.inf

    make_trainer(LOCAL, [Poison(19), GradientWatch()], max_epochs=6, precision="fp16").fit(data())
    watch = GradientWatch()  # each `fit` counts overflows from 0
    for _ in range(2):
        make_trainer(LOCAL, [Poison(12), watch], max_epochs=3, precision="fp16").fit(data())

    with pytest.raises(NonFiniteGradientError, match="in step 20"):
        make_trainer(LOCAL, [Poison(99), GradientWatch()], max_epochs=6, precision="fp16").fit(data())


def events(trace: Path) -> list[str]:
    with gzip.open(trace, "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


@pytest.mark.parametrize(("skip", "steps", "traced"), [(2, 3, 3), (0, 1, 1), (6, 5, 2)])
def test_the_profiler_records_the_selected_steps(tmp_path: Path, skip: int, steps: int, traced: int) -> None:
    make_trainer(LOCAL, [Profiler(skip=skip, steps=steps)], output_dir=tmp_path).fit(data())  # 8 steps
    assert events(tmp_path / "profile" / "rank-0.json.gz").count("Optimizer.step#SGD.step") == traced
    table = (tmp_path / "profile" / "rank-0.txt").read_text()
    assert "Self CPU" in table
    assert "aten::" in table


def test_profiler_records_the_selected_activities(tmp_path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    make_trainer(LOCAL, [Profiler(skip=1, steps=1, activities=activities)], output_dir=tmp_path).fit(data())
    assert events(tmp_path / "profile" / "rank-0.json.gz").count("Optimizer.step#SGD.step") == 1


@pytest.mark.parametrize("name", ["rank-0.json.gz", "rank-0.txt"])
def test_profile_that_cannot_be_written_does_not_end_training(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile" / name).mkdir(parents=True)
    trainer = make_trainer(LOCAL, [Profiler(skip=1, steps=1)], output_dir=tmp_path)
    trainer.fit(data())
    assert trainer.progress.step == 8
    assert "Profiler cannot write to" in caplog.text


def test_profiler_rejects_a_missing_or_invalid_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'Use Profiler\(folder="runs/profile"\)'):
        make_trainer(LOCAL, [Profiler()]).fit(data())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*file"):
        make_trainer(LOCAL, [Profiler(folder=tmp_path / "file")]).fit(data())
    with pytest.raises(ConfigError, match=r"Profiler\.steps"):
        Profiler(steps=0)
    with pytest.raises(ConfigError, match=r"Profiler.table_rows must be an integer of at least 0, got -1"):
        Profiler(table_rows=-1)


def test_profiler_prints_the_table_of_rank_zero_or_omits_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(LOCAL, [Profiler(skip=1, steps=2, folder=tmp_path, table_rows=3, print_table=True)]).fit(data())
    printed = capsys.readouterr().err
    assert printed.strip() == (tmp_path / "rank-0.txt").read_text().strip()
    assert printed.count("aten::") <= 3
    (tmp_path / "rank-0.txt").unlink()
    make_trainer(LOCAL, [Profiler(skip=1, steps=2, folder=tmp_path, table_rows=0)]).fit(data())
    assert not (tmp_path / "rank-0.txt").exists()


def test_memory_snapshot_on_a_cpu_logs_a_warning_and_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(LOCAL, [MemorySnapshot(folder=tmp_path / "memory")]).fit(data())
    assert "MemorySnapshot records GPU memory, but this run computes on cpu, so it writes nothing." in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [{"skip": -1}, {"steps": 0}, {"max_entries": 0}, {"folder": ""}])
def test_memory_snapshot_rejects_invalid_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="MemorySnapshot"):
        MemorySnapshot(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU")
def test_memory_snapshot_contains_the_allocations_of_the_steps(tmp_path: Path) -> None:
    backend = LocalBackend(torch.device("cuda", 0))
    make_trainer(backend, [MemorySnapshot(skip=1, steps=2)], output_dir=tmp_path).fit(data())
    snapshot = pickle.loads((tmp_path / "memory" / "rank-0.pickle").read_bytes())
    assert any(snapshot["device_traces"])


# -- on several ranks -------------------------------------------------------------------------------------------------


class StopOnRankOne(Callback):
    """Requests a stop after step 3, on rank 1 only."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 3 and trainer.backend.rank == 1:
            trainer.stop("requested by rank 1")


def loss_fn_of_rank(rank: int) -> Any:
    """Return a loss function that returns NaN in its third call on rank 1."""
    calls = iter(range(10**6))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        return loss * math.nan if next(calls) == 2 and rank == 1 else loss

    return loss_fn


class OnRankOne(Callback):
    """Calls `change(trainer)` after step 2, on rank 1 only."""

    def __init__(self, change: Callable[[Trainer], object]) -> None:
        self._change = change

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == 2 and trainer.backend.rank == 1:
            self._change(trainer)


def negate_bias(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.backend.unwrap(trainer.model)[2].bias.neg_()


def change_rounding(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.backend.unwrap(trainer.model)[2].weight.mul_(1 + 1e-6)


def renormalize_rows(trainer: Trainer) -> None:
    """Renormalize rows of a weight with the operation that `embedding(max_norm=...)` uses."""
    weight = trainer.backend.unwrap(trainer.model)[0].weight
    torch.embedding_renorm_(weight.detach(), torch.tensor([3], device=weight.device), 1e-3, 2.0)


def train_different_ranks(backend: Backend, folder: str) -> dict[str, tuple[str, int]]:
    """Train with each kind of difference on rank 1. Return the errors, and the steps after which they are raised."""

    def pair_on_rank_one(output: Tensor, target: Tensor) -> Any:
        loss = nn.functional.cross_entropy(output, target, reduction="sum")
        return (loss, len(target)) if backend.rank == 1 else loss / len(target)

    cases: dict[str, tuple[list[Callback], dict[str, Any]]] = {
        "weights": ([OnRankOne(negate_bias)], {}),
        "rows": ([OnRankOne(renormalize_rows)], {"output_dir": folder, "checkpoint_every_steps": 3}),
        "average": ([OnRankOne(negate_bias)], {"local_sgd": 2}),
        "allowed": ([OnRankOne(negate_bias)], {"check_weights": False}),
        "rounding": ([OnRankOne(change_rounding)], {}),
        "mode": ([OnRankOne(lambda trainer: trainer.model.eval())], {"log_every_n_steps": 1}),
        "loss": ([], {"loss_fn": pair_on_rank_one}),
    }
    found = {}
    for name, (callbacks, settings) in cases.items():
        trainer, text = make_trainer(backend, callbacks, **settings), ""
        try:
            trainer.fit(data())
        except ModelError as error:
            text = str(error)
        found[name] = (text, trainer.progress.step)
    return found


def run_on_ranks(backend: Backend, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"different": train_different_ranks(backend, f"{folder}/run")}
    trainer = make_trainer(backend, [StopOnRankOne()], log_every_n_steps=2)
    trainer.fit(data())
    found["stopped"] = (trainer.progress.step, trainer.stop_reason)
    try:
        make_trainer(backend, [GradientWatch()], loss_fn=loss_fn_of_rank(backend.rank)).fit(data())
    except NonFiniteGradientError as error:
        found["watch"] = str(error)
    stopping = EarlyStopping("val_scripted", patience=1)
    trainer = make_trainer(
        backend, [stopping], max_epochs=9, metrics=metric_with_values([1.0, 0.5, 0.5, 0.5]), eval_batch_size=48
    )
    trainer.fit(data(), data())
    found["early"] = (trainer.progress.epoch, stopping.best)
    make_trainer(backend, [Profiler(skip=1, steps=2, folder=f"{folder}/traces")]).fit(data())
    return found


@pytest.fixture(scope="module", params=GROUPS_ON_DDP[1:], ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Any], Path]]:
    folder = tmp_path_factory.mktemp("profile")
    with RankGroup(*request.param) as group:
        yield group.run(run_on_ranks, str(folder), timeout_seconds=120), folder


def test_a_stop_on_one_rank_stops_all_ranks(ranks: tuple[list[Any], Path]) -> None:
    for found in ranks[0]:
        assert found["stopped"] == (4, "requested by rank 1")  # ranks exchange stop requests after every second step


def test_every_rank_reports_the_rank_with_a_non_finite_loss(ranks: tuple[list[Any], Path]) -> None:
    assert len({found["watch"] for found in ranks[0]}) == 1
    assert "'0.weight' is nan in step 3" in ranks[0][0]["watch"]
    assert "the loss was not finite on rank 1." in ranks[0][0]["watch"]


def test_differences_between_ranks_raise_the_same_error_on_every_rank(ranks: tuple[list[Any], Path]) -> None:
    found, _ = ranks
    different = found[0]["different"]
    assert all(other["different"] == different for other in found)
    assert "parameter '2.bias' on rank 1 differ from those" in different["weights"][0]
    assert different["weights"][1] == STEPS_PER_EPOCH  # at the end of the epoch
    assert "parameter '0.weight' on rank 1 differ from those" in different["rows"][0]
    assert different["rows"][1] == 3  # before the first checkpoint
    assert "After step 2, the model is in eval mode on rank 1 and in training mode on rank" in different["mode"][0]
    assert "the mean over the batch on rank" in different["loss"][0]
    assert "a pair (sum, number of tokens) on rank 1. Let loss_fn return" in different["loss"][0]
    assert different["loss"][1] == 0
    assert different["average"] == different["allowed"] == different["rounding"] == ("", 2 * STEPS_PER_EPOCH)


def test_early_stopping_ends_all_ranks_at_the_same_epoch(ranks: tuple[list[Any], Path]) -> None:
    assert {found["early"] for found in ranks[0]} == {(3, 0.5)}


def test_every_rank_writes_a_trace(ranks: tuple[list[Any], Path]) -> None:
    found, folder = ranks
    traces = sorted((folder / "traces").glob("*.gz"))
    assert [trace.name for trace in traces] == [f"rank-{rank}.json.gz" for rank in range(len(found))]
    assert sorted(path.name for path in (folder / "traces").glob("*.txt")) == [
        f"rank-{rank}.txt" for rank in range(len(found))
    ]
    for trace in traces:
        assert events(trace).count("Optimizer.step#SGD.step") == 2


FAILS_AT_END = """\
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

class Fails(unitrain.Callback):
    def on_fit_end(self, trainer):
        if trainer.backend.rank == 1:
            raise ValueError("the upload failed")

with unitrain.init(device="cpu", timeout_seconds=30) as backend:
    model = nn.Linear(2, 1)
    config = unitrain.TrainConfig(max_epochs=1, batch_size=4, progress="off")
    trainer = unitrain.Trainer(
        model, torch.optim.SGD(model.parameters()), nn.MSELoss(), backend=backend, config=config, callbacks=[Fails()]
    )
    trainer.fit(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)))
    print("fit has returned")
"""


@pytest.mark.parametrize("backend", ["ddp", *nightly("horovod")])
def test_an_error_in_on_fit_end_of_one_rank_is_raised_on_every_rank(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_AT_END)
    with running_ranks(script, backend, 2) as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert all(process.returncode for process in processes), outputs
    assert "fit has returned" not in "".join(outputs), outputs
    assert "Fails.on_fit_end failed on rank 1" in outputs[1]
    assert "rank 1 failed first: CallbackError: Fails.on_fit_end failed on rank 1" in outputs[0]

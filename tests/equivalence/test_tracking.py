"""Loggers receive each value once per step on rank 0, even if another logger fails. The values equal those of plain
torch."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import logger_output
import pytest
import torch
from groups import nightly
from preload import preloaded
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.bootstrap.overrides import OVERRIDES_VARIABLE, overrides_setting
from unitrain.data.order import epoch_order
from unitrain.errors import CallbackError, ConfigError, LoggerError, MissingDependencyError, Preempted, TensorError
from unitrain.loggers import background
from unitrain.loggers.logger import Logger, RunInfo, import_package
from unitrain.testing import RankGroup
from unitrain.verify.record import RECORDER, RecordRequest

LOCAL = LocalBackend(torch.device("cpu"))
STEPS, EPOCHS, RATE, CLIP = 4, 3, 0.1, 0.05
READERS = {
    "csv": logger_output.from_csv,
    "jsonl": logger_output.from_json_lines,
    "tensorboard": lambda folder: logger_output.from_tensorboard(folder / "tensorboard"),
    "wandb": logger_output.from_wandb,
    "mlflow": logger_output.from_mlflow,
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(46, 6, generator=generator), torch.randint(3, (46,), generator=generator))


def build_model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def make_trainer(backend: Backend, loggers: Any, *callbacks: unitrain.Callback, **settings: Any) -> unitrain.Trainer:
    """Return a Trainer with four steps per epoch on any number of ranks."""
    model, optimizer = build_model_and_optimizer()
    chosen = {"max_epochs": EPOCHS, "log_every_n_steps": 1, "progress": "off", **settings}
    if "max_steps" in chosen:
        del chosen["max_epochs"]
    config = unitrain.TrainConfig(batch_size=12 // backend.size, **chosen)
    loss_fn = nn.functional.cross_entropy
    return unitrain.Trainer(
        model, optimizer, loss_fn, backend=backend, config=config, callbacks=callbacks, loggers=loggers
    )


def flat_parameters(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class LoggingCallback(unitrain.Callback):
    """Logs the first weight after every step and an image of the first layer after every epoch. Raises an error after
    step `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        trainer.log(weight=next(trainer.model.parameters())[0, 0])
        if trainer.progress.step == self.fails_at:
            raise KeyError("a mistake")

    def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
        trainer.log_image("layer", next(trainer.model.parameters()).detach().abs(), caption="weights")


class RecordingLogger(Logger):
    """Stores the logged values in memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, run_info: RunInfo) -> None:
        self.calls.append(("start", run_info.step))
        self.description = run_info.description

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", step, dict(values)))

    def image(self, name: str, image: Any, step: int, caption: str | None) -> None:
        self.calls.append(("image", step, name, image.shape, caption))

    def finish(self, status: str) -> None:
        self.calls.append(("finish", status))


class FailsInPrepare(Logger):
    def prepare(self, output_dir: Path | None) -> None:
        raise OSError("no room")


class NeedsAPackage(Logger):
    def prepare(self, output_dir: Path | None) -> None:
        import_package("no_such_package", self, "nothing")


class FailsInStart(RecordingLogger):
    def start(self, run_info: RunInfo) -> None:
        raise ConnectionError("no server")


class FailsInLog(RecordingLogger):
    def log(self, values: Mapping[str, float], step: int) -> None:
        super().log(values, step)
        if step == 2:
            raise SystemExit("enough")


class Hangs(RecordingLogger):
    def log(self, values: Mapping[str, float], step: int) -> None:
        threading.Event().wait(60)


class HangsInStart(RecordingLogger):
    def start(self, run_info: RunInfo) -> None:
        threading.Event().wait(60)


class HangsInFinish(RecordingLogger):
    def finish(self, status: str) -> None:
        threading.Event().wait(60)


def train_with_interruption(backend: Backend, folder: Path) -> None:
    """Fail after step 7, then resume from the checkpoint of step 4 and train to the end."""
    for fails_at in (7, None):
        made = make_trainer(
            backend,
            ["csv", "jsonl", "tensorboard", unitrain.WandbLogger(mode="offline"), "mlflow"],
            LoggingCallback(fails_at),
            output_dir=folder,
            resume=True,
            async_checkpoints=False,
            max_grad_norm=CLIP,
            lr_scaling="linear",
            reference_batch_size=6,
            warmup_steps=5,
        )
        if fails_at is None:
            made.fit(data())
        else:
            with pytest.raises(CallbackError, match="a mistake"):
                made.fit(data())


def collect_warnings() -> list[str]:
    """Return a list to which warnings about loggers are appended."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(background.__name__).addHandler(handler)
    return lines


def train_with_failing_loggers(backend: Backend) -> tuple[Tensor, Tensor, float, list[str], list[tuple[Any, ...]], str]:
    """Train with and without failing loggers. Return the parameters of both runs, the duration of the run with
    failing loggers, the warnings, the logged values, and the error of a logger that fails in `prepare`."""
    background._CALL_LIMIT_SECONDS, background._FINISH_LIMIT_SECONDS = (
        0.6,
        dict.fromkeys(("finished", "stopped", "failed"), 1.0),
    )
    warnings, good, late = collect_warnings(), RecordingLogger(), FailsInLog()

    class Waits(unitrain.Callback):
        def on_step_end(self, trainer: unitrain.Trainer) -> None:
            time.sleep(0.1)

    without = make_trainer(backend, [])
    without.fit(data())
    started = time.perf_counter()
    made = make_trainer(backend, [FailsInStart(), late, Hangs(), HangsInFinish(), good], Waits())
    made.fit(data())
    seconds = time.perf_counter() - started
    try:
        make_trainer(backend, [FailsInPrepare()])
    except LoggerError as error:
        message_text = str(error)
    assert [step for kind, step, *_ in late.calls if kind == "log"] == ([1, 2] if backend.rank == 0 else [])
    parameters = [flat_parameters(backend.unwrap(one.model)) for one in (made, without)]
    return (*parameters, seconds, sorted(warnings), good.calls, message_text)  # type: ignore[return-value]


@pytest.fixture(scope="module", params=["ddp", *nightly("horovod")])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(request.param, 2) as group:
        yield group


def train_in_plain_torch() -> dict[tuple[str, int], float]:
    """Train with plain torch. Return the expected logged values by name and step."""
    model, optimizer = build_model_and_optimizer()
    inputs, targets = data().tensors
    points: dict[tuple[str, int], float] = {}

    def factor(step: int) -> float:
        return 1 + min(1.0, step / 5)  # for a batch size of 12 instead of 6

    for epoch in range(EPOCHS):
        order, losses = epoch_order(46, seed=0, epoch=epoch, shuffle=True), 0.0
        for indices in order.split(12):
            step = epoch * STEPS + math.ceil((1 + (order == indices[0]).nonzero().item()) / 12)
            loss = nn.functional.cross_entropy(model(inputs[indices]), targets[indices])
            optimizer.zero_grad()
            loss.backward()
            points["gradient_norm", step] = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
            optimizer.param_groups[0]["lr"] = RATE * factor(step - 1)
            optimizer.step()
            losses += loss.item() * len(indices)
            points["loss", step], points["learning_rate", step] = loss.item(), RATE * factor(step)
            points["weight", step] = next(model.parameters())[0, 0].item()
        points["epoch", step], points["train_loss", step] = epoch + 1, losses / 46
    return points


def test_every_step_is_logged_once_with_the_loss_of_plain_torch(ranks: RankGroup, tmp_path: Path) -> None:
    logger_output.put_mlflow_database(tmp_path)
    ranks.run(train_with_interruption, tmp_path, timeout_seconds=250)
    wanted = train_in_plain_torch()
    assert len(wanted) == 12 * 4 + 3 * 2
    for kind, read in READERS.items():
        points = read(tmp_path)
        names = [(name, step) for name, step, _ in points]
        speeds = {(name, step): value for name, step, value in points if name.endswith("samples_per_second")}
        metrics = [(name, step) for name, step in names if name.startswith(("goodput", "max_memory_bytes"))]
        assert sorted(names) == sorted([*wanted, *speeds, *metrics]), kind
        assert {step for name, step in metrics if name in ("goodput", "max_memory_bytes")} == set(range(1, 13))
        assert {step for name, step in metrics if name == "goodput_training_seconds"} == {4, 8, 12}
        assert {step for name, step in speeds if name == "samples_per_second"} == set(range(1, 13))
        assert {step for name, step in speeds if name == "epoch_samples_per_second"} == {4, 8, 12}
        assert all(value > 0 for value in speeds.values())
        for name, step, value in points:
            if (name, step) in wanted:
                assert value == pytest.approx(wanted[name, step], rel=2e-6, abs=2e-6), (kind, name, step)
    images = logger_output.events(tmp_path / "tensorboard").Images("layer")
    assert [(image.step, image.width, image.height) for image in images] == [(step, 6, 8) for step in (4, 8, 12)]
    first, second = logger_output.wandb_starts(tmp_path)
    assert first[0] == second[0]
    ends = [
        one.exit.exit_code for start in (first, second) for one in start[1] if one.WhichOneof("record_type") == "exit"
    ]
    assert ends == [1, 0]
    _, (run,) = logger_output.mlflow_runs(tmp_path)
    assert (run.info.status, run.data.params["size"], run.data.params["config.max_grad_norm"]) == (
        "FINISHED",
        "2",
        str(CLIP),
    )
    assert run.data.params["backend"] == ranks.backend


def test_failing_or_hanging_logger_causes_a_warning_and_does_not_change_the_run(ranks: RankGroup) -> None:
    first, second = ranks.run(train_with_failing_loggers, timeout_seconds=60)
    for parameters, without, seconds, _, _, message_text in (first, second):
        assert torch.equal(parameters, without)
        assert 1.2 < seconds < 30  # the loggers hang for 60 s
        assert message_text.startswith("FailsInPrepare cannot be used: OSError: no room. ")
    assert first[3] == [
        "FailsInLog failed in 'log': SystemExit: enough. The run continues without this logger.",
        "FailsInStart failed in 'start': ConnectionError: no server. The run continues without this logger.",
        "Hangs has been busy with 'log' for more than 0.6 s. The run continues without this logger.",
        "HangsInFinish did not finish in time at the end of the run. The run continues without this logger.",
    ]
    assert [call[1] for call in first[4]] == [
        0,
        *(step for step in range(1, 13) for _ in range(2 if step % 4 == 0 else 1)),
        "finished",
    ]
    assert (second[3], second[4]) == ([], [])


def test_mlflow_without_an_output_folder_has_one_run_per_trainer(tmp_path: Path) -> None:
    logger_output.put_mlflow_database(tmp_path)
    logger = unitrain.MLflowLogger(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")

    class Stops(unitrain.Callback):
        def on_step_end(self, trainer: unitrain.Trainer) -> None:
            if trainer.progress.step == 2:
                trainer.stop("it will be continued")

    first, second = (make_trainer(LOCAL, [logger], *callbacks, max_steps=4) for callbacks in ([Stops()], []))
    first.fit(data())
    assert first.progress.step == 2
    second.fit(data())
    first.fit(data())
    first.log(late=1.0)
    first._reporter._finish_loggers("finished")
    client, runs = logger_output.mlflow_runs(tmp_path)
    steps = [[metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] for run in runs]
    assert steps == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert ["late" in run.data.metrics for run in runs] == [True, False]


def test_loggers_receive_the_final_status(tmp_path: Path) -> None:
    class Ends(unitrain.Callback):
        def __init__(self, how: str) -> None:
            self.how = how

        def on_step_end(self, trainer: unitrain.Trainer) -> None:
            if trainer.progress.step != 2:
                return
            if self.how == "signal":
                signal.raise_signal(signal.SIGUSR1)
                deadline = time.monotonic() + 30
                while trainer._stopping._preemption.received_signal is None:  # a background thread records the signal
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            elif self.how == "stop":
                trainer.stop("enough")
            elif self.how == "error":
                raise ValueError("a mistake")

    for how, error, status in (
        ("end", None, "finished"),
        ("stop", None, "stopped"),
        ("signal", Preempted, "stopped"),
        ("error", CallbackError, "failed"),
    ):
        kept = RecordingLogger()
        made = make_trainer(LOCAL, [kept], Ends(how), output_dir=tmp_path / how)
        if error is None:
            made.fit(data())
        else:
            with pytest.raises(error):
                made.fit(data())
        assert kept.calls[-1] == ("finish", status), how
        assert kept.description["model"] == "Sequential"


class StopsAt(unitrain.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        if trainer.progress.step == self.step:
            trainer.stop("enough")


def test_values_logged_between_runs_are_appended(tmp_path: Path) -> None:
    kept = RecordingLogger()
    made = make_trainer(LOCAL, [kept, "csv", "tensorboard"], StopsAt(2), output_dir=tmp_path, max_steps=3)
    with pytest.raises(ConfigError, match=r"^trainer\.log was called before fit, .* Call it from a callback"):
        made.log(early=1)
    made.fit(data())
    count = len(kept.calls)
    made.log(test_accuracy=torch.tensor(0.5), samples=46)
    made.log_image("picture", torch.rand(5, 4, 3))
    made.fit(data())
    assert kept.calls[count:-3] == [
        ("start", 2),
        ("log", 2, {"test_accuracy": 0.5, "samples": 46.0}),
        ("image", 2, "picture", (5, 4, 3), None),
        ("finish", "finished"),
        ("start", 2),
    ]
    assert kept.calls[-1] == ("finish", "finished")
    count = len(kept.calls)
    made.fit(data())  # the run is already complete
    assert len(kept.calls) == count
    for read in (logger_output.from_csv(tmp_path), logger_output.from_tensorboard(tmp_path / "tensorboard")):
        points = [(name, step) for name, step, _ in read if name in ("loss", "test_accuracy")]
        assert sorted(points) == [*(("loss", step) for step in (1, 2, 3)), ("test_accuracy", 2)]
    (image,) = logger_output.events(tmp_path / "tensorboard").Images("picture")
    assert (image.step, image.width, image.height) == (2, 4, 5)


SCRIPT = """
import sys
import test_tracking as tests
import unitrain

wandb = unitrain.WandbLogger(mode="offline")
made = tests.make_trainer(tests.LOCAL, [wandb, tests.HangsInStart()], output_dir=sys.argv[1], max_steps=1)
tests.background._FINISH_LIMIT_SECONDS = {"finished": 15.0}
made.fit(tests.data())
made.log(late=7)
"""


def test_last_logged_values_are_written_before_the_program_ends(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=preloaded(variables), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    warning = "HangsInStart did not finish in time at the end of the run. The run continues without this logger."
    assert done.stderr.count(warning) == 1
    assert logger_output.from_wandb(tmp_path)[-1] == ("late", 1, 7.0)
    assert len(logger_output.wandb_starts(tmp_path)) == 2


@pytest.mark.parametrize(
    ("loggers", "error_class", "message_text"),
    [
        ("csv", ConfigError, r"^The Trainer's loggers must be a list, got 'csv'\. Use loggers=\['csv'\]\.$"),
        (["tensorbord"], ConfigError, r"^Unknown logger 'tensorbord'\. Did you mean 'tensorboard'\? Available: csv, "),
        ([3], ConfigError, r"^A logger must be a unitrain\.Logger or a name, got 3\. Use Trainer\(loggers="),
        (["csv", "csv"], ConfigError, r"^The Trainer's loggers contain 'csv' twice\. Pass each logger once\.$"),
        (["jsonl"], ConfigError, r"^JSONLinesLogger has no folder to write to, .* Use JSONLinesLogger\(folder="),
        ([NeedsAPackage()], MissingDependencyError, r'^NeedsAPackage needs .* pip install "\.\[nothing\]"$'),
    ],
)
def test_unusable_loggers_are_rejected(loggers: Any, error_class: type[Exception], message_text: str) -> None:
    with pytest.raises(error_class, match=message_text):
        make_trainer(LOCAL, loggers)


def test_invalid_logged_values_are_rejected() -> None:
    made = make_trainer(LOCAL, [], max_steps=1)
    made.fit(data())
    for value in ("high", None, torch.zeros(2), torch.tensor(1j)):
        with pytest.raises(ConfigError, match=r"^trainer\.log takes numbers by name, got accuracy="):
            made.log(accuracy=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'unitrain adds "step" itself\.$'):
        made.log(step=3)
    for image, found in (
        (torch.zeros(2, 3, 5, 5), r"shape \[2, 3, 5, 5\] and torch.float32"),
        (torch.zeros(5, 5, dtype=torch.int64), r"shape \[5, 5\] and torch.int64"),
        ([[1.0]], "an object of class list"),
    ):
        with pytest.raises(TensorError, match=rf"^An image to log must be a tensor .* got {found}\. Log one image"):
            made.log_image("image", image)  # type: ignore[arg-type]


class Tables(Logger):
    """Stores logged histograms and tables."""

    def __init__(self) -> None:
        self.histograms: list[tuple[str, int, Any, Any]] = []
        self.tables: list[tuple[str, int, Any, Any]] = []

    def histogram(self, name: str, counts: Any, edges: Any, step: int) -> None:
        self.histograms.append((name, step, counts, edges))

    def table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        self.tables.append((name, step, columns, rows))


def test_histograms_show_global_gradients_and_their_parameters(tmp_path: Path) -> None:
    import numpy as np

    kept = Tables()
    made = make_trainer(LOCAL, [kept], unitrain.Histograms(every=2), shuffle=False, max_steps=3)
    made.fit(data())
    assert [(name, step) for name, step, _, _ in kept.histograms] == [
        (f"{kind}/{name}", 1)
        for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        for kind in ("parameters", "gradients")
    ]
    model, optimizer = build_model_and_optimizer()
    inputs, targets = data().tensors
    for part in (slice(0, 12), slice(12, 24)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer.step()
    found = {name: (counts, edges) for name, _, counts, edges in kept.histograms}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for kind, values in (("parameters", before[name]), ("gradients", parameter.grad)):
            counts, edges = found[f"{kind}/{name}"]
            assert counts.sum() == values.numel()
            np.testing.assert_allclose(edges[[0, -1]], [values.min(), values.max()], rtol=1e-5)
    made.log_histogram("odd", torch.tensor([1.0, math.nan, math.inf, 2.0]))
    made.log_table("worst", ["label", "predicted"], [[7, "one"], (None, True)])
    made.fit(data())  # wait for values that are logged after the run
    assert kept.histograms[-1][2].sum() == 2
    assert kept.tables == [("worst", 3, ["label", "predicted"], [[7, "one"], [None, True]])]
    for columns, rows, message_text in (
        ("label", [], "needs a list of column names, got 'label'"),
        (None, [], "needs a list of column names, got None"),
        (["a"], 1, "needs a list of rows, got int"),
        (["a"], [1], r"Row 0 of trainer.log_table\('t'\) is 1, but the columns are"),
        (["a"], [[1, 2]], r"Row 0 of trainer.log_table\('t'\) is \[1, 2\], but the columns are \['a'\]"),
        (["a"], [[torch.ones(1)]], "has an object of class Tensor. Use numbers, strings, booleans or None"),
    ):
        with pytest.raises(ConfigError, match=message_text):
            made.log_table("t", columns, rows)
    with pytest.raises(TensorError, match="takes a tensor of any shape, got list"):
        made.log_histogram("h", [1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Histograms.every must be an integer of at least 1, got 0"):
        unitrain.Histograms(every=0)


def test_verified_run_is_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordRequest(steps=2, emulated_ranks=1).write(tmp_path)
    monkeypatch.setenv(OVERRIDES_VARIABLE, overrides_setting(RECORDER, str(tmp_path)))
    monkeypatch.setattr("atexit.register", lambda *_: None)  # which would shut down the backend at exit
    kept = RecordingLogger()
    with pytest.raises(SystemExit):
        make_trainer(LOCAL, [kept, "csv"], LoggingCallback(), output_dir=tmp_path / "output").fit(data())
    assert kept.calls == []
    assert not list(tmp_path.rglob("metrics.csv"))

"""Report pages: numbers from the history, comparison of runs, unfinished runs and invalid files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain.backends.local import LocalBackend
from unitrain.cli import unitrain
from unitrain.config import TrainConfig
from unitrain.report.page import format_duration
from unitrain.trainer import Trainer

LOCAL = LocalBackend(torch.device("cpu"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.23 s"),
        (59.94, "59.9 s"),
        (59.99, "1 min 0 s"),
        (90, "1 min 30 s"),
        (119.7, "2 min 0 s"),
        (599.9, "10 min"),
        (3599, "1 h 0 min"),
        (7170, "2 h 0 min"),
        (400_000, "111 h"),
    ],
)
def test_durations_are_rounded_only_once(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


class Page(HTMLParser):
    """Parser for a report page. Collects texts, tiles, tables, charts and the resources that a browser would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.tiles: list[list[str]] = []
        self.charts: list[str] = []
        self.text: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)
        self.close()
        assert not [tag for tag in self.open if tag not in ("meta",)], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        for name in ("src", "href", "xlink:href"):
            if not given.get(name, "#").startswith("#"):
                self.loaded.append(given[name])
        if tag in ("meta", "path", "use", "link", "img"):
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        elif tag == "dt":
            self.tiles.append([])
        elif tag == "figure":
            self.charts.append(given["aria-label"])

    def handle_endtag(self, tag: str) -> None:
        if tag in ("path", "use"):
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if not text or not self.open or "style" in self.open:
            return
        self.text.append(text)
        if self.open[-1] in ("dt", "dd"):
            self.tiles[-1].append(text)
        elif {"th", "td"} & set(self.open[-2:]):
            self.tables[-1][-1][-1] = (self.tables[-1][-1][-1] + " " + text).strip()

    def table(self, first: str) -> list[list[str]]:
        return next(table for table in self.tables if table[0][0] == first)

    def contains(self, sentence: str) -> bool:
        return re.search(sentence, " ".join(self.text)) is not None


def train(folder: Path, validate: bool = True, **given: Any) -> None:
    torch.manual_seed(0)
    images, targets = torch.randn(60, 8), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "batch_size": 4,
        "log_every_n_steps": 5,
        "progress": "off",
        "output_dir": folder,
    }
    config = TrainConfig(**{**settings, **given})

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return output.argmax(1) == target

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = nn.CrossEntropyLoss()
    trainer = Trainer(model, optimizer, loss, backend=LOCAL, config=config, metrics={"accuracy": accuracy})
    data = TensorDataset(images, targets)
    trainer.fit(data, data if validate else None)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def write_rows(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(unitrain, ["report", *map(str, arguments)])


def read_page(*arguments: str | Path) -> Page:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return Page(Path(result.output.strip()).read_text())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(folder)
    return folder


def test_page_shows_the_numbers_of_the_history(run_folder: Path) -> None:
    shown, history = read_page(run_folder), read_rows(run_folder)
    tiles = {name: value for name, value, *_ in shown.tiles}
    assert tiles["epochs"] == "3 of 3"
    for name in ("train_loss", "val_loss", "val_accuracy"):
        assert float(tiles[name]) == pytest.approx(history[-1][name], rel=1e-3)
    lowest = min(history, key=lambda row: float(row["val_loss"]))
    assert float(tiles["best val_loss"]) == pytest.approx(lowest["val_loss"], rel=1e-3)
    assert shown.contains(f"lowest, in epoch {lowest['epoch']}")
    speed = 3 * 60 / sum(row["seconds"] for row in history)
    assert float(tiles["samples per second"].replace(",", "")) == pytest.approx(speed, rel=1e-2, abs=1)
    epochs = shown.table("epoch")
    assert epochs[0][:5] == ["epoch", "step", "train_loss", "val_loss", "val_accuracy"]
    for line, row in zip(epochs[1:], history, strict=True):
        assert [line[0], line[1]] == [str(row["epoch"]), str(row["step"])]
        assert [float(value) for value in line[2:5]] == pytest.approx(
            [row["train_loss"], row["val_loss"], row["val_accuracy"]], rel=1e-3
        )
    (rank,) = (table for table in shown.tables if table[1][0] == "rank 0")
    compute = sum(row["compute_seconds"][0] for row in history)
    assert rank[1][rank[0].index("compute")] == f"{compute:.3g} s"
    assert shown.charts == [
        "loss", "accuracy", "learning rate", "samples per second", "time of each rank",
        "time of each epoch, mean over ranks",
    ]  # fmt: skip
    assert shown.contains("finished .*local, 1 rank, cpu")
    settings = dict(next(table for table in shown.tables if table[0][0] == "model"))
    assert settings["batch_size"] == "4"
    assert settings["optimizer"] == "SGD"


def test_page_does_not_use_external_resources(run_folder: Path) -> None:
    shown = read_page(run_folder)
    html = (run_folder / "report.html").read_text()
    assert shown.loaded == []
    assert not re.search(r"(?i)https?:|//[a-z]|<script|@import|url\((?!#)", html)
    # The charts use colors that the page defines for its light and its dark mode.
    assert re.search(r"stroke: var\(--run-0\)", html)
    assert "prefers-color-scheme: dark" in html


def test_command_writes_a_page_to_the_output_file(run_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unitrain", "report", run_folder, "--output", tmp_path / "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "page.html")), done.stderr
    assert Page((tmp_path / "page.html").read_text()).contains("first")


def test_png_option_writes_one_image(run_folder: Path) -> None:
    result = run(run_folder, "--png")
    assert result.output.strip() == str(run_folder / "report.png")
    assert (run_folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_page_compares_several_runs(run_folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "second", batch_size=6, max_epochs=2)
    shown = read_page(run_folder, tmp_path / "second", "--output", tmp_path / "both.html")
    compared = {line[0]: line[1:] for line in shown.tables[0]}
    assert compared[""] == ["first", "second"]
    assert compared["epochs"] == ["3 of 3 45 steps", "2 of 2 20 steps"]
    for run_number, folder in enumerate((run_folder, tmp_path / "second")):
        found = compared["val_accuracy in the last epoch"][run_number]
        assert float(found) == pytest.approx(read_rows(folder)[-1]["val_accuracy"], rel=1e-3)
    settings = next(table for table in shown.tables if ["batch_size", "4", "6"] in table)
    equal = settings.index(["optimizer", "SGD", "SGD"])
    assert all(first != second for _, first, second in settings[1:equal] if _ in ("batch_size", "max_epochs"))
    assert settings.index(["batch_size", "4", "6"]) < equal  # settings that differ precede equal settings
    assert "time per epoch, mean over ranks" in shown.charts


def test_page_of_an_unfinished_run_that_was_resumed_on_another_backend(run_folder: Path, tmp_path: Path) -> None:
    """The history contains a loss that is not a number and an incomplete last line."""
    (start,) = (json.loads(line) for line in (run_folder / "run.jsonl").read_text().splitlines())
    start["config"] = {**start["config"], "max_epochs": 40}
    resumed = {**start, "step": 15, "epochs": 1.0, "backend": "horovod", "transport": "gloo", "size": 3}
    history = [dict(row) for row in read_rows(run_folder)]
    for row in history[1:]:
        for part in ("data", "compute", "wait", "update", "validation", "checkpoint"):
            row[f"{part}_seconds"] = [1.0, 1.0, {"compute": 2.0, "wait": 0.0}.get(part, 1.0)]
    history[2]["val_loss"] = None
    write_rows(tmp_path, "run.jsonl", [start, {**resumed, "size": 2}, resumed])
    write_rows(tmp_path, "history.jsonl", history)
    slow = [{"rank": rank, "phase": "data", "seconds": 0.041, "others": 0.006} for rank in (1, 2)]
    sync_point_rows = [{"step": step, "epochs": step / 15, "loss": 1.0, "slow": slow[:1]} for step in (20, 25)]
    quota = {**slow[1], "cause": "cpu_quota", "host": "n3", "evidence": "the quota is 0.5 cores", "earlier": 0.005}
    sync_point_rows.append({"step": 30, "epochs": 2.0, "loss": 1.0, "slow": [quota]})
    write_rows(
        tmp_path, "steps.jsonl", [*sync_point_rows, {"step": 46, "epochs": 3.1, "loss": None, "learning_rate": 0.1}]
    )
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"epoch": 4, "st')
    shown = read_page(tmp_path)
    tiles = {name: value for name, value, *_ in shown.tiles}
    assert tiles["epochs"] == "3.1 of 40"
    assert tiles["val_loss"] == "not a number"
    assert float(tiles["best val_loss"]) == pytest.approx(min(row["val_loss"] for row in history[:2]), rel=1e-3)
    assert shown.contains("not finished .*horovod over gloo, 3 ranks")
    assert shown.contains("resumed: horovod, 3 ranks")
    assert shown.contains(
        r"Rank 2 is slow: compute 133 ms a step, others 67 ms\. The other ranks wait for it\. Rank 1 was slow from"
    )
    assert shown.contains(r"Rank 1 was slow from step 20 to step 25: data 41 ms a step, others 6 ms\.")
    assert shown.contains(
        r"Rank 2 was slow at step 30: data 41 ms a step, others 6 ms, earlier 5 ms \(CPU quota\)\. "
        r"Cause: CPU quota on host n3 \(the quota is 0\.5 cores\)\. Raise the CPU limit"
    )
    assert tiles["waiting"] == "17 %"  # two ranks wait for 1 s in two epochs: 4 s of 2 * 3 * 4 s


@pytest.mark.parametrize("kept", ["run.jsonl", "history.jsonl", "steps.jsonl run.jsonl"])
def test_run_with_missing_files_has_a_report(run_folder: Path, tmp_path: Path, kept: str) -> None:
    for name in kept.split():
        (tmp_path / name).write_bytes((run_folder / name).read_bytes())
    shown = read_page(tmp_path)
    picture = run(tmp_path, "--png")
    if "steps" in kept:
        assert shown.charts == ["loss", "learning rate", "samples per second"]
    elif kept == "run.jsonl":
        assert shown.contains("Nothing has been recorded yet")
        assert f"{tmp_path.name}: nothing has been recorded yet, so there is nothing" in picture.output
        return
    assert "loss" in shown.charts
    assert picture.exit_code == 0


def test_page_of_one_epoch_without_validation_omits_validation_results(tmp_path: Path) -> None:
    train(tmp_path / "short", validate=False, max_epochs=1)
    shown = read_page(tmp_path / "short")
    assert [tile[0] for tile in shown.tiles] == [
        "epochs", "train_loss", "samples per second", "time", "goodput", "data loading",
    ]  # fmt: skip
    assert shown.charts[:2] == ["loss", "learning rate"]


def test_invalid_folders_and_outputs_are_refused(run_folder: Path, tmp_path: Path) -> None:
    def error_output(*arguments: str | Path) -> str:
        result = run(*arguments)
        assert result.exit_code == 1, result.output
        assert result.output.startswith("Error: ")
        return " ".join(result.output.removeprefix("Error: ").split())

    assert error_output(run_folder.parent / "frist") == (
        f"Folder '{run_folder.parent}/frist' does not exist. Did you mean 'first'? Pass the output_dir of a run."
    )
    assert f"There is a run in '{run_folder}'. Pass the folder" in error_output(run_folder.parent)
    assert "has no run: it contains neither run.jsonl nor history.jsonl" in error_output(tmp_path)
    broken = tmp_path / "broken"
    write_rows(broken, "history.jsonl", read_rows(run_folder))
    lines = (broken / "history.jsonl").read_text().splitlines()
    (broken / "history.jsonl").write_text("\n".join([lines[0], lines[1][:30], lines[2], ""]))
    assert error_output(broken).startswith(
        f"Line 2 of '{broken}/history.jsonl' is not a row of a run's record: '{lines[1][:30]}'. Remove it: sed -i 2d"
    )
    assert "Cannot write" in error_output(run_folder, "--output", tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("history.jsonl", {"step": 1, "loss": 0.5}),
        ("history.jsonl", {"step": 1, "epoch": 1, "phase": "warm-up"}),
        ("history.jsonl", {"step": 1, "epoch": 1, "compute_seconds": [1.0]}),
        ("run.jsonl", {"step": 0, "run": "baseline"}),
        ("run.jsonl", {"step": 0, "backend": "ddp", "versions": None}),
        ("steps.jsonl", {"step": 1, "loss": "low"}),
    ],
)
def test_rows_in_another_format_are_refused(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    write_rows(tmp_path, "history.jsonl", [{"step": 1, "epoch": 1, "train_loss": 0.5}])
    write_rows(tmp_path, name, [row])
    for arguments in ([tmp_path], ["--png", tmp_path], ["--goodput", tmp_path]):
        result = run(*arguments)
        assert result.exit_code == 1, result.output
        assert f"Error: Line 1 of '{tmp_path}/{name}' is not a row of a run's record: " in result.output


@pytest.mark.parametrize("name", ["history.jsonl", "goodput.json"])
def test_unreadable_file_is_reported_as_a_failed_read(run_folder: Path, tmp_path: Path, name: str) -> None:
    write_rows(tmp_path, "history.jsonl", read_rows(run_folder))
    (tmp_path / name).unlink(missing_ok=True)
    if name == "goodput.json":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/proc/self/mem")  # reading this file raises OSError
    result = run(tmp_path)
    assert result.exit_code == 1
    assert f"'{tmp_path}/{name}' cannot be read: " in result.output


def test_chart_without_points_can_be_drawn() -> None:
    from unitrain.report.charts import Line, LineChart, to_svg

    assert to_svg(LineChart("loss", [Line("run", [])], "epoch")).startswith("<svg")


def test_missing_matplotlib_is_reported_with_a_fix(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "unitrain.report"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(run_folder)
    assert result.exit_code == 1
    assert "unitrain report needs a package that is missing: import of matplotlib halted" in result.output
    assert 'with: pip install ".[report]"' in result.output


@pytest.mark.parametrize("name", ["f1[macro]", "acc[/x]", "p$_{$", "cost $ per $ unit_", "_hidden", "a\\b", "\udcff"])
@pytest.mark.parametrize("option", [[], ["--png"]])
def test_text_in_names_is_not_interpreted(name: str, option: list[str], run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    write_rows(folder, "history.jsonl", [{**row, name: 1.0} for row in read_rows(folder)])
    result = run(folder, *option)
    assert result.exit_code == 0, result.output
    if not option:
        shown = name.replace("\udcff", "?")
        assert shown in (folder / "report.html").read_text()


def test_folder_whose_name_is_not_utf8_has_a_report(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run\xff")
    shutil.copytree(run_folder, folder)
    result = run(folder)
    assert result.exit_code == 0, result.output
    assert "run\\udcff" in (folder / "report.html").read_text()


@pytest.mark.parametrize("value", [10**400, [1.0], ["x"]])
@pytest.mark.parametrize("name", ["train_loss", "lr"])
def test_value_of_an_unexpected_type_is_reported(name: str, value: object, run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    rows = read_rows(folder)
    write_rows(folder, "history.jsonl", [*rows[:-1], {**rows[-1], name: value}])
    result = run(folder)
    assert result.exit_code in (0, 1)
    if result.exit_code:
        assert result.output.startswith(f"Error: The record of a run in '{folder}' contains a value of an unexpected")

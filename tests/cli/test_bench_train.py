"""`unitrain bench train`, which measures the phases of a step, and `unitrain bench compare`."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from launches import SECONDS, running_launcher
from requirements import needs_mpi

import unitrain
from unitrain import factories
from unitrain.backends.local import LocalBackend
from unitrain.bench import comparison, results, tables, training
from unitrain.bench.training import take_turn
from unitrain.cli import unitrain as command
from unitrain.errors import ConfigError, ReportError
from unitrain.testing import RankGroup

# Sleeps in every phase of a step. In the backward pass, only the last rank sleeps, and the other ranks wait for it.
SLOW = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain
from unitrain import factories

SIZE = int(os.environ.get("WORLD_SIZE", 1))
LAST = int(os.environ.get("RANK", 0)) == SIZE - 1

class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        time.sleep((0.06 if SIZE == 1 else 0.5) if LAST else 0)
        return gradient

class Model(nn.Linear):
    def forward(self, x):
        time.sleep(0.03)
        return Sleeps.apply(super().forward(x))

class Slow(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.04)
        super().step(closure)

class Data(TensorDataset):
    def __getitems__(self, indices):
        time.sleep(0.02)
        return [self[index] for index in indices]

def trainer_arguments():
    model = Model(4, 2)
    return {
        "model": model, "optimizer": Slow(model.parameters(), lr=0.1), "loss_fn": nn.MSELoss(),
        "config": unitrain.TrainConfig(
            max_epochs=7, batch_size=3, output_dir="never", keep_last=1, checkpoint_every_minutes=5, resume=True,
            metrics_port=9461, dry_run=True,
        ),
        "train_data": Data(torch.randn(12, 4), torch.randn(12, 2)),
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.1, 3),
    }

def no_arguments():
    return {}
"""


@pytest.fixture
def slow_target(tmp_path: Path) -> str:
    path = tmp_path / "slow.py"
    path.write_text(SLOW)
    return f"{path}:trainer_arguments"


def check_phases(phases: dict[str, float], backward: float, exposed: tuple[float, float]) -> None:
    least = {"data": 0.02, "forward": 0.03, "backward": backward, "exposed": exposed[0], "optimizer": 0.04}
    assert all(phases[phase] >= seconds * 0.99 for phase, seconds in least.items()), phases
    assert phases["exposed"] <= exposed[1], phases


def test_time_of_a_step_is_assigned_to_its_phases(
    slow_target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend(torch.device("cpu"))
    for settings, batch in (({}, 3), ({"gradient_accumulation_steps": 2}, 6)):
        turn = take_turn(backend, slow_target, settings, None, 4)
        times = 1 + (batch == 6)
        assert turn.seconds >= times * (0.02 + 0.03 + 0.06) + 0.04
        assert (turn.samples, turn.parameters) == (batch, 10)
        assert turn.memory_bytes > 1 << 20
        check_phases(turn.phases, 0.06 * times, (0, 0.05))
    # A turn may have more steps than the user's scheduler allows, and it does not write files.
    assert take_turn(backend, slow_target, {}, 4, 5).samples == 4
    assert not Path("never").exists()


def test_peak_memory_is_measured_if_the_system_cannot_reset_it(
    slow_target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "status").write_text("VmRSS:\t1 kB\n")
    monkeypatch.setattr(training, "_PROCESS_STATUS", tmp_path / "status")
    monkeypatch.setattr(training, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    turn = take_turn(LocalBackend(torch.device("cpu")), slow_target, {}, None, 2)
    assert 50 << 20 < turn.memory_bytes < 1 << 40


def test_wait_for_a_slow_rank_is_exposed_communication(slow_target: str) -> None:
    with RankGroup("ddp", 2) as group:
        first, last = group.run(take_turn, slow_target, {}, None, 6)
    check_phases(last.phases, 0.5, (0, 0.25))
    check_phases(first.phases, 0, (0.25, 5))
    assert first.phases["backward"] < 0.25


@pytest.mark.nightly
@needs_mpi
def test_training_is_measured_on_every_backend_transport_and_setting(tmp_path: Path) -> None:
    saved, page = tmp_path / "saved.json", tmp_path / "page.html"
    options = [
        "--ranks",
        "1,2",
        "--steps",
        "4",
        "--seconds",
        "0",
        "--device",
        "cpu",
        "--setting",
        "gradient_accumulation_steps=2",
    ]
    bench = [sys.executable, "-m", "unitrain", "bench", "train", "tiny"]
    with running_launcher([*bench, *options, "--json", str(saved), "--output", str(page)]) as job:
        output = job.process.communicate(timeout=3 * SECONDS)[0]
        assert job.process.returncode == 0, output
        assert not job.find_processes(), output
    result = results.read(saved, "train")
    expected = {("local", "none", 1), ("ddp", "gloo", 2), ("horovod", "gloo", 2), ("horovod", "mpi", 2)}
    found = {(row["backend"], row["transport"], row["ranks"], row["setting"]): row for row in result["rows"]}
    assert set(found) == {(*one, setting) for one in expected for setting in (None, "gradient_accumulation_steps=2")}
    assert (result["parameters"], result["target"], result["skipped"]) == (64 * 64 * 2 + 128 + 650, "tiny", [])
    for (_, _, ranks, setting), row in found.items():
        assert row["samples"] == 32 * ranks * (2 if setting else 1)
        assert len(row["seconds"]) == 3
        assert all(len(row["phases"][phase]) == 3 for phase in results.PHASES)
        assert min(row["seconds"]) > 0
        assert all(seconds > 0 for phase in ("forward", "backward", "optimizer") for seconds in row["phases"][phase])
    single, two = found["local", "none", 1, None], found["ddp", "gloo", 2, None]
    assert results.efficiency(result, single) == 1
    median = {row["ranks"]: results.quartiles(row["seconds"])[1] for row in (single, two)}
    assert results.efficiency(result, two) == pytest.approx(median[1] / median[2])
    rows = tables.table_texts(tables.train(result))[1]
    assert len(rows) == 8
    text = page.read_text()
    assert all(f"<td>{cell}</td>" in text for row in rows for cell in row)
    assert text.count("<svg") == 3
    # A comparison of the result with itself finds no differences, and the result can be used for a prediction.
    same = CliRunner().invoke(command, ["bench", "compare", str(saved), str(saved)])
    assert same.exit_code == 0, same.output
    assert same.output.count("too few rounds") == 8
    given = ["--latency", "1e-5", "--bandwidth", "1", "--algorithms", "ring", "--train", str(saved), "--ranks", "2"]
    predicted = CliRunner().invoke(command, ["bench", "predict", *given])
    assert predicted.exit_code == 0, predicted.output
    assert "horovod mpi on 2 ranks: measured" in predicted.output
    assert (
        "horovod mpi, gradient_accumulation_steps=2" not in predicted.output
    )  # predictions exclude runs with settings


def create_result(**seconds: list[float]) -> dict[str, Any]:
    row = {"backend": "ddp", "transport": "gloo", "setting": None, "ranks": 2}
    rows = [{**row, "backend": backend, "seconds": taken} for backend, taken in seconds.items()]
    return {"kind": "train", "target": "tiny", "rows": rows}


def test_compare_distinguishes_differences_from_noise() -> None:
    slow, fast = [2.0, 2.1, 2.2, 2.0, 2.1, 2.2, 2.3, 2.1], [1.0, 1.1, 1.2, 1.0, 1.1, 1.2, 1.3, 1.1]
    before = create_result(ddp=[1.0, 1.1, 1.2, 1.3, 1.4, 1.2, 1.1, 1.3], horovod=slow, mpi=slow[:7], local=[1.0])
    after = create_result(ddp=[1.3, 1.25, 1.2, 1.2, 1.4, 1.2, 1.1, 1.1], horovod=fast, mpi=fast[:7], other=[1.0])
    (ddp, horovod, mpi), unmatched = comparison.compare(before, after)
    assert (ddp.name, ddp.verdict) == ("tiny, ddp gloo, 2 ranks", "the same within noise")
    assert (horovod.speedup, horovod.verdict) == (2.1 / 1.1, "faster")
    assert (mpi.speedup, mpi.verdict) == (2.1 / 1.1, "too few rounds")
    assert comparison.compare(after, before)[0][1].verdict == "slower"
    assert unmatched == ["tiny, local gloo, 2 ranks", "tiny, other gloo, 2 ranks"]
    with pytest.raises(ReportError, match="one has tiny, ddp gloo, 2 ranks, the other tiny, other gloo, 2 ranks"):
        comparison.compare(create_result(ddp=[1.0]), create_result(other=[1.0]))
    with pytest.raises(ReportError, match="of bench train and the second of bench collectives"):
        comparison.compare(before, {"kind": "collectives", "rows": [], "ranks": 2})


@pytest.mark.nightly
def test_compare_rarely_reports_differences_of_equal_distributions() -> None:
    """At most 5 % of comparisons report a false difference, even if the results have many rows."""
    generator = random.Random(0)

    def draw_result(rows: int, rounds: int) -> dict[str, Any]:
        return create_result(
            **{f"row{row}": [generator.lognormvariate(0, 0.1) for _ in range(rounds)] for row in range(rows)}
        )

    for rows, rounds in ((1, 8), (1, 20), (10, 8), (10, 12)):
        comparisons = 400
        wrong = sum(
            any(
                row.verdict != "the same within noise"
                for row in comparison.compare(draw_result(rows, rounds), draw_result(rows, rounds))[0]
            )
            for _ in range(comparisons)
        )
        assert wrong <= 0.05 * comparisons + 13, (rows, rounds)  # 13 is three standard deviations


def test_mann_whitney_test_equals_scipy() -> None:
    from scipy.stats import mannwhitneyu

    generator = random.Random(1)
    for ones, others in ((8, 8), (8, 12), (15, 9)):
        first = [generator.gauss(0, 1) for _ in range(ones)]
        second = [generator.gauss(0.7, 1) for _ in range(others)]
        expected = mannwhitneyu(first, second, method="exact").pvalue
        assert comparison.mann_whitney_p_value(first, second) == pytest.approx(expected, rel=1e-9)
    assert comparison.mann_whitney_p_value([1.0] * 8, [1.0] * 8) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tinny", "Unknown model 'tinny'. Did you mean 'tiny'? Available: tiny, 25M, gpt, resnet18, resnet50, "),
        ("absent.py:make", "There is no file 'absent.py'. Pass the file and the function: file.py:function"),
        ("tiny --setting precison=bf16", "got 'precison=bf16'. Did you mean 'precision'?"),
        ("tiny --setting max_steps=5", "--setting cannot change TrainConfig.max_steps"),
        ("tiny --setting progress=bar", "--setting cannot change TrainConfig.progress"),
        ("tiny --setting precision=bf17", "Unknown TrainConfig.precision 'bf17'. Did you mean 'bf16'?"),
        ("tiny --json setup.py/before.json", "--json 'setup.py/before.json' is not writable. Use another file: --json"),
        ("tiny --output setup.py/a/x.png", "--output 'setup.py/a/x.png' is not writable. Use another file: --output"),
        (
            "tiny --ranks one",
            "--ranks takes positive integers separated by commas, got 'one' in 'one'. Use --ranks 1,2",
        ),
    ],
)
def test_invalid_arguments_are_refused_before_ranks_start(arguments: str, message: str) -> None:
    result = CliRunner().invoke(command, ["bench", "train", *arguments.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_error_in_the_user_function_is_reported(slow_target: str) -> None:
    target = slow_target.replace(":trainer_arguments", ":no_arguments")
    result = CliRunner().invoke(command, ["bench", "train", target, "--ranks", "1", "--device", "cpu"])
    assert result.exit_code == 1
    message = result.output.splitlines()[-1]
    assert message == f"Error: {target} did not return model, optimizer, config, train_data. " + (
        "Add them to the dictionary: Trainer and fit require them."
    )


def test_every_built_in_model_can_be_trained() -> None:
    from unitrain.bench import models
    from unitrain.bench.models import BUILT_IN_MODELS, resolve_target

    for name, (function, _) in BUILT_IN_MODELS.items():
        made = getattr(models, function)()
        assert resolve_target(name)[0] == f"unitrain.bench.models:{function}"
        inputs, target = (part.unsqueeze(0).expand(2, *part.shape) for part in made["train_data"][0])
        loss = made["loss_fn"](made["model"](inputs), target)
        loss.backward()
        made["optimizer"].step()
        assert isinstance(made["config"], unitrain.TrainConfig)
    assert sum(parameter.numel() for parameter in models.mlp_25m()["model"].parameters()) == 24_549_642
    with pytest.raises(ConfigError, match=r"There is no function 'nothing' in unitrain.bench.models"):
        factories.call_training_function("unitrain.bench.models:nothing")

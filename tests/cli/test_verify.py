"""`unitrain verify` reports equal results as equal, and names the causes of injected differences."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from groups import nightly
from launches import SECONDS, running_launcher
from preload import preloaded
from requirements import needs_mpi
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unitrain
from unitrain.backends.base import StartOptions
from unitrain.backends.local import LocalBackend
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.overrides import OVERRIDES_VARIABLE, overrides_setting
from unitrain.cli import unitrain as command
from unitrain.cli.available import find_available_backends
from unitrain.errors import ConfigError
from unitrain.verify.bits import find_first_difference
from unitrain.verify.commands import last_lines
from unitrain.verify.difference import compare
from unitrain.verify.digests import digest_samples
from unitrain.verify.record import RECORDER, Record, RecordRequest
from unitrain.verify.verdict import Group, Outcome, RequestedRun, VerdictRow, compare_outcomes, resolve_with_float64

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits.py"
# The first argument selects the injected error.
SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

injected, *folder = sys.argv[1:]

class Nudge(unitrain.Callback):
    def on_step_end(self, trainer):
        if "nudge" in injected and trainer.backend.rank == 1 and trainer.progress.step == 3:
            next(trainer.model.parameters()).data.add_(1e-3)

with unitrain.init("ddp" if injected == "crash" else None, device="cpu") as backend:
    if injected == "crash" and backend.size > 1:
        raise RuntimeError("injected: not on this backend")
    if injected == "hang" and backend.size > 1:
        open(f"{folder[0]}/{backend.rank}", "w").close()
        time.sleep(1000)
    if injected == "hang":
        sys.exit()
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    if "shuffle" in injected:
        generator.seed()
        order = backend.broadcast_object(torch.randperm(64, generator=generator))
        inputs, targets = inputs[order], targets[order]
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5 * (injected in ("dropout", "bits")))
    model = nn.Sequential(nn.Linear(6, 8), dropout, nn.Tanh(), nn.Linear(8, 3))
    if injected == "rounding" and backend.name == "ddp":
        weight, bias = model[0].weight, model[0].bias
        model[0].forward = lambda x: (x[:, :3] @ weight[:, :3].T + bias) + x[:, 3:] @ weight[:, 3:].T
    lr = 0.1 * (backend.size if injected == "rate" and backend.name == "horovod" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    logical_ranks = 4 if "bits" in injected else None
    config = unitrain.TrainConfig(max_epochs=2, batch_size=8, progress="off", logical_ranks=logical_ranks)
    trainer = unitrain.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, callbacks=[Nudge()]
    )
    trainer.fit(TensorDataset(inputs, targets))
    raise AssertionError("the script continues after the requested steps")
"""
FUNCTION = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

def regression():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    return {
        "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "loss_fn": nn.MSELoss(),
        "config": unitrain.TrainConfig(max_epochs=3, batch_size=8, sync_batch_norm=True),
        "train_data": TensorDataset(torch.randn(64, 6), torch.randn(64, 2)),
    }
"""


def verify(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run `unitrain verify`, and return its exit code, its output and its JSON report."""
    report = folder / "report.json"
    with running_launcher(
        [sys.executable, "-m", "unitrain", "verify", "--cpu", "--json", str(report), *arguments]
    ) as launch:
        output = launch.process.communicate(timeout=3 * SECONDS)[0]
        assert not launch.find_processes(), output
    assert report.exists(), output
    return launch.process.returncode, output, json.loads(report.read_text())


def rows_by_backend(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a report with one group, as a dictionary by (backend, transport)."""
    (group,) = report["groups"]
    return {(row["backend"], row["transport"]): row for row in group["rows"]}


@needs_mpi
def test_digits_has_the_same_results_on_every_backend_and_transport(tmp_path: Path) -> None:
    code, output, report = verify(tmp_path, str(DIGITS), "--output", str(tmp_path / "runs"))
    assert code == 0, output
    assert output.endswith("Verdict: the same results.\n")
    found = rows_by_backend(report)
    assert {who: row["status"] for who, row in found.items()} == {
        ("local", "none"): "reference",
        ("ddp", "gloo"): "same results",
        ("horovod", "gloo"): "same results",
        ("horovod", "mpi"): "same results",
    }
    for (backend, _), row in found.items():
        assert row["processes"] == (1 if backend == "local" else 2)
        assert row["global_batch_sizes"] == [64] * 20
        assert row["replicas_bit_equal"]
        assert row["data"] == found["local", "none"]["data"]
        assert len(set(row["data"])) == 20, "each step must have different samples"
        if backend != "local":
            # AdamW amplifies rounding errors of gradients near zero. The verdict is then based on float64.
            assert row["difference"]["parameters"]["delta"] < 1e-4
            assert row["difference"]["loss"]["delta"] < 1e-6
    assert found["ddp", "gloo"]["losses"][0] > found["ddp", "gloo"]["losses"][-1] > 0
    assert not (tmp_path / "runs").exists(), "verify must not write to the user's output folder"


def test_learning_rate_that_is_scaled_on_one_backend_is_named(script: str, tmp_path: Path) -> None:
    code, output, report = verify(tmp_path, "--steps", "4", "--backends", "ddp,horovod", script, "rate")
    assert code == 1
    found = rows_by_backend(report)
    assert found["ddp", "gloo"]["status"] == "reference"
    row = found["horovod", "gloo"]
    assert row["status"] == "differs"
    assert row["reasons"] == ["the learning rate of step 1 is 0.2 instead of 0.1"]
    assert row["difference"]["first_data_step"] is None
    assert row["difference"]["first_loss_step"] == 2, (
        "the first loss is computed before the first update, so it must be equal"
    )
    assert "horovod over gloo, 2 ranks differs:\n  the learning rate of step 1 is 0.2 instead of 0.1.\n" in output


def test_rounding_difference_is_resolved_in_float64(script: str, tmp_path: Path) -> None:
    options = ("--steps", "4", "--backends", "local,ddp", "--tolerance", "1e-12")
    code, output, report = verify(tmp_path, *options, script, "rounding")
    assert code == 0, output
    assert "1 of 2 runs may differ by rounding only. Repeating them in float64:" in output
    row = rows_by_backend(report)["ddp", "gloo"]
    assert row["status"] == "same results"
    assert row["difference"]["parameters"]["delta"] > 1e-12
    assert row["reasons"][0].startswith("the difference is rounding: in float64 the parameters differ by ")


def test_unseeded_shuffle_and_diverging_rank_are_named(script: str, tmp_path: Path) -> None:
    code, output, report = verify(tmp_path, "--steps", "5", "--backends", "local,ddp", script, "shuffle and nudge")
    assert code == 1
    row = rows_by_backend(report)["ddp", "gloo"]
    assert row["difference"]["first_data_step"] == 1
    assert not row["replicas_bit_equal"]
    data, replica = row["reasons"]
    assert data.startswith("step 1 has different samples. Seed everything that shuffles")
    assert replica == "after the last step, 0.weight on rank 1 differs from rank 0"
    assert "differ in step 1" in output
    assert "rank 1 differs" in output


def test_output_of_a_failed_run_and_a_hard_coded_backend_are_reported(script: str, tmp_path: Path) -> None:
    code, output, report = verify(tmp_path, "--steps", "2", "--backends", "local,ddp", script, "crash")
    assert code == 1
    found = rows_by_backend(report)
    (crashed,) = [row for row in found.values() if row["processes"] == 2]
    assert crashed["status"] == "failed"
    assert crashed["reasons"] == ["it ended with exit code 1"]
    assert any(line.endswith("RuntimeError: injected: not on this backend") for line in crashed["output"])
    assert "  | [rank" in output
    (local,) = [row for row in found.values() if row["processes"] == 1]
    assert local["status"] == "failed"
    assert local["reasons"][0].startswith("the script used backend 'ddp' instead. Call unitrain.init()")


def test_single_process_differs_by_design_from_several_ranks_with_dropout(script: str, tmp_path: Path) -> None:
    code, output, report = verify(tmp_path, "--steps", "6", script, "dropout")
    assert code == 0, output
    found = rows_by_backend(report)
    assert found["ddp", "gloo"]["status"] == "reference"
    assert found["horovod", "gloo"]["status"] == "same results"
    assert found["horovod", "gloo"]["difference"]["parameters"]["delta"] == 0
    local = found["local", "none"]
    assert local["status"] == "by design"
    assert local["difference"]["parameters"]["delta"] > 1e-3
    assert local["difference"]["first_data_step"] is None
    assert "training draws random numbers (torch), for example for dropout" in local["reasons"][0]
    assert output.endswith("Verdict: the same results, except for differences by design.\n")


def test_bits_option_finds_equal_bits_on_one_and_three_processes(script: str, tmp_path: Path) -> None:
    options = ("--bits", "-np", "3", "--steps", "4", "--backends", "local,ddp")
    code, output, report = verify(tmp_path, *options, script, "bits")
    assert code == 0, output
    assert [(row["processes"], row["status"]) for row in report["rows"]] == [
        (1, "reference"), (3, "bit-equal"),
    ]  # fmt: skip
    assert output.endswith("Verdict: the same bits in 2 runs.\n")


def test_bits_option_names_the_first_step_and_tensor_that_differ(script: str, tmp_path: Path) -> None:
    options = ("--bits", "--steps", "4", "--backends", "local,ddp")
    code, output, report = verify(tmp_path, *options, script, "bits nudge")
    assert code == 1
    assert report["rows"][1]["status"] == "differs"
    assert "after step 3, parameter 0.weight on rank 1 differs from rank 0" in output
    assert output.endswith("Verdict: not the same bits. Of 2 runs, 1 differ or failed.\n")


@pytest.mark.ci
def test_run_that_hangs_is_terminated_and_its_stacks_are_reported(script: str, tmp_path: Path) -> None:
    """The script hangs on two ranks, and exits without training on one process."""
    options = ("--timeout-seconds", "30", "--backends", "local,ddp")
    code, output, report = verify(tmp_path, *options, script, "hang", str(tmp_path))
    assert code == 1
    assert (tmp_path / "0").exists(), "the timeout must expire after the ranks hang"
    found = {row["backend"]: row for row in report["groups"][0]["rows"]}
    assert found["ddp"]["reasons"][0].startswith("it did not finish within 30 s and was terminated.")
    line = SCRIPT.splitlines().index("        time.sleep(1000)") + 1
    assert any(f"line {line} in <module>" in text for text in found["ddp"]["output"]), output
    assert found["local"]["reasons"][0].startswith("it ended without training.")
    assert output.endswith("Verdict: not the same results. Of 2 runs, 2 failed.\n")


@pytest.mark.parametrize("signum", [signal.SIGHUP, *nightly(signal.SIGTERM)])
def test_signal_to_verify_terminates_the_current_run(signum: signal.Signals, script: str, tmp_path: Path) -> None:
    arguments = ["--backends", "ddp", script, "hang", str(tmp_path)]
    with running_launcher([sys.executable, "-m", "unitrain", "verify", *arguments]) as launch:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "1").exists() and launch.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(launch.find_processes()) >= 4
        launch.process.send_signal(signum)
        launch.wait_until_all_exited(28)  # torchrun sends SIGKILL after 30 s
        assert launch.process.wait(15) == 128 + signum


@pytest.mark.nightly
def test_ranks_are_terminated_if_verify_is_killed(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unitrain", "verify", "--backends", "ddp", script, "hang", str(tmp_path)]
    with running_launcher(command, fresh=True) as launch:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "1").exists() and launch.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(launch.find_processes()) >= 4
        launch.process.kill()
        launch.wait_until_all_exited(28)


def test_pipeline_is_compared_with_one_process(tmp_path: Path) -> None:
    """One process computes both stages. The example trains for 3 steps, fewer than the default of `unitrain verify`."""
    example = (str(EXAMPLES / "pipeline.py"), "--epochs", "1", "--batch-size", "500")
    code, output, report = verify(tmp_path, "--float64", "--backends", "local,ddp", *example)
    assert code == 0, output
    found = rows_by_backend(report)
    assert found["local", "none"]["status"] == "reference"
    row = found["ddp", "gloo"]
    assert (row["status"], row["processes"], row["optimizer"], row["steps"]) == ("same results", 2, "AdamW", 3)
    assert row["data"] == found["local", "none"]["data"]
    assert row["global_batch_sizes"][:2] == [500, 500]
    assert row["difference"]["parameters"]["delta"] < 1e-12  # both runs have the same micro-batches


def test_function_is_verified_in_float64_on_three_ranks(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FUNCTION)
    target = f"{tmp_path / 'made.py'}:regression"
    code, output, report = verify(tmp_path, "-np", "3", "--float64", "--backends", "local,ddp", target)
    assert code == 0, output
    row = rows_by_backend(report)["ddp", "gloo"]
    assert row["status"] == "same results"
    assert 0 < row["difference"]["parameters"]["delta"] < 1e-8, "the difference must be as small as in float64"
    assert row["global_batch_sizes"][:3] == [24, 24, 16], "the last global batch must have 16 samples, sharded unevenly"
    assert report["tolerance"] == 1e-8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-np", "2,x", "{script}"],
            r"-np takes positive numbers of ranks, as in -np 1,2,3, got 'x' in '2,x'. Use -np 2",
        ),
        (["--backends", "ddp,hovorod", "{script}"], "Unknown backend 'hovorod'. Did you mean 'horovod'?"),
        (["{script}x"], "does not exist. Did you mean 'train.py'?"),
        (
            ["made:function", "--lr", "1"],
            "'made:function' is a function, which takes no arguments: --lr 1. Remove them.",
        ),
        (["{script}:"], "has no function name after the colon. Name a function as in "),
        ([":function"], "':function' has no module or file before the colon. Name a function as in train.py:function"),
        (["--steps", "0", "{script}"], "0 is not in the range x>=1"),
        (["--bits", "--float64", "{script}"], "--bits allows no difference. Leave out --tolerance and --float64."),
        (["--json", "none/x.json", "{script}"], "The folder 'none' of --json does not exist. Create it before the run"),
    ],
    ids=["ranks", "backend", "script", "arguments", "no function name", "no file name", "steps", "bits", "report"],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, script: str) -> None:
    result = CliRunner().invoke(command, ["verify", *(one.format(script=script) for one in arguments)])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_unavailable_controllers_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in preloaded(os.environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    controllers, skipped = find_available_backends(["ddp", "horovod", "local"])
    assert controllers == {"ddp": [None], "horovod": ["gloo"], "local": [None]}
    ((what, why),) = skipped
    assert what == "horovod over mpi"
    assert why in ("mpirun is not on PATH.", "Horovod was built without mpi.")


# --- training on one rank in this process ---


def create_samples(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator))


def build_model(seed: int = 0, lr: float = 0.1, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def record_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    model_and_optimizer: tuple[nn.Module, torch.optim.Optimizer] | None = None,
    data: Dataset[Any] | DataLoader[Any] | None = None,
    loss_fn: Any = None,
    steps: int = 5,
    emulated_ranks: int = 1,
    float64: bool = False,
    bits: bool = False,
    callbacks: Sequence[unitrain.Callback] = (),
    **settings: Any,
) -> Record:
    """Train on one rank as `unitrain verify` does, and return the record of the run."""
    folder.mkdir()
    RecordRequest(steps=steps, emulated_ranks=emulated_ranks, float64=float64, bits=bits).write(folder)
    model, optimizer = model_and_optimizer or build_model()
    config = unitrain.TrainConfig(**{"max_epochs": 9, "batch_size": 4, "progress": "off", **settings})
    backend = LocalBackend.start(StartOptions(RankInfo("none", 0, 1, 0), device="cpu"))
    monkeypatch.setenv(OVERRIDES_VARIABLE, overrides_setting(RECORDER, str(folder)))
    try:
        trainer = unitrain.Trainer(
            model, optimizer, loss_fn or nn.MSELoss(), backend=backend, config=config, callbacks=callbacks
        )
        with pytest.raises(SystemExit) as ended:
            trainer.fit(data or create_samples())
        assert ended.value.code == 0
    finally:
        monkeypatch.delenv(OVERRIDES_VARIABLE)
        backend.shutdown()
    found = Record.read(folder)
    assert found is not None
    return found


def compare_records(*records: Record) -> Group:
    outcomes = [
        Outcome(run=RequestedRun(backend="local", emulated_ranks=1, processes=1), seconds=0.0, record=one)
        for one in records
    ]
    return compare_outcomes(1, outcomes, 1e-6, float64=False)


def second_row(*records: Record) -> VerdictRow:
    return compare_records(*records).rows[1]


def test_record_equals_a_loop_in_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record_run(tmp_path / "a", monkeypatch, shuffle=False, steps=7, max_grad_norm=0.5)
    model, optimizer = build_model()
    inputs, targets = create_samples().tensors
    losses = []
    for step in range(7):
        part = slice(step % 6 * 4, step % 6 * 4 + 4)
        loss = nn.functional.mse_loss(model(inputs[part]), targets[part])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert found.losses() == losses
    assert found.global_batch_sizes() == [4] * 7
    assert found.learning_rates() == [[0.1]] * 7
    data = found.sample_digests()
    assert data[6] == data[0], "without shuffling, the second epoch must start with the same samples as the first"
    assert data[0] == digest_samples([inputs[:4], targets[:4]], 4) % 2**64
    from safetensors.torch import load_file

    ends = load_file(tmp_path / "a" / "end.safetensors")
    assert set(ends) == {f"parameter {name}" for name, _ in model.named_parameters()} | {
        f"state {name} momentum_buffer" for name, _ in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(ends[f"parameter {name}"], parameter.detach())
        assert torch.equal(ends[f"state {name} momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


def test_one_process_can_train_with_the_global_batch_of_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = record_run(tmp_path / "a", monkeypatch, batch_size=12)
    as_three = record_run(tmp_path / "b", monkeypatch, emulated_ranks=3)
    fixed = record_run(tmp_path / "c", monkeypatch, emulated_ranks=3, batch_size=4, global_batch_size=12)
    loader = DataLoader(create_samples(), batch_size=4, shuffle=True)
    loaded = record_run(tmp_path / "d", monkeypatch, emulated_ranks=3, data=loader, batch_size=None)
    for found in (as_three, fixed, loaded):
        assert found.global_batch_sizes() == own.global_batch_sizes() == [12] * 5
        assert found.sample_digests() == own.sample_digests()
        assert found.batch_norm_groups() == [[4, 4, 4]] * 5
        assert second_row(own, found).status == "same results"
    assert own.batch_norm_groups() == [[12]] * 5
    assert (own.first.has_fixed_global_batch_size, fixed.first.has_fixed_global_batch_size) == (False, True)


def test_one_process_can_normalize_over_the_same_samples_as_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank normalizes over its own samples. With sync_batch_norm, it normalizes over the samples of all ranks."""

    def build_normalized_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    complete = record_run(tmp_path / "whole", monkeypatch, model_and_optimizer=build_normalized_model(), batch_size=12)
    synced = record_run(
        tmp_path / "all",
        monkeypatch,
        model_and_optimizer=build_normalized_model(),
        emulated_ranks=3,
        sync_batch_norm=True,
    )
    own = record_run(tmp_path / "own", monkeypatch, model_and_optimizer=build_normalized_model(), emulated_ranks=3)
    assert [found.first.batch_statistics for found in (complete, synced, own)] == ["rank", "all", "rank"]
    assert synced.batch_norm_groups() == [[12]] * 5
    assert own.batch_norm_groups() == [[4, 4, 4]] * 5
    assert second_row(complete, synced).status == "same results"
    assert second_row(complete, own).status == "differs"


def test_compressed_gradients_differ_by_design_if_the_numbers_of_ranks_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record_run(tmp_path / "a", monkeypatch, compression="bf16", batch_size=12)
    exact = record_run(tmp_path / "b", monkeypatch, batch_size=12)
    assert (one.first.compression_dtype, exact.first.compression_dtype) == ("bf16", "none")
    assert second_row(one, exact).status == "differs", "a difference between equal numbers of ranks is not by design"
    two_ranks = Record([replace(exact.first, size=2, compression_dtype="bf16")], exact.folder)
    rows = {row.status: row for row in compare_records(one, two_ranks).rows}
    assert rows.keys() == {"reference", "by design"}
    assert "each rank rounds its gradients to bf16 before they are reduced" in rows["by design"].reasons[0]
    unrounded = Record([replace(one.first, size=2, compression_dtype="none")], one.folder)
    assert {row.status for row in compare_records(exact, unrounded).rows} == {"reference", "differs"}


def test_losses_are_weighted_by_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        kept = target > 0
        return ((output - target) ** 2 * kept).sum(), kept.sum()

    complete = record_run(tmp_path / "a", monkeypatch, batch_size=12, loss_fn=summed)
    parts = record_run(tmp_path / "b", monkeypatch, emulated_ranks=3, loss_fn=summed)
    assert complete.losses() == pytest.approx(parts.losses(), rel=1e-6)
    assert second_row(complete, parts).status == "same results"


def test_each_cause_of_a_difference_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = record_run(tmp_path / "reference", monkeypatch)
    causes: dict[str, tuple[dict[str, Any], str]] = {
        "seed": (
            {"model_and_optimizer": build_model(seed=1)},
            "0.weight has different initial values. Call torch.manual_seed(0) before",
        ),
        "model": (
            {"model_and_optimizer": build_model(width=5)},
            "parameter 0.bias exists in only one of the runs, or has different shapes in them",
        ),
        "rate": ({"model_and_optimizer": build_model(lr=0.2)}, "the learning rate of step 1 is 0.2 instead of 0.1"),
        "order": ({"seed": 1}, "step 1 has different samples. Seed"),
        "batch": ({"batch_size": 5}, "step 1 has different samples (5 instead of 4). Seed"),
        "length": ({"max_epochs": None, "max_steps": 3}, "the run ended after 3 steps, the reference after 5"),
        "clipping": ({"max_grad_norm": 0.01}, "the cause is unknown: initial values"),
    }
    for name, (changes, reason) in causes.items():
        row = second_row(reference, record_run(tmp_path / name, monkeypatch, **changes))
        assert row.status == "differs", name
        assert row.reasons[0].startswith(reason), (name, row.reasons)
        assert len(row.reasons) == 1, (name, row.reasons)
    assert second_row(reference, record_run(tmp_path / "same", monkeypatch, max_seconds=1e-9)).status == "same results"


def test_run_with_nan_or_without_updates_is_not_comparable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = record_run(tmp_path / "a", monkeypatch, log_every_n_steps=100, steps=3)
    inputs, targets = create_samples().tensors
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))  # order of the first epoch
    broken = TensorDataset(inputs, torch.where(torch.isin(torch.arange(24), order[:6])[:, None], targets, float("nan")))
    nans = [
        record_run(tmp_path / name, monkeypatch, data=broken, log_every_n_steps=100, steps=3) for name in ("b", "c")
    ]
    unchanged = [
        record_run(tmp_path / name, monkeypatch, model_and_optimizer=build_model(lr=0.0), steps=3)
        for name in ("d", "e")
    ]
    for pair, reason in ((nans, "the loss of step 2 is nan"), (unchanged, "no parameter changed in 3 steps")):
        for outcomes in (pair, [reference, pair[0]]):
            row = second_row(*outcomes)
            assert row.status == "failed"
            assert row.reasons[0].startswith(reason)
    assert compare_records(reference, nans[0]).rows[0].status == "reference"


def test_wrong_gradient_is_found_at_any_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of the parameters may be far below the tolerance. float32 may be inconclusive; float64 is not."""

    def scaled(factor: float) -> Any:
        return lambda output, target: factor * nn.functional.mse_loss(output, target)

    def adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = build_model()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    for rate in (1e-1, 1e-4, 1e-7):
        for float64 in (False, True):
            right, again, wrong = (
                record_run(
                    tmp_path / f"{rate} {float64} {number}",
                    monkeypatch,
                    model_and_optimizer=build_model(lr=rate),
                    loss_fn=scaled(factor),
                    float64=float64,
                )
                for number, factor in enumerate((1.0, 1.0, 1.01))
            )
            # Only the gradients of the wrong run differ.
            for one, other, same in ((right, again, True), (right, wrong, False)):
                found = compare(other, one, 1e-8 if float64 else 1e-6, float64=float64)
                parameters = found.parameters
                assert parameters.is_within_tolerance == same or not parameters.is_conclusive, (rate, float64)
                assert not same or parameters.delta == 0
                if float64:
                    assert parameters.is_conclusive
                    assert parameters.is_within_tolerance == same, rate
                assert found.state.is_within_tolerance == same, (rate, float64, "the momentum depends on the gradients")
    state = compare(
        record_run(tmp_path / "wrong", monkeypatch, model_and_optimizer=adamw(), loss_fn=scaled(10.0)),
        record_run(tmp_path / "right", monkeypatch, model_and_optimizer=adamw()),
        1e-6,
        float64=False,
    ).state
    assert not state.is_within_tolerance


def test_float64_distinguishes_a_wrong_gradient_from_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare_two_runs(name: str, *, float64: bool, wrong: bool) -> Group:
        runs = [
            record_run(
                tmp_path / f"{name} {number} {float64}",
                monkeypatch,
                model_and_optimizer=build_model(lr=1e-3),
                # The second run adds in another order, or has wrong gradients.
                loss_fn=(lambda output, target: (output - target).flip(0).square().mean() * (1.01 if wrong else 1.0))
                if number
                else nn.MSELoss(),
                float64=float64,
            )
            for number in range(2)
        ]
        outcomes = [
            Outcome(run=RequestedRun(backend=name, emulated_ranks=1, processes=1), seconds=0.0, record=one)
            for name, one in zip(("local", "ddp"), runs, strict=True)
        ]
        return compare_outcomes(1, outcomes, 1e-8 if float64 else 0.0, float64=float64)

    for wrong, status in ((False, "same results"), (True, "differs")):
        first = compare_two_runs(f"{wrong}", float64=False, wrong=wrong)
        assert first.rows[1].status == "differs"
        assert first.rows[1].needs_float64
        last = resolve_with_float64(first, compare_two_runs(f"{wrong}", float64=True, wrong=wrong)).rows[1]
        assert last.status == status
        message = (
            "the difference is rounding: in float64"
            if status == "same results"
            else "the difference is not rounding: in float64"
        )
        assert last.reasons[-1].startswith(message)


def test_settings_derived_from_the_number_of_ranks_differ_by_design(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (
        record_run(tmp_path / "a", monkeypatch),
        record_run(tmp_path / "b", monkeypatch, model_and_optimizer=build_model(lr=0.2)),
    )
    two_ranks = Record([replace(two.first, size=2)], two.folder)
    outcomes = [
        Outcome(run=RequestedRun(backend=name, emulated_ranks=2, processes=processes), seconds=0.0, record=found)
        for name, processes, found in (("local", 1, one), ("ddp", 2, two_ranks), ("horovod", 2, two_ranks))
    ]
    rows = {row.outcome.run.backend: row for row in compare_outcomes(2, outcomes, 1e-6, float64=False).rows}
    assert {name: row.status for name, row in rows.items()} == {
        "local": "by design",
        "ddp": "reference",
        "horovod": "same results",
    }
    assert rows["local"].reasons == [
        "the script derives its learning rate from the number of ranks (1 here, 2 in the reference): it is 0.1 instead "
        "of 0.2 in step 1"
    ]
    # A learning rate that is scaled on only one backend is an error.
    unscaled = Record([replace(one.first, size=2)], one.folder)
    outcomes[1] = replace(outcomes[1], record=unscaled)
    rows = {row.outcome.run.backend: row for row in compare_outcomes(2, outcomes, 1e-6, float64=False).rows}
    assert rows["horovod"].status == "differs"
    assert rows["horovod"].reasons == ["the learning rate of step 1 is 0.2 instead of 0.1"]


def test_option_after_the_script_causes_a_warning(script: str, tmp_path: Path) -> None:
    code, output, _ = verify(tmp_path, "--backends", "local", "--steps", "1", script, "none", "--steps", "5", "--lr=1")
    assert code == 1, "one run cannot be compared"
    assert (
        f"Warning: --steps follows {script}, so it is passed to the script. Options of `unitrain verify` precede the "
        f"script: unitrain verify --steps ... {script}" in output
    )


def test_float64_converts_data_model_and_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.update({output.dtype, target.dtype})
        return nn.functional.mse_loss(output, target)

    record_run(tmp_path / "a", monkeypatch, float64=True, loss_fn=loss_fn, precision="bf16")
    assert seen == {torch.float64}


def test_digest_of_samples_does_not_depend_on_batches_or_order() -> None:
    inputs, targets = create_samples().tensors
    batch = {"b": [inputs, targets.bool()], "a": targets.to(torch.bfloat16), "names": [str(n) for n in range(24)]}

    def part(selection: slice | Tensor) -> int:
        indices = torch.arange(24)[selection]
        cut = {
            "b": [inputs[selection], targets.bool()[selection]],
            "a": targets.to(torch.bfloat16)[selection],
            "names": [str(n) for n in indices.tolist()],
        }
        return digest_samples(cut, len(indices))

    complete = digest_samples(batch, 24)
    assert complete == part(torch.randperm(24)) == part(slice(0, 7)) + part(slice(7, 24))
    assert complete != part(slice(0, 23)) + part(slice(0, 1))
    changed = {**batch, "names": [*batch["names"][:23], "x"]}  # type: ignore[misc]
    assert digest_samples(changed, 24) != complete
    swapped = digest_samples([inputs, targets.flip(0)], 24)
    assert swapped != digest_samples([inputs, targets], 24), (
        "the digest must depend on the pairing of inputs and targets"
    )
    # Empty containers do not change the digest, regardless of the number of samples.
    for empty in ({}, [], (), {"a": {}}, {"a": [], "b": ()}):
        in_parts = digest_samples([inputs[:7], empty], 7) + digest_samples([inputs[7:], empty], 17)
        assert in_parts == digest_samples([inputs, empty], 24) == digest_samples([inputs], 24)
    # A batch whose samples cannot be identified is digested as a whole.
    graph = [inputs, torch.tensor([[0, 1], [1, 2]])]
    assert digest_samples(graph, 3) == digest_samples(graph, 3) != digest_samples([inputs, inputs], 3)


def test_last_lines_exclude_the_report_of_the_launcher() -> None:
    launcher_output = "[0]<stderr>:Traceback\n[0]<stderr>:\n[0]<stderr>:ValueError: x\n"
    assert last_lines(f"{launcher_output}Process 0 exit with status code 1.\nTraceback\n") == [
        "[0]<stderr>:Traceback",
        "[0]<stderr>:ValueError: x",
    ]
    torchrun = "W1121 12:31:16.246000 28654 torch/distributed/elastic/multiprocessing/api.py:1028] Sending\n"
    assert last_lines(f"ValueError: x\n{torchrun}ChildFailedError") == ["ValueError: x"]
    horovodrun = "Traceback (most recent call last):\nRuntimeError: Horovod\nProcess 0 exit with status code 1."
    assert last_lines(f"[0]<stderr>:ValueError: x\n{horovodrun}") == ["[0]<stderr>:ValueError: x"]
    assert last_lines("Traceback (most recent call last):\nValueError: x")[-1] == "ValueError: x"
    assert last_lines(f"ValueError: x\n{'-' * 74}\nPrimary job  terminated") == ["ValueError: x"]
    assert last_lines("Process 0 exit with status code 1.\n") == ["Process 0 exit with status code 1."]
    assert last_lines("\n".join(map(str, range(40))), max_lines=2) == ["38", "39"]


class _Change(unitrain.Callback):
    """Callback that changes a tensor in place after two steps."""

    def __init__(self, choose: Callable[[Any], Tensor]) -> None:
        self._choose = choose

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 2:
            self._choose(trainer).data.add_(1e-7)


@pytest.mark.parametrize(
    ("choose", "difference"),
    [
        (lambda trainer: trainer.model.module[2].bias, "step 2 is the first with a difference: parameter 2.bias"),
        (
            lambda trainer: trainer.optimizer.state[trainer.model.module[0].weight]["momentum_buffer"],
            "step 2 is the first with a difference: state 0.weight momentum_buffer",
        ),
    ],
    ids=["parameter", "state"],
)
def test_first_step_and_tensor_with_different_bits_are_named(
    choose: Any, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"bits": True, "logical_ranks": 2}
    reference = record_run(tmp_path / "reference", monkeypatch, **settings)
    same = record_run(tmp_path / "same", monkeypatch, **settings)
    changed = record_run(tmp_path / "changed", monkeypatch, callbacks=[_Change(choose)], **settings)
    other_start = record_run(tmp_path / "start", monkeypatch, model_and_optimizer=build_model(seed=1), **settings)
    shorter = record_run(tmp_path / "shorter", monkeypatch, steps=4, **settings)
    assert find_first_difference(same, reference) == ""
    assert find_first_difference(changed, reference) == difference
    assert find_first_difference(other_start, reference).startswith("the initial values of parameter 0.weight differ.")
    assert find_first_difference(shorter, reference) == "the run ended after 4 steps, the reference after 5"


def test_local_sgd_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"differ with local steps\. Leave TrainConfig\.local_sgd out"):
        record_run(tmp_path / "run", monkeypatch, local_sgd=4)


def test_bits_option_requires_logical_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unitrain verify --bits compares runs on different numbers of ranks"):
        record_run(tmp_path / "run", monkeypatch, bits=True)

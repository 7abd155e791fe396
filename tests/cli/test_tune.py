"""`unitrain tune`: search for faster settings, and their use by `unitrain launch`."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from launches import running_launcher
from preload import preloaded
from torch import nn

import unitrain
from unitrain.backends import registry
from unitrain.backends.base import StartOptions
from unitrain.backends.capabilities import Tunable
from unitrain.backends.local import LocalBackend
from unitrain.bootstrap import environment
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.overrides import OVERRIDES_VARIABLE, overrides_setting
from unitrain.cli import unitrain as program
from unitrain.errors import ConfigError, EnvironmentVariableError
from unitrain.testing import RankGroup
from unitrain.tune import trial
from unitrain.tune.search import PAIRS, Gain, SearchResult, list_tunables, measure_ratio, search
from unitrain.tune.trial import TIMER, TrialRequest, TrialResult
from unitrain.tune.tuned_settings import (
    BUILT_IN_VARIABLES,
    TUNED_FILE,
    TunedEntry,
    TunedRun,
    check_file,
    describe_machine,
    find_tuned,
    remove_tuned,
    torch_version,
)
from unitrain.tune.tuning import LOCAL_SGD_CHANGES, Tuner, describe_changes, save_and_describe

SIZES = Tunable("SIZE", "", "1", ("2", "3"))
COLORS = Tunable("COLOR", "", "red", ("green",))


class Machine:
    """A simulated machine. A run takes ten seconds. Noise multiplies a step time by a factor from 1 to 1 + `noise`."""

    def __init__(self, noise: float, seed: int = 0) -> None:
        self.random, self.noise, self.now, self.runs = random.Random(seed), noise, 0.0, 0

    def measure(self, settings: Mapping[str, str]) -> float:
        self.now += 10
        self.runs += 1
        seconds = 1.0
        seconds *= {"1": 1.0, "2": 0.9, "3": 0.8}[settings.get("SIZE", "1")]
        seconds *= {"red": 1.0, "green": 0.9}[settings.get("COLOR", "red")]
        return seconds * self.random.uniform(1, 1 + self.noise)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(5))
def test_best_values_of_all_tunables_are_combined(seed: int) -> None:
    machine = Machine(0.05, seed)
    found = search(machine.measure, [SIZES, COLORS], 1000, clock=machine.clock, seed=seed)
    assert found.settings == {"SIZE": "3", "COLOR": "green"}
    assert found.gain is not None
    assert abs(found.gain.median - 1 / 0.72) < 0.05
    assert len(found.gain.ratios) == PAIRS
    assert machine.now <= 1000


def test_noise_is_not_reported_as_a_gain() -> None:
    irrelevant = Tunable("NAME", "", "0", ("1", "2", "3"))
    false_gains = 0
    for seed in range(200):
        machine = Machine(0.2, seed)
        found = search(machine.measure, [irrelevant], 2000, clock=machine.clock, seed=seed)
        false_gains += bool(found.settings)
    # If noise were the only difference, 7 or more of 8 pairs would favor a setting with a probability of 3.5 %. Few
    # candidates reach this check.
    assert false_gains <= 10


# Noise that depends on time but not on the settings: a function returns the factor of the n-th run.
NOISES: dict[str, Callable[[int], float]] = {
    "every second run": lambda run: 1.0 if run % 2 else 1.02,
    "two of four runs": lambda run: 1.0 if run % 4 in (1, 2) else 1.02,
    "every third run": lambda run: 1.05 if run % 3 == 0 else 1.0,
    "increasing": lambda run: 1.01**run,
    "decreasing": lambda run: 0.99**run,
    "waves": lambda run: 1 + 0.05 * math.sin(run / 2),
}


@pytest.mark.parametrize("noise", NOISES)
def test_time_dependent_noise_gives_at_most_five_percent_false_gains(noise: str) -> None:
    irrelevant = Tunable("NAME", "", "0", ("1", "2", "3"))
    searches = 400
    false_gains = 0
    for seed in range(searches):
        runs = itertools.count()
        found = search(lambda _, runs=runs: NOISES[noise](next(runs)), [irrelevant], 1e9, seed=seed)
        false_gains += bool(found.settings)
    # The expected number is at most 3.5 %, or 14 of 400, with a standard deviation of 3.7.
    assert false_gains <= 0.05 * searches + 5


def test_pairs_are_measured_in_both_orders_with_the_same_ratio() -> None:
    order: list[str] = []

    def seconds(name: str, value: float) -> float:
        order.append(name)
        return value

    generator = random.Random(0)
    ratios = {
        measure_ratio(lambda: seconds("without", 3.0), lambda: seconds("within", 2.0), generator) for _ in range(32)
    }
    assert ratios == {1.5}
    assert {"without", "within"} == set(order[::2]) == set(order[1::2])


def test_search_respects_its_time_limit() -> None:
    machine = Machine(0.0)
    found = search(machine.measure, [SIZES, COLORS], 200, clock=machine.clock)
    assert machine.now <= 200
    assert found.skipped == 1
    assert found.settings == {"SIZE": "3"}
    assert search(machine.measure, [SIZES, COLORS], found.seconds_needed, clock=machine.clock).skipped == 0
    assert search(machine.measure, [], 100, clock=machine.clock).gain is None


def test_gain_is_significant_only_if_the_pairs_agree() -> None:
    assert Gain([1.1] * 7 + [0.9]).is_significant
    assert not Gain([1.1] * 6 + [0.9] * 2).is_significant
    assert not Gain([1.1] * 7).is_significant
    assert not Gain([1.005] * 8).is_significant


def test_consistent_slowdown_is_not_reported_as_noise() -> None:
    assert describe_changes({"compression": "fp16"}, Gain([1.2] * PAIRS)).endswith("Use it if the results may change.")
    assert describe_changes({"compression": "fp16"}, Gain([0.8] * PAIRS)).endswith("Training is slower with it.")
    assert describe_changes({"compression": "fp16"}, Gain([0.8, 1.2] * 4)).endswith(
        "The difference is within the noise."
    )


def test_log_line_with_the_marker_is_not_parsed_as_a_result() -> None:
    result = TrialResult(
        seconds_per_step=0.5, steps=5, backend="ddp", transport="gloo", size=2, num_nodes=1, threads=1, cores_per_rank=1
    )
    output = f"unitrain tune: is running this script\nunitrain tune: {{}}\n[0] {result.format_line()}\n"
    assert TrialResult.parse_output(output) == result
    assert TrialResult.parse_output("unitrain tune: is running this script") is None


def test_only_tunables_of_the_backend_are_searched() -> None:
    assert list_tunables(registry.load("local").tunables, None, 4) == []
    names = {one.variable for one in list_tunables(registry.load("ddp").tunables, None, 4)}
    assert names == {"UNITRAIN_BUCKETS_MB", "UNITRAIN_BUCKET_VIEW"}
    of_horovod = {one.variable: one for one in list_tunables(registry.load("horovod").tunables, 2, 4)}
    assert {"HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", *names, "OMP_NUM_THREADS"} == set(of_horovod)
    assert of_horovod["OMP_NUM_THREADS"].alternatives == ("1", "4", "8")
    # A hierarchical allreduce has no effect on GPUs and with one rank per host.
    on_hosts = {one.variable for one in list_tunables(registry.load("ddp").tunables, 4, 4, shares_hosts=True)}
    assert on_hosts == {*names, "OMP_NUM_THREADS", "UNITRAIN_HIERARCHICAL_ALLREDUCE"}
    of_gpus = {one.variable for one in list_tunables(registry.load("ddp").tunables, None, 4, shares_hosts=True)}
    assert of_gpus == names
    for one in of_horovod.values():
        assert one.default not in one.alternatives


def horovod_settings(backend: unitrain.Backend) -> tuple[str | None, ...]:
    return tuple(environment.get_variable(name) for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"))


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, ("0.5", "16777216")),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, ("0.5", "0")),
        ({"HOROVOD_AUTOTUNE": "1"}, (None,) * 2),
    ],
    ids=["default", "set by the user", "set by autotune"],
)
def test_user_settings_and_autotune_override_the_defaults(
    variables: dict[str, str], settings: tuple[str | None, ...]
) -> None:
    with RankGroup("horovod", 1, variables=preloaded(variables)) as group:
        assert group.run(horovod_settings) == [settings]


def compute_gradients(backend: unitrain.Backend) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512, bias=False) for _ in range(3)]  # each layer has 1 MiB
    model = backend.distributed_model(nn.Sequential(*layers))
    for _ in range(3):  # DDP rebuilds its buckets after the first backward pass
        model.zero_grad()
        model(torch.full((1, 512), 1.0 + backend.rank)).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    buckets = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
    return found, len(buckets.split(","))


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_bucket_settings_change_the_buckets_but_not_the_gradients(backend: str) -> None:
    settings = {"UNITRAIN_BUCKETS_MB": "1,1", "UNITRAIN_BUCKET_VIEW": "0"}
    with RankGroup(backend, 2) as plain, RankGroup(backend, 2, variables=preloaded(settings)) as small:
        (expected, few), _ = plain.run(compute_gradients)
        (found, many), _ = small.run(compute_gradients)
    assert (few, many) == (2, 3)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("text", ["25", "0,25", "a,b", "1,2,3"])
def test_invalid_bucket_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from unitrain.backends.gradients.ddp_wrapper import read_bucket_settings

    monkeypatch.setenv("UNITRAIN_BUCKETS_MB", text)
    with pytest.raises(
        EnvironmentVariableError, match=r"MiB of the first gradient bucket .* Use UNITRAIN_BUCKETS_MB=1,25$"
    ):
        read_bucket_settings()


def test_invalid_hierarchical_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from unitrain.backends.gradients.hierarchical_group import selects_hierarchical_allreduce

    monkeypatch.setenv("UNITRAIN_HIERARCHICAL_ALLREDUCE", "yes")
    with pytest.raises(EnvironmentVariableError, match=r"must be 1 or 0, got 'yes'. Use UNITRAIN_HIERARCHICAL"):
        selects_hierarchical_allreduce(torch.device("cpu"))
    monkeypatch.setenv("UNITRAIN_HIERARCHICAL_ALLREDUCE", "1")
    assert selects_hierarchical_allreduce(torch.device("cpu"))
    with pytest.raises(EnvironmentVariableError, match=r"requires ranks that compute on CPUs, but this rank uses cuda"):
        selects_hierarchical_allreduce(torch.device("cuda"))


def create_entry(script: Path | str, size: int = 2, **others: object) -> TunedEntry:
    run = asdict(TunedRun.on_this_machine(str(script), ("--epochs", "3 0"), "ddp", size, 1))
    found = {"variables": {"OMP_NUM_THREADS": "1", "UNITRAIN_BUCKETS_MB": "5,5"}, "gain": 1.2, "spread": (1.1, 1.3)}
    return TunedEntry(**{**run, **found, **others})


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("UNITRAIN_BACKEND", "OMP_NUM_THREADS", "UNITRAIN_BUCKETS_MB"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").touch()
    return tmp_path / "train.py"


def plan_launch(*options: str, args: Sequence[str] = ("--epochs", "3 0")) -> Result:
    result = CliRunner().invoke(program, ["launch", "--dry-run", *options, "train.py", *args])
    assert result.exit_code == 0, result.output
    return result


def test_launch_uses_and_prints_the_settings_saved_for_a_run(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_entry(script).save()
    create_entry(script, size=3).save()
    create_entry(script).save()
    found = plan_launch("-np", "2")
    assert "UNITRAIN_BUCKETS_MB=5,5" in found.stdout
    assert found.stderr.splitlines()[0] == (
        "unitrain: unitrain-tuned.json sets OMP_NUM_THREADS=1 UNITRAIN_BUCKETS_MB=5,5: without these settings a step "
        "took 1.20 times as long. Ignore the file with: --untuned"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = plan_launch("-np", "2")
    assert "OMP_NUM_THREADS" not in found.output, "variables set by the user must take precedence"
    found = plan_launch("-np", "2", "-x", "UNITRAIN_BUCKETS_MB=1,1")
    assert "UNITRAIN_BUCKETS_MB=... " in found.stdout
    assert TUNED_FILE.name not in found.stderr, "the tuned settings must not be used"
    for options in (["-np", "4"], ["-np", "2", "--backend", "horovod"], ["-np", "2", "--untuned"]):
        found = plan_launch(*options)
        assert "BUCKETS" not in found.output
        assert TUNED_FILE.name not in found.stderr
    run = TunedRun.on_this_machine("train.py", ("--epochs", "3 0"), "ddp", 2, 1)
    remove_tuned(run)
    assert find_tuned(run) == (None, [])
    assert find_tuned(replace(run, num_processes=3)) == (create_entry(script, size=3), [])
    TUNED_FILE.write_text("[{}]")
    result = CliRunner().invoke(program, ["launch", "--dry-run", "train.py"])
    assert "unitrain-tuned.json cannot be read" in result.output
    with pytest.raises(ConfigError, match="Delete it"):
        find_tuned(run)


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"torch": "2.1.0"}, f"they were found with torch 2.1.0, and torch {torch_version()} is installed"),
        (
            {"machine": "a CPU, 64 cores"},
            f"they were found on another machine (a CPU, 64 cores), and this machine is: {describe_machine()}",
        ),
        ({"num_nodes": 2}, "they were found on 2 hosts, and this run is on 1"),
        ({"args": ()}, "they were found with no arguments, and this run has the arguments \"--epochs '3 0'\""),
        (
            {"args": ("--batch-size", "8"), "torch": "2.1.0"},
            (
                "they were found with the arguments '--batch-size 8', and this run has the arguments "
                f"\"--epochs '3 0'\"; they were found with torch 2.1.0, and torch {torch_version()} is installed"
            ),
        ),
    ],
    ids=str,
)
def test_settings_for_another_torch_machine_host_count_or_arguments_are_not_used(
    recorded: dict[str, object], message: str, script: Path
) -> None:
    create_entry(script, **recorded).save()
    found = plan_launch("-np", "2")
    assert "BUCKETS" not in found.output
    assert found.stderr.splitlines()[0] == (
        f"unitrain: The settings in unitrain-tuned.json are not used: {message}. Find new ones with: unitrain tune, or "
        "delete the file"
    )
    create_entry(script).save()
    assert "UNITRAIN_BUCKETS_MB=5,5" in plan_launch("-np", "2").stdout, (
        "the entry of this run must be found among other entries"
    )


def test_settings_of_an_earlier_version_are_not_used(script: Path) -> None:
    entry = {"script": "train.py", "backend": "ddp", "num_processes": 2, "variables": {"OMP_NUM_THREADS": "1"}}
    TUNED_FILE.write_text(json.dumps([{**entry, "gain": 1.2, "spread": [1.1, 1.3], "torch": torch_version()}]))
    found = plan_launch("-np", "2", args=())
    assert (
        "they were found by an earlier version of unitrain, which did not record the arguments and the machine"
        in found.stderr
    )
    assert "sets OMP_NUM_THREADS" not in found.stderr
    remove_tuned(TunedRun.on_this_machine("train.py", (), "ddp", 2, 1))
    assert json.loads(TUNED_FILE.read_text()) == []


def test_settings_with_a_significant_gain_are_saved_for_the_timed_run(script: Path) -> None:
    run = TunedRun.on_this_machine("train.py", ("--epochs", "3 0"), "ddp", 2, 1)
    gain = Gain([1.2] * PAIRS)
    summary = save_and_describe(SearchResult({"UNITRAIN_BUCKETS_MB": "5,5"}, gain), run)
    assert "Saved in unitrain-tuned.json." in summary
    assert "UNITRAIN_BUCKETS_MB=5,5" in plan_launch("-np", "2").stdout
    assert "are not used" in plan_launch("-np", "2", args=("--epochs", "4")).stderr
    save_and_describe(SearchResult({}, None), run)
    assert json.loads(TUNED_FILE.read_text()) == []


def test_file_that_sets_variables_other_than_tunables_is_refused(script: Path) -> None:
    """Someone else may have written the file."""
    for name in ("LD_PRELOAD", "PYTHONPATH", "PATH", "NCCL_NET_PLUGIN", "UNITRAIN_SUPERVISOR"):
        create_entry(script, size=1, args=(), variables={name: "x"}).save()
        result = CliRunner().invoke(program, ["launch", "--dry-run", "train.py"])
        assert result.exit_code == 2
        assert f"unitrain-tuned.json sets {name}, which is not a setting that unitrain tune changes" in result.output
        assert CliRunner().invoke(program, ["launch", "--dry-run", "--untuned", "train.py"]).exit_code == 0
    assert {
        tunable.variable for name in ("ddp", "horovod") for tunable in registry.load(name).tunables
    } < BUILT_IN_VARIABLES


def test_command_tunes_a_script(tmp_path: Path) -> None:
    script = tmp_path / "digits.py"
    shutil.copy(Path(__file__).parents[2] / "examples" / "digits.py", script)
    command = [sys.executable, "-m", "unitrain", "tune", "--minutes", "0.001", "--seconds", "0.1"]
    with running_launcher([*command, "--launch", "-np 2 --backend horovod", str(script), "--device", "cpu"]) as launch:
        output = launch.output()
        assert launch.find_processes() == []
    assert f"{script} on 2 ranks of horovod over " in output
    assert "No settings are significantly faster" in output
    assert "were not tried for lack of time" in output


def test_local_steps_are_timed_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete periods of 25 steps are timed. A run fails if its settings are incompatible with each other."""
    script = tmp_path / "digits.py"
    shutil.copy(Path(__file__).parents[2] / "examples" / "digits.py", script)
    options, reported = ("-np", "2", "--backend", "ddp"), []
    args = ("--device", "cpu")
    tuner = Tuner(options, str(script), args, step_seconds=0.01, timeout_seconds=120, folder=tmp_path)
    for name, value in preloaded({}).items():
        monkeypatch.setenv(name, value)
    for changes in LOCAL_SGD_CHANGES[1:]:
        result = tuner.run({}, changes)
        assert (result.size, result.steps) == (2, 25)
        reported.append(describe_changes(changes, Gain([1.2] * PAIRS)).partition(": ")[0])
    assert reported == [
        'TrainConfig(local_sgd=LocalSGDConfig(steps=25, outer_lr=0.7, outer_momentum=0.9, compression="int8"))',
        "TrainConfig(local_sgd=LocalSGDConfig(steps=25, outer_lr=0.7, outer_momentum=0.9, fragments=5, "
        "overlap_steps=5))",
    ]
    with pytest.raises(ConfigError, match="sync_batch_norm"):
        tuner.run({}, {**LOCAL_SGD_CHANGES[0], "sync_batch_norm": True})


@pytest.mark.parametrize("size", [1, 2])
def test_low_communication_training_is_compared_and_a_failed_run_is_reported(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the simulated runs, local steps halve the step time, and fragments raise an error."""
    monkeypatch.chdir(tmp_path)

    class SimulatedTuner(Tuner):
        def run(self, variables: Mapping[str, str], changes: Mapping[str, Any] | None = None) -> TrialResult:
            local_sgd = (changes or {}).get("local_sgd", {})
            if "compression" in (changes or {}):
                raise ConfigError("the parameters are sharded")
            if "fragments" in local_sgd:
                raise ConfigError("no fragments")
            return TrialResult(
                seconds_per_step=0.5 if local_sgd else 1.0, steps=25, backend="ddp", transport="gloo", size=size,
                num_nodes=1, threads=None, cores_per_rank=1,
            )  # fmt: skip

    lines: list[str] = []
    tuner = SimulatedTuner((), "train.py", (), step_seconds=1, timeout_seconds=60, folder=tmp_path)
    tuner.tune(1e-9, with_compression=True, with_local_sgd=True, report=lines.append, report_run=print)
    failed = [f'TrainConfig(compression="{kind}"): not timed. the parameters are sharded' for kind in ("fp16", "bf16")]
    if size == 1:
        single = "Low-communication training was not timed, because a single rank does not communicate."
        assert lines[2:] == [single, *failed]
        return
    diloco = "steps=25, outer_lr=0.7, outer_momentum=0.9"
    gain = f"a factor of 2.000 (between 2.000 and 2.000 in {PAIRS} pairs). Use it if the results may change."
    assert lines[2:] == [
        *failed,
        f"TrainConfig(local_sgd=LocalSGDConfig({diloco})): {gain}",
        f'TrainConfig(local_sgd=LocalSGDConfig({diloco}, compression="int8")): {gain}',
        f"TrainConfig(local_sgd=LocalSGDConfig({diloco}, fragments=5, overlap_steps=5)): not timed. no fragments",
    ]


@pytest.mark.parametrize(("steps", "timed"), [(1, 5), (3, 6), (6, 6), (8, None)])
def test_timed_steps_are_complete_periods_of_local_steps(
    steps: int, timed: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the warm-up, 7 of 16 steps remain."""
    expected = SystemExit if timed is not None else ConfigError
    with pytest.raises(expected) as raised:
        train_16_steps(monkeypatch, 9, {"local_sgd": {"steps": steps}})
    if timed is None:
        assert "timing needs 17" in str(raised.value)
        return
    result = trial.TrialResult.parse_output(capsys.readouterr().out)
    assert result is not None
    assert result.steps == timed


@pytest.mark.parametrize(("warmup", "period", "timed"), [(9, 3, 6), (9, 1, 7), (2, 4, 12), (11, 3, None), (8, 8, 8)])
def test_a_run_that_ends_early_is_timed_to_the_end_of_the_last_complete_period(
    warmup: int, period: int, timed: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An incomplete period contains no synchronization. Each forward pass takes 1 s on a simulated clock, except that
    of the validation at the end, which takes 1,000 s."""
    now = 0.0

    class Model(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += 1 if self.training else 1000
            return super().forward(inputs)

    monkeypatch.setattr("unitrain.tune.timer.time", SimpleNamespace(perf_counter=lambda: now))
    data = torch.utils.data.TensorDataset(torch.randn(4, 4), torch.randn(4, 1))
    changes = {"local_sgd": {"steps": period}}
    with pytest.raises(SystemExit if timed is not None else ConfigError) as raised:
        train_16_steps(monkeypatch, warmup, changes, validation=data, model=Model(4, 1), seconds=1e9)
    if timed is None:
        assert "timing needs 17" in str(raised.value)
        return
    result = trial.TrialResult.parse_output(capsys.readouterr().out)
    assert result is not None
    assert (result.steps, result.seconds_per_step) == (timed, 1.0)


def test_the_synchronous_warmup_of_local_sgd_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: list[int] = []

    class Settings(unitrain.Callback):
        def on_fit_start(self, trainer: unitrain.Trainer) -> None:
            assert isinstance(trainer.config.local_sgd, unitrain.LocalSGDConfig)
            settings.append(trainer.config.local_sgd.warmup_steps)

    with pytest.raises(SystemExit):
        train_16_steps(
            monkeypatch, 2, local_sgd=unitrain.LocalSGDConfig(steps=3, warmup_steps=1000), callback=Settings()
        )
    assert settings == [0]
    result = trial.TrialResult.parse_output(capsys.readouterr().out)
    assert result is not None
    assert result.steps == 6


def test_validation_of_a_timed_run_is_limited_to_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []

    class Validation(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            return torch.randn(4), torch.randn(1)

    with pytest.raises(ConfigError, match="timing needs"):
        train_16_steps(monkeypatch, 12, validation=Validation())
    assert loaded == [0, 1, 2, 3]


def train_16_steps(
    monkeypatch: pytest.MonkeyPatch,
    warmup: int,
    changes: Mapping[str, object] | None = None,
    *,
    dry_run: bool = False,
    validation: Any = None,
    model: nn.Module | None = None,
    seconds: float = 1e-9,
    local_sgd: unitrain.LocalSGDConfig | None = None,
    callback: unitrain.Callback | None = None,
) -> None:
    """Train for 16 steps in this process, with a timer that measures about `seconds`, but at least 5 steps, after
    `warmup` steps."""
    request = TrialRequest(name="run", warmup_steps=warmup, seconds=seconds, changes=changes or {}).serialize()
    monkeypatch.setenv(OVERRIDES_VARIABLE, overrides_setting(TIMER, request))
    model = model or nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    config = unitrain.TrainConfig(max_epochs=1, batch_size=4, dry_run=dry_run, local_sgd=local_sgd)
    backend = LocalBackend.start(StartOptions(RankInfo("none", 0, 1, 0), device="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        unitrain.Trainer(
            model, optimizer, nn.MSELoss(), backend=backend, config=config, callbacks=[callback] if callback else []
        ).fit(data, validation)
    finally:
        backend.shutdown()


@pytest.mark.parametrize("warmup", [12, 20])
def test_run_that_is_too_short_is_rejected(warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    message = rf"^The run ended after 16 steps, but timing needs {warmup + 5}\. Train longer, "
    with pytest.raises(ConfigError, match=message):
        train_16_steps(monkeypatch, warmup)


def test_steps_of_a_dry_run_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_16_steps(monkeypatch, warmup=2, dry_run=True)
    result = trial.TrialResult.parse_output(capsys.readouterr().out)
    assert result is not None
    assert result.steps == 5


def test_cores_per_rank_are_determined_by_the_cpu_affinity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2, 3, 5})
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    with pytest.raises(SystemExit):
        train_16_steps(monkeypatch, warmup=2)
    result = trial.TrialResult.parse_output(capsys.readouterr().out)
    assert result is not None
    assert result.cores_per_rank == 3


def test_failed_run_is_reported_with_its_output(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no data')")
    command = [sys.executable, "-m", "unitrain", "tune", "--launch", "-np 1", str(script)]
    with running_launcher(command) as launch:
        output = launch.output()
    assert launch.process.returncode == 1
    assert (
        "With the default settings, the run ended with exit code 1 before enough steps were timed. Its last lines:"
        in output
    )
    assert "ValueError: no data" in output


@pytest.mark.parametrize(
    "content",
    [
        '{"script": "train.py"}',
        '["train.py"]',
        '[{"script": 1, "backend": "ddp", "num_processes": 1, "variables": {}, "gain": 1, "spread": [1, 1]}]',
        '[{"script": "a.py", "backend": "ddp", "num_processes": 1, "variables": [], "gain": 1, "spread": [1, 1]}]',
        '[{"script": "a.py", "backend": "ddp", "num_processes": 1, "variables": {"A": 1}, "gain": 1, "spread": [1]}]',
        '[{"script": "a.py", "backend": "ddp", "num_processes": 1, "variables": {}, "gain": "x", "spread": [1, 1]}]',
        '[{"script": "a.py", "backend": "ddp", "num_processes": 1, "variables": {}, "gain": 1, "args": [1]}]',
        '[{"script": "a.py", "backend": "ddp", "num_processes": 1, "variables": {}, "gain": 1, "num_nodes": "x"}]',
        '[{"script": "a\\u0000", "backend": "ddp", "num_processes": 1, "variables": {}, "gain": 1, "spread": [1, 1]}]',
        "[" * 100_000,
    ],
    ids=["object", "strings", "script", "variables", "variable", "gain", "args", "nodes", "null character", "deep"],
)
def test_file_with_invalid_content_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "unitrain-tuned.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot be read: .*\. Delete it and run `unitrain tune` again"):
        find_tuned(TunedRun.on_this_machine("train.py", (), "ddp", 1, 1), file)


@pytest.mark.parametrize(
    "fields",
    [
        *({"variables": {"OMP_NUM_THREADS": value}} for value in ("-5", "", "two", "1\n2", "1\0", "9" * 40)),
        {"variables": {"MY_SETTING": "\x1b[31m"}},
        *({"gain": value} for value in (10**400, float("nan"), -1, True, None)),
        *({"spread": value} for value in (None, 1, [1], ["a", "b"], [1, float("inf")])),
        {"torch": 2.6},
        {"machine": ["x"]},
        {"args": "--lr 1"},
    ],
    ids=str,
)
def test_entry_with_an_invalid_value_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "unitrain-tuned.json"
    valid = {
        "script": "train.py", "backend": "ddp", "num_processes": 1, "variables": {"OMP_NUM_THREADS": "2"}, "gain": 1.2,
        "spread": [1.1, 1.3], "torch": "2.6", "args": ["--lr", "1"], "num_nodes": 1, "machine": "x",
    }  # fmt: skip
    run = TunedRun.on_this_machine("train.py", (), "ddp", 1, 1)
    file.write_text(json.dumps([valid]))
    find_tuned(run, file)
    file.write_text(json.dumps([{**valid, **fields}]))
    with pytest.raises(ConfigError, match=r"cannot be read: .*\. Delete it and run `unitrain tune` again"):
        find_tuned(run, file)


def test_file_that_is_a_fifo_or_device_is_refused(script: Path) -> None:
    """Another user may create such a file in a shared folder. Reading a FIFO blocks, and /dev/zero fills the memory."""
    os.mkfifo(TUNED_FILE)
    for _ in range(2):
        result = CliRunner().invoke(program, ["launch", "--dry-run", "train.py"])
        assert "unitrain-tuned.json cannot be read" in result.output
        assert "is not a regular file" in result.output
        TUNED_FILE.unlink()
        TUNED_FILE.symlink_to("/dev/zero")


def test_saving_replaces_a_symbolic_link_but_not_its_target(script: Path) -> None:
    target = script.with_name("precious")
    target.write_text("[]")
    for link in (TUNED_FILE, TUNED_FILE.with_name(f"{TUNED_FILE.name}.new")):
        link.symlink_to(target)
        create_entry(script).save()
        assert target.read_text() == "[]"
        assert not TUNED_FILE.is_symlink()
        assert json.loads(TUNED_FILE.read_text())[0]["script"] == str(script)


def test_file_that_cannot_be_written_is_reported_before_the_search(script: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be written: .*Run `unitrain tune` in a folder that you can write to"
    ):
        check_file(Path("/proc/unitrain-tuned.json"))
    with pytest.raises(ConfigError, match="cannot be written"):
        create_entry(script).save(Path("/proc/unitrain-tuned.json"))
    TUNED_FILE.write_text("x")
    tuner = Tuner((), str(script), (), step_seconds=1, timeout_seconds=60, folder=script.parent)
    with pytest.raises(ConfigError, match="cannot be read"):
        tuner.tune(60, with_compression=False, report=print, report_run=print)
    assert tuner.runs == 0

"""The examples print the same results under every launcher and backend."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import logger_output
import pytest
import torch
from hosts import Host
from launches import running_launcher
from requirements import needs_hosts
from safetensors.torch import load_file
from small_mnist import small_mnist

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
BACKENDS = ("ddp", "horovod")


def launcher_command(backend: str, script: str, *arguments: str | Path, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command that starts an example on two ranks, as in the docstring of the example."""
    if backend == "ddp":
        start = ["torchrun", "--standalone", "--nproc-per-node", "2", *options, EXAMPLES / script]
    else:
        start = ["horovodrun", "-np", "2", sys.executable, EXAMPLES / script]
    return [str(BIN / str(start[0])), *map(str, start[1:]), "--backend", backend, *map(str, arguments)]


def run(command: list[str]) -> str:
    """Run a command, and return its output without the prefixes that horovodrun adds to lines."""
    with running_launcher(command, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    # horovodrun forwards incomplete lines, so a prefix may be within a line. It is [1,0] with MPI, and [0] without.
    return re.sub(r"\[(1,)?\d\]<(stdout|stderr)>:", "", output)


def read_results(output: str) -> list[float]:
    """Return the numbers in the line of results, which exactly one rank prints."""
    (line,) = re.findall(r"final((?: \w+=\d+\.\d+)+)", output)
    return [float(number) for number in re.findall(r"=(\d+\.\d+)", line)]


def test_digits_prints_the_same_results_under_each_launcher() -> None:
    options = ["--device", "cpu", "--epochs", "2"]
    commands = [
        [str(BIN / "unitrain"), "launch", "-np", "2", str(EXAMPLES / "digits.py"), *options],
        *(launcher_command(backend, "digits.py", *options) for backend in BACKENDS),
    ]
    expected, *others = [read_results(run(command)) for command in commands]
    assert others == [expected] * len(others)


@pytest.mark.ci
def test_digits_reaches_97_percent_accuracy() -> None:
    command = [str(BIN / "unitrain"), "launch", "-np", "2", str(EXAMPLES / "digits.py"), "--device", "cpu"]
    accuracy, _ = read_results(run(command))
    assert accuracy >= 0.97


@needs_hosts
@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
def test_hierarchical_prints_the_same_results_as_digits_on_two_hosts(two_hosts: list[Host], backend: str) -> None:
    launch = [sys.executable, "-m", "unitrain", "launch"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    hosts = ["-H", "h1:2,h2:1", "--backend", backend]
    done = two_hosts[0].run([*launch, *hosts, str(EXAMPLES / "hierarchical.py"), "--epochs", "3"], variables)
    assert done.returncode == 0, done.stdout
    command = [*launch, "-np", "3", str(EXAMPLES / "digits.py"), "--epochs", "3", "--device", "cpu"]
    # Hierarchical and flat allreduces add in different orders.
    assert read_results(done.stdout) == pytest.approx(read_results(run(command)), abs=2e-3)


@pytest.mark.nightly
def test_mnist_writes_the_same_files_if_it_resumes_on_another_backend(tmp_path: Path) -> None:
    data, uninterrupted, resumed = small_mnist(tmp_path / "data"), tmp_path / "uninterrupted", tmp_path / "resumed"
    for output, backend, epochs, *more in (
        (uninterrupted, "ddp", "3"),
        (resumed, "ddp", "1", "--wandb"),
        (resumed, "horovod", "3", "--wandb", "--resume"),
    ):
        arguments = ("--data", data, "--output", output, "--epochs", epochs, "--batch-size", "16", "--device", "cpu")
        accuracy, _ = read_results(run(launcher_command(backend, "mnist.py", *arguments, *more)))
    accuracies = json.loads((uninterrupted / "accuracies.json").read_text())
    assert json.loads((resumed / "accuracies.json").read_text()) == accuracies
    assert len(accuracies) == 3
    assert accuracies[-1] == pytest.approx(accuracy, abs=1e-4)
    assert accuracy >= 0.7
    model, other = (torch.load(folder / "model.pt", weights_only=True) for folder in (uninterrupted, resumed))
    assert all(torch.equal(other[name], tensor) for name, tensor in model.items())

    starts = logger_output.wandb_starts(resumed)
    (name, records), again = starts
    assert again[0] == name  # the ID of the run
    (started,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    config = {item.key: item.value_json for item in started.config.update}
    assert (started.project, config["learning_rate"], config["size"]) == ("mnist", "0.001", "2")
    points = {(name, step): value for name, step, value in logger_output.from_wandb(resumed)}
    assert [points["val_accuracy", 16 * epoch] for epoch in (1, 2, 3)] == pytest.approx(accuracies)
    assert len(list(resumed.glob("wandb/offline-run-*/files/media/images/test/*.png"))) == 3 * 8
    items = [item for _, records in starts for one in records for item in one.history.item]
    captions = [json.loads(item.value_json) for item in items if list(item.nested_key) == ["test/0", "caption"]]
    assert len(captions) == 3
    assert all(re.fullmatch(r"a \d, predicted \d", caption) for caption in captions)


def test_sharding_prints_every_sample_once() -> None:
    ddp, horovod = (run(launcher_command(backend, "sharding.py", "--samples", "11")) for backend in BACKENDS)
    shown = re.findall(r"^(?:training|evaluation|  rank|  each|mean).*$", ddp, flags=re.MULTILINE)
    assert re.findall(r"^(?:training|evaluation|  rank|  each|mean).*$", horovod, flags=re.MULTILINE) == shown
    assert [line for line in shown if line.startswith("  each")] == ["  each exactly once: yes"] * 3
    orders = [line for line in shown if line.startswith("  rank 0")]
    assert len(orders) == len(set(orders)) == 3  # orders of two epochs and of the evaluation
    assert shown[-1].startswith("mean of all numbers 5.0000;")


@pytest.mark.nightly
def test_gpt_prints_the_same_results_on_each_backend() -> None:
    arguments = ("--device", "cpu", "--steps", "20", "--global-batch-size", "16")
    train_loss, val_loss = alone = read_results(run([sys.executable, str(EXAMPLES / "gpt.py"), *arguments]))
    assert 1.0 < train_loss < 4.2  # random guessing has a loss of log(97) = 4.57 per character
    assert 1.0 < val_loss < 3.7
    for backend in BACKENDS:
        assert read_results(run(launcher_command(backend, "gpt.py", *arguments))) == pytest.approx(alone, abs=3e-4)


def test_contrastive_loss_over_all_ranks_equals_that_of_one_process() -> None:
    arguments = ("--device", "cpu", "--epochs", "3", "--batch-size")
    alone = read_results(run([sys.executable, str(EXAMPLES / "contrastive.py"), *arguments, "128"]))
    assert alone[0] >= 0.85
    for backend in BACKENDS:
        found = read_results(run(launcher_command(backend, "contrastive.py", *arguments, "64")))
        assert found == pytest.approx(alone, abs=3e-3)
        assert found[1] == pytest.approx(alone[1], abs=3e-4)


@pytest.mark.nightly
def test_episodes_prints_the_same_results_on_each_backend() -> None:
    arguments = ("--device", "cpu", "--epochs", "3", "--episodes", "96", "--update-every", "32", "--workers", "1")
    accuracy, val_loss = ddp = read_results(run(launcher_command("ddp", "episodes.py", *arguments)))
    assert accuracy >= 0.7  # random moves have an accuracy of 0.5
    assert val_loss < 0.76
    assert read_results(run(launcher_command("horovod", "episodes.py", *arguments))) == pytest.approx(ddp, abs=3e-4)


@pytest.mark.nightly
def test_gan_prints_the_same_results_on_each_backend() -> None:
    arguments = ("--device", "cpu", "--epochs", "3")
    critic, generator = ddp = read_results(run(launcher_command("ddp", "gan.py", *arguments)))
    assert 0.05 < critic < 0.69  # random guessing has a loss of 0.69
    assert generator > 0.69
    assert read_results(run(launcher_command("horovod", "gan.py", *arguments))) == pytest.approx(ddp, abs=3e-4)


def test_snapshots_resumes_after_a_failure_and_on_another_backend(tmp_path: Path) -> None:
    uninterrupted, restarted, switched = (
        tmp_path / f"{name}.pt" for name in ("uninterrupted", "restarted", "switched")
    )
    epochs = ("--device", "cpu", "--epochs", "4")
    expected = run(launcher_command("ddp", "snapshots.py", "--snapshot", uninterrupted, *epochs))
    assert "resuming" not in expected

    failing = ("--snapshot", restarted, *epochs, "--fail-in-epoch", "3")
    output = run(launcher_command("ddp", "snapshots.py", *failing, options=("--max-restarts", "1")))
    assert "fails in epoch 3" in output  # printed by the first attempt
    assert f"resuming from '{restarted}' after epoch 2" in output
    assert read_results(output) == read_results(expected)

    run(launcher_command("horovod", "snapshots.py", "--snapshot", switched, "--device", "cpu", "--epochs", "1"))
    output = run(launcher_command("horovod", "snapshots.py", "--snapshot", switched, *epochs))
    assert f"resuming from '{switched}' after epoch 1" in output
    assert read_results(output) == read_results(expected)


@pytest.mark.ci
def test_huggingface_prints_the_same_results_on_each_backend_and_saves_the_model(tmp_path: Path) -> None:
    arguments = ("--steps", "6", "--samples", "120", "--device", "cpu")
    alone = run([sys.executable, str(EXAMPLES / "huggingface.py"), "--backend", "local", *arguments])
    outputs = [
        run(launcher_command(backend, "huggingface.py", *arguments, "--output", tmp_path / backend))
        for backend in BACKENDS
    ]
    for output in outputs:
        assert read_results(output) == pytest.approx(read_results(alone), abs=2e-3)
    models = [load_file(tmp_path / backend / "model.safetensors") for backend in BACKENDS]
    assert models[0].keys() == models[1].keys()
    assert "model.embed_tokens.weight" in models[0]
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], rtol=0, atol=1e-5)

"""The examples as their reader starts them: whatever launcher and backend they run on, they print the same numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import logger_output
import pytest
import torch
from launches import started
from small_mnist import small_mnist

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
BACKENDS = ("ddp", "horovod")


def by_hand(backend: str, script: str, *arguments: str | Path, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command that starts an example on two ranks, as its first lines say."""
    if backend == "ddp":
        start = ["torchrun", "--standalone", "--nproc-per-node", "2", *options, EXAMPLES / script]
    else:
        start = ["horovodrun", "-np", "2", sys.executable, EXAMPLES / script]
    return [str(BIN / str(start[0])), *map(str, start[1:]), "--backend", backend, *map(str, arguments)]


def run(command: list[str]) -> str:
    """Return what was printed, without the marks that horovodrun sets before the lines of a rank."""
    with started(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    # A mark may come before the end of the line before its own: it passes on what it has read so far.
    # Without MPI, Horovod writes [0] and not [1,0].
    return re.sub(r"\[(1,)?\d\]<(stdout|stderr)>:", "", output)


def final(output: str) -> list[float]:
    """Return the numbers of the line in which one rank, and no other, tells the result."""
    (line,) = re.findall(r"final((?: \w+=\d+\.\d+)+)", output)
    return [float(number) for number in re.findall(r"=(\d+\.\d+)", line)]


def test_digits() -> None:
    commands = [
        [str(BIN / "unitrain"), "launch", "-np", "2", str(EXAMPLES / "digits.py"), "--device", "cpu"],
        *(by_hand(backend, "digits.py", "--device", "cpu") for backend in BACKENDS),
    ]
    expected, *others = [final(run(command)) for command in commands]
    assert others == [expected] * len(others)
    accuracy, _ = expected
    assert accuracy >= 0.97


@pytest.mark.nightly
def test_mnist_leaves_the_same_when_it_goes_on_on_another_backend(tmp_path: Path) -> None:
    data, whole, parts = small_mnist(tmp_path / "data"), tmp_path / "whole", tmp_path / "parts"
    for output, backend, epochs, *more in (
        (whole, "ddp", "3"),
        (parts, "ddp", "1", "--wandb"),
        (parts, "horovod", "3", "--wandb", "--resume"),
    ):
        arguments = ("--data", data, "--output", output, "--epochs", epochs, "--batch-size", "16", "--device", "cpu")
        accuracy, _ = final(run(by_hand(backend, "mnist.py", *arguments, *more)))
    accuracies = json.loads((whole / "accuracies.json").read_text())
    assert json.loads((parts / "accuracies.json").read_text()) == accuracies
    assert len(accuracies) == 3
    assert accuracies[-1] == pytest.approx(accuracy, abs=1e-4)
    assert accuracy >= 0.7
    model, other = (torch.load(folder / "model.pt", weights_only=True) for folder in (whole, parts))
    assert all(torch.equal(other[name], tensor) for name, tensor in model.items())

    starts = logger_output.wandb_starts(parts)
    (name, records), again = starts
    assert again[0] == name  # the id of the run
    (started,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    config = {item.key: item.value_json for item in started.config.update}
    assert (started.project, config["learning_rate"], config["size"]) == ("mnist", "0.001", "2")
    points = {(name, step): value for name, step, value in logger_output.from_wandb(parts)}
    assert [points["val_accuracy", 16 * epoch] for epoch in (1, 2, 3)] == pytest.approx(accuracies)
    assert len(list(parts.glob("wandb/offline-run-*/files/media/images/test/*.png"))) == 3 * 8
    items = [item for _, records in starts for one in records for item in one.history.item]
    captions = [json.loads(item.value_json) for item in items if list(item.nested_key) == ["test/0", "caption"]]
    assert len(captions) == 3
    assert all(re.fullmatch(r"a \d, predicted \d", caption) for caption in captions)


def test_sharding_shows_every_sample_once() -> None:
    ddp, horovod = (run(by_hand(backend, "sharding.py", "--samples", "11")) for backend in BACKENDS)
    shown = re.findall(r"^(?:training|evaluation|  rank|  each|mean).*$", ddp, flags=re.MULTILINE)
    assert re.findall(r"^(?:training|evaluation|  rank|  each|mean).*$", horovod, flags=re.MULTILINE) == shown
    assert [line for line in shown if line.startswith("  each")] == ["  each exactly once: yes"] * 3
    orders = [line for line in shown if line.startswith("  rank 0")]
    assert len(orders) == len(set(orders)) == 3  # two epochs and the evaluation
    assert shown[-1].startswith("mean of all numbers 5.0000;")


@pytest.mark.nightly
def test_gpt_learns_alike() -> None:
    arguments = ("--device", "cpu", "--steps", "20", "--global-batch-size", "16")
    train_loss, val_loss = alone = final(run([sys.executable, str(EXAMPLES / "gpt.py"), *arguments]))
    assert 1.0 < train_loss < 4.2  # guessing costs log(97) = 4.57 per character
    assert 1.0 < val_loss < 3.7
    for backend in BACKENDS:
        assert final(run(by_hand(backend, "gpt.py", *arguments))) == pytest.approx(alone, abs=3e-4)


def test_a_contrastive_loss_of_all_ranks_is_that_of_one_process() -> None:
    arguments = ("--device", "cpu", "--epochs", "3", "--batch-size")
    alone = final(run([sys.executable, str(EXAMPLES / "contrastive.py"), *arguments, "128"]))
    assert alone[0] >= 0.85
    for backend in BACKENDS:
        found = final(run(by_hand(backend, "contrastive.py", *arguments, "64")))
        assert found == pytest.approx(alone, abs=3e-3)
        assert found[1] == pytest.approx(alone[1], abs=3e-4)


@pytest.mark.nightly
def test_episodes_are_each_ranks_own_and_the_policy_is_one() -> None:
    arguments = ("--device", "cpu", "--epochs", "3", "--episodes", "96", "--update-every", "32", "--workers", "1")
    accuracy, val_loss = ddp = final(run(by_hand("ddp", "episodes.py", *arguments)))
    assert accuracy >= 0.7  # half of all moves are good ones
    assert val_loss < 0.76
    assert final(run(by_hand("horovod", "episodes.py", *arguments))) == pytest.approx(ddp, abs=3e-4)


@pytest.mark.nightly
def test_two_optimizers_learn_alike_on_both_backends() -> None:
    arguments = ("--device", "cpu", "--epochs", "3")
    critic, generator = ddp = final(run(by_hand("ddp", "gan.py", *arguments)))
    assert 0.05 < critic < 0.69  # less than guessing costs
    assert generator > 0.69
    assert final(run(by_hand("horovod", "gan.py", *arguments))) == pytest.approx(ddp, abs=3e-4)


def test_snapshots_go_on(tmp_path: Path) -> None:
    whole, restarted, again = (tmp_path / name for name in ("whole.pt", "restarted.pt", "again.pt"))
    epochs = ("--device", "cpu", "--epochs", "4")
    expected = run(by_hand("ddp", "snapshots.py", "--snapshot", whole, *epochs))
    assert "resuming" not in expected

    failing = ("--snapshot", restarted, *epochs, "--fail-in-epoch", "3")
    output = run(by_hand("ddp", "snapshots.py", *failing, options=("--max-restarts", "1")))
    assert "fails in epoch 3" in output  # torchrun starts both ranks again, and it was not the first epoch
    assert f"resuming from '{restarted}' after epoch 2" in output
    assert final(output) == final(expected)

    run(by_hand("horovod", "snapshots.py", "--snapshot", again, "--device", "cpu", "--epochs", "1"))
    output = run(by_hand("horovod", "snapshots.py", "--snapshot", again, *epochs))
    assert f"resuming from '{again}' after epoch 1" in output
    assert final(output) == final(expected)

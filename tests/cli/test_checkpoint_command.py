"""`unitrain ckpt`: list, verify, show and consolidate checkpoints, and convert checkpoints of other programs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.filesize import decimal
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import files
from unitrain.checkpoint.files import file_list_digest, read_tensors
from unitrain.cli import unitrain
from unitrain.errors import CheckpointError

LOCAL = LocalBackend(torch.device("cpu"))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator))


def build_trainer(model: nn.Module, scheduled: bool = True, **settings: Any) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = StepLR(optimizer, 2) if scheduled else None
    config = TrainConfig(batch_size=12, progress="off", **settings)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=LOCAL, config=config, scheduler=scheduler)


def ckpt(*arguments: str | Path) -> Result:
    return CliRunner().invoke(unitrain, ["ckpt", *map(str, arguments)])


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    build_trainer(network(), max_epochs=3, output_dir=tmp_path / "run").fit(build_dataset(), build_dataset())
    return tmp_path / "run"


def test_checkpoints_are_listed_with_their_results(run_folder: Path) -> None:
    done = ckpt("ls", run_folder)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if line.strip().startswith("step-")]
    history = [json.loads(line) for line in (run_folder / "history.jsonl").read_text().splitlines()]
    assert [row[:3] for row in rows] == [
        [f"step-{step:09d}", str(epoch), str(step)] for epoch, step in ((1, 4), (2, 8), (3, 12))
    ]
    assert [float(row[4]) for row in rows] == pytest.approx([one["val_loss"] for one in history], rel=1e-3)
    sizes = [
        sum(file.stat().st_size for file in (run_folder / row[0]).iterdir() if file.name != "manifest.json")
        for row in rows
    ]
    assert [" ".join(row[5:]) for row in rows] == [decimal(size) for size in sizes]
    (*_, last) = [json.loads(line) for line in ckpt("ls", run_folder, "--json").output.splitlines()]
    assert last["results"]["val_loss"] == history[-1]["val_loss"]


def test_damaged_checkpoint_is_reported(run_folder: Path) -> None:
    assert ckpt("verify", run_folder).output == "".join(f"step-{step:09d}  valid\n" for step in (4, 8, 12))
    file = run_folder / "step-000000008" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = ckpt("verify", run_folder)
    assert done.exit_code == 1
    assert "step-000000008  DAMAGED: the content of model.safetensors has changed since it was written\n" in done.output
    assert "Damaged checkpoints: 1 of 3." in done.output
    assert ckpt("verify", run_folder / "step-000000012").exit_code == 0


def test_show_prints_the_manifest_and_the_tensors(run_folder: Path) -> None:
    done = ckpt("show", run_folder)
    assert done.exit_code == 0, done.output
    assert '"checkpoint": "' + str(run_folder / "step-000000012") in done.output
    assert "0.weight  F32 [16, 6]\n" in done.output


def test_complex_tensors_are_shown_verified_and_converted(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4, dtype=torch.complex128), "b": torch.randn(2, dtype=torch.complex64)}
    torch.save({**weights, "c": torch.randn(2)}, tmp_path / "weights.pt")
    for source, folder in ((tmp_path / "weights.pt", "first"), (tmp_path / "first/step-000000000", "second")):
        found = source / "model.safetensors" if source.is_dir() else source
        done = ckpt("convert", found, tmp_path / folder)
        assert done.exit_code == 0, done.output
        assert ckpt("verify", tmp_path / folder).output == "step-000000000  valid\n"
        shown = ckpt("show", tmp_path / folder).output
        assert shown.endswith("a  C128 [3, 4]\nb  C64 [2]\nc  F32 [2]\n")
        kept = read_tensors(tmp_path / folder / "step-000000000" / "model.safetensors")
        assert all(torch.equal(kept[name], value) for name, value in weights.items())


def test_folder_without_checkpoints_is_reported(tmp_path: Path) -> None:
    for command in ("ls", "show"):
        done = ckpt(command, tmp_path)
        assert done.exit_code == 1
        assert done.output.startswith(f"Error: There is no checkpoint in '{tmp_path}'.")


def train_in_plain_torch(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, StepLR]:
    """Train in plain torch, like a user's script. Return the model, the optimizer and the scheduler."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = StepLR(optimizer, 2)
    for _ in range(steps):
        nn.functional.cross_entropy(model(build_dataset().tensors[0]), build_dataset().tensors[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


MODEL, OPTIMIZER, SCHEDULER = train_in_plain_torch(5)
STATE = MODEL.state_dict()
PREFIXED = {f"module.{name}": value for name, value in STATE.items()}
COMPLETE = {"optimizer": OPTIMIZER.state_dict(), "scheduler": SCHEDULER.state_dict()}
# Files to convert, with the states (optimizer, scheduler) and the (epoch, step) that each file contains.
SOURCES: dict[str, tuple[Any, set[str], tuple[int, int]]] = {
    "state_dict.pt": (STATE, set(), (0, 0)),
    "ddp.pt": (PREFIXED, set(), (0, 0)),
    "snapshot.pt": ({"MODEL_STATE": STATE, "EPOCHS_RUN": 7}, set(), (7, 0)),  # as in the torchrun tutorial
    "horovod.pth.tar": ({"model": STATE, "epoch": 2, "optimizer": COMPLETE["optimizer"]}, {"optimizer"}, (2, 0)),
    "imagenet.pt": ({"state_dict": PREFIXED, "arch": "net", "step": 5, **COMPLETE}, {"optimizer", "scheduler"}, (0, 5)),
    "lightning.ckpt": (
        {
            "pytorch-lightning_version": "2.5.0", "epoch": 1, "global_step": 5, "loops": {}, "callbacks": {},
            "state_dict": {f"net.{name}": value for name, value in STATE.items()},
            "optimizer_states": [COMPLETE["optimizer"]], "lr_schedulers": [COMPLETE["scheduler"]],
        },
        {"optimizer", "scheduler"},
        (1, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_checkpoints_of_other_programs_are_converted_and_resumed(tmp_path: Path, name: str) -> None:
    content, states, (epoch, step) = SOURCES[name]
    torch.save(content, tmp_path / name)
    strip = ["--strip-prefix", "net."] if name == "lightning.ckpt" else []
    done = ckpt("convert", tmp_path / name, tmp_path / "converted", *strip)
    assert done.exit_code == 0, done.output
    assert f"; epoch {epoch}, step {step}\n" in done.output
    resumed = build_trainer(network(), max_epochs=9, resume=str(tmp_path / "converted"), output_dir=tmp_path / "run")
    assert (resumed.progress.epoch, resumed.progress.step) == (epoch, step)
    assert all(torch.equal(value, STATE[key]) for key, value in resumed.model.state_dict().items())
    moments = resumed.optimizer.state_dict()["state"]
    assert bool(moments) == ("optimizer" in states)
    for index, values in moments.items():
        assert torch.equal(values["exp_avg"], COMPLETE["optimizer"]["state"][index]["exp_avg"])
    assert resumed.scheduler.last_epoch == (5 if "scheduler" in states else 0)
    resumed.fit(build_dataset())
    assert resumed.progress.epoch == 9


# Files of a run of Lightning 2.6.6 with three steps per epoch, and the (epoch, step) from which unitrain continues.
LIGHTNING_FILES = {"epoch_end": (1, 3), "within_epoch": (1, 4), "last_batch": (2, 6), "final": (2, 6)}


@pytest.mark.parametrize("name", LIGHTNING_FILES)
def test_completed_epochs_of_lightning_are_not_repeated(tmp_path: Path, name: str) -> None:
    source = Path(__file__).parents[1] / "support" / "lightning_checkpoints" / f"{name}.ckpt"
    done = ckpt("convert", source, tmp_path / "converted", "--strip-prefix", "net.")
    epoch, step = LIGHTNING_FILES[name]
    assert f"Lightning checkpoint: 2 tensors, optimizer, scheduler; epoch {epoch}, step {step}\n" in done.output
    (checkpoint,) = (tmp_path / "converted").iterdir()
    training = torch.load(checkpoint / "training.pt", weights_only=True)
    assert training["scheduler"]["last_epoch"] == epoch


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_accelerate_folder_is_converted_and_resumed(tmp_path: Path, weights: str) -> None:
    folder = tmp_path / "checkpoint_0"
    folder.mkdir()
    (save_file if weights.endswith("safetensors") else torch.save)(STATE, folder / weights)
    for name, state in COMPLETE.items():
        torch.save(state, folder / f"{name}.bin")
    done = ckpt("convert", folder, tmp_path / "converted", "--epoch", "1", "--step", "5")
    assert done.output.startswith("Accelerate folder: 4 tensors, optimizer, scheduler; epoch 1, step 5\n")
    resumed = build_trainer(network(), max_epochs=2, resume=str(tmp_path / "converted"))
    assert resumed.optimizer.param_groups[0]["lr"] == OPTIMIZER.param_groups[0]["lr"]


class Code:
    """An object that executes code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([1, 2], "contains an object of class list, not a dictionary"),
        (
            {"epoch": 1, "lr": 0.1},
            "does not contain the state dictionary of a model under a known key. Its keys are: epoch, lr",
        ),
        ({"model": STATE, "hook": Code()}, "cannot be read without executing code from it"),
        (network(), "cannot be read without executing code from it"),
        (
            {"model": STATE, "optimizer_states": [COMPLETE["optimizer"]] * 2},
            "has 2 optimizers or schedulers, but unitrain supports one",
        ),
        ({"model": STATE, "optimizer": 5}, "file.pt' must be a state dictionary, got 5. Save optimizer.state_dict()"),
        (
            {"model": STATE, "optimizer": {"G": COMPLETE["optimizer"]}},
            "must be a state dictionary, got an object of cl",
        ),
        ({"model": STATE, "lr_schedulers": ["cosine"]}, "must be a state dictionary, got 'cosine'. Save scheduler.st"),
    ],
)
def test_unsupported_checkpoints_are_rejected(tmp_path: Path, content: Any, found: str) -> None:
    torch.save(content, tmp_path / "file.pt")
    done = ckpt("convert", tmp_path / "file.pt", tmp_path / "converted")
    assert done.exit_code == 1
    assert found in done.output
    assert not (tmp_path / "converted").exists()


def test_damaged_files_of_other_programs_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "file.safetensors").write_bytes(b"damaged " * 9)
    (tmp_path / "accelerate").mkdir()
    torch.save([1, 2], tmp_path / "accelerate" / "pytorch_model.bin")
    for name, found in (("file.safetensors", "cannot be read"), ("accelerate", "does not contain the state dict")):
        done = ckpt("convert", tmp_path / name, tmp_path / "converted")
        assert done.exit_code == 1
        assert found in done.output


def test_converted_checkpoint_that_does_not_fit_the_model_is_rejected(tmp_path: Path) -> None:
    torch.save({f"net.{name}": value for name, value in STATE.items()}, tmp_path / "file.pt")
    assert "No name in the model begins with 'body.'; the first names are net.0.weight" in (
        ckpt("convert", tmp_path / "file.pt", tmp_path / "no", "--strip-prefix", "body.").output
    )
    assert ckpt("convert", tmp_path / "file.pt", tmp_path / "converted").exit_code == 0
    with pytest.raises(CheckpointError, match=r"does not fit Sequential with AdamW: .*net\.0\.weight"):
        build_trainer(network(), max_epochs=1, resume=str(tmp_path / "converted"))
    assert "already exists" in ckpt("convert", tmp_path / "file.pt", tmp_path / "converted").output


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    settings = {"checkpoint_format": "sharded", "ema_decay": 0.5}
    build_trainer(network(), max_epochs=2, output_dir=tmp_path / "sharded", **settings).fit(
        build_dataset(), build_dataset()
    )
    return tmp_path / "sharded"


def test_sharded_checkpoints_are_listed_verified_and_shown(run_folder: Path, sharded: Path) -> None:
    assert ckpt("ls", sharded).output.count("step-") == 2
    assert ckpt("verify", sharded).output == "step-000000004  valid\nstep-000000008  valid\n"
    tensors = [line for line in ckpt("show", run_folder).output.splitlines() if "  F32 [" in line]
    assert tensors == [line for line in ckpt("show", sharded).output.splitlines() if "  F32 [" in line]
    assert len(tensors) == 4
    for name in ("model", "optimizer", "average"):
        file = sharded / "step-000000008" / name / "rank-00000.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        done = ckpt("verify", sharded)
        assert done.exit_code == 1
        assert f"DAMAGED: the content of {name}/rank-00000.safetensors has changed since it was wri" in done.output
        file.unlink()
        assert "step-000000008  DAMAGED: FileNotFoundError" in ckpt("verify", sharded).output
        file.write_bytes(content)
    assert ckpt("verify", sharded).exit_code == 0


def test_model_and_averaged_model_are_consolidated_to_one_file(run_folder: Path, sharded: Path, tmp_path: Path) -> None:
    full = build_trainer(network(), max_epochs=2, output_dir=tmp_path / "full", ema_decay=0.5)
    full.fit(build_dataset(), build_dataset())
    assert full.averaged_model is not None
    for source in (sharded, tmp_path / "full"):
        for name, options, expected in (("m", (), full.model), ("a", ("--average",), full.averaged_model)):
            file = tmp_path / f"{source.name}-{name}.safetensors"
            done = ckpt("consolidate", source, file, *options)
            assert done.exit_code == 0, done.output
            assert done.output.startswith(f"{file}  {decimal(file.stat().st_size)}, sha256 ")
            with safe_open(file, "pt") as opened:
                assert opened.metadata()["format"] == "pt"  # required by `from_pretrained` of transformers
            found, loaded = load_file(file), network()
            assert found.keys() == expected.state_dict().keys()
            load_model(loaded, file)
            for key, value in expected.state_dict().items():
                assert torch.equal(loaded.state_dict()[key], value)
    again = ckpt("consolidate", sharded, tmp_path / "full-m.safetensors")
    assert (again.exit_code, "already exists. Use another file name." in again.output) == (1, True)
    without_average = ckpt("consolidate", run_folder, tmp_path / "x.safetensors", "--average")
    assert without_average.exit_code == 1
    assert "has no averaged weights, because its run had no ema_decay." in without_average.output
    missing = ckpt("consolidate", run_folder, tmp_path / "nowhere" / "x.safetensors")
    assert (missing.exit_code, "cannot be written: No such file or directory." in missing.output) == (1, True)
    assert not list(tmp_path.glob(".*"))


def test_damaged_manifest_of_a_sharded_checkpoint_is_reported(sharded: Path, tmp_path: Path) -> None:
    path = sharded / "step-000000008" / "manifest.json"
    manifest = json.loads(path.read_text())
    for damage in ({"results": None}, {"results": {"loss": "low"}}, {"files": ["model"]}, {"files": {"model": "x"}}):
        path.write_text(json.dumps(manifest | damage))
        listed = ckpt("ls", sharded)
        assert (listed.exit_code, listed.output.count("damaged manifest")) == (0, 1), listed.output
    for tied in ([1], {"model": "name"}, {"model": {"name": 1}}):
        path.write_text(json.dumps(manifest | {"tied": tied}))
        done = ckpt("consolidate", path.parent, tmp_path / "m.safetensors")
        assert (done.exit_code, f'its entry "tied" is {tied!r}. Restore it from a copy.' in done.output) == (1, True)


@pytest.mark.parametrize("command", ["show", "consolidate"])
@pytest.mark.parametrize(
    "content",
    [
        b"\x02\0\0\0\0\0\0\0{{",
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x07\0\0\0\0\0\0\0{"a":1}',
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     1234',
        b'\x3a\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}    12345678',
    ],
    ids=["not JSON", "not a dictionary", "not a tensor", "too short", "negative shape"],
)
def test_shard_of_another_format_is_reported(sharded: Path, tmp_path: Path, command: str, content: bytes) -> None:
    checkpoint, name = sharded / "step-000000008", "model/rank-00000.safetensors"
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files_sha256"] = file_list_digest(manifest["files"])
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    done = ckpt(command, checkpoint, *([tmp_path / "m.safetensors"] if command == "consolidate" else []))
    assert isinstance(done.exception, SystemExit)
    assert f"'{checkpoint / name}' does not contain the tensors of a checkpoint: " in done.output


def test_interrupt_removes_the_unfinished_file_of_consolidate(tmp_path: Path) -> None:
    model = {"weight": torch.zeros(2**25)}  # writing 134 MB takes about 0.2 s
    (tmp_path / "run").mkdir()
    files.write(tmp_path / "run" / "step-000000001", model, {}, {"epoch": 1, "step": 1})
    file, unfinished = tmp_path / "model.safetensors", tmp_path / ".model.safetensors.unfinished"
    command = [sys.executable, "-m", "unitrain", "ckpt", "consolidate", str(tmp_path / "run"), str(file)]
    # On a busy machine, the file may be complete before this process stops the command, so the attempt is repeated.
    for _ in range(10):
        file.unlink(missing_ok=True)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            while not unfinished.exists() and process.poll() is None:
                time.sleep(0.002)
            process.send_signal(signal.SIGSTOP)
            if process.returncode is None:
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            was_writing = unfinished.exists()
            if was_writing:
                process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            output = process.communicate(timeout=60)[0]
        if was_writing:
            break
    assert (process.returncode, output) == (130, "\nunitrain: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


UNSUPPORTED_TENSORS = {
    "is sparse (torch.sparse_coo)": lambda: torch.ones(2).to_sparse(),
    "is sparse (torch.sparse_csr)": lambda: torch.ones(2, 2).to_sparse_csr(),
    "has no data (device 'meta')": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:Validating sparse:UserWarning")
@pytest.mark.parametrize("kind", UNSUPPORTED_TENSORS)
def test_tensors_that_a_checkpoint_cannot_contain_are_refused(kind: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "table": UNSUPPORTED_TENSORS[kind]()}, tmp_path / "model.pt")
    result = ckpt("convert", tmp_path / "model.pt", tmp_path / "out")
    assert result.exit_code == 1
    assert f"Error: Tensor 'table' of '{tmp_path}/model.pt' {kind}, but a checkpoint contains dense" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "folder"])
def test_fifos_are_refused(name: str, tmp_path: Path) -> None:
    fifo = tmp_path / name
    if name == "folder":
        fifo.mkdir()
        fifo = fifo / "pytorch_model.bin"
    os.mkfifo(fifo)
    result = ckpt("convert", tmp_path / name, tmp_path / "out")
    assert result.exit_code == 1
    assert f"Error: '{fifo}' is not a regular file." in result.output


@pytest.mark.parametrize("key", ["step", "epoch"])
@pytest.mark.parametrize("number", [-5, 10**40, 2**63, "x", math.nan, 1.5, True, [1]])
def test_step_and_epoch_that_are_not_counts_are_refused(number: Any, key: str, tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(2)}, key: number}, tmp_path / "model.pt")
    result = ckpt("convert", tmp_path / "model.pt", tmp_path / "out")
    assert result.exit_code == 1
    assert f"Error: The {key} of '{tmp_path}/model.pt' must be a whole number from 0 to" in result.output
    assert f", got {number!r}. Set it" in result.output
    assert result.output.strip().endswith(f"Set it: --{key} 0")
    assert ckpt("convert", tmp_path / "model.pt", tmp_path / "out", f"--{key}", "3").exit_code == 0
    assert ckpt("ls", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("command", ["convert", "consolidate"])
@pytest.mark.parametrize("target", ["s3://bucket/run", ""])
def test_urls_and_empty_targets_are_refused(target: str, command: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    result = ckpt(command, tmp_path / "model.pt", target)
    assert (result.exit_code, f"got {'the URL ' if target else ''}{target!r}. Use a" in result.output) == (2, True)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64")])
def test_failed_conversion_leaves_nothing(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise error

    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    monkeypatch.setattr(files, "save_object", fail)
    result = ckpt("convert", tmp_path / "model.pt", tmp_path / "out")
    assert result.exit_code == 1
    assert f"Error: '{tmp_path}/out/step-000000000' cannot be written: {error}. Use another folder." in result.output
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["f1[macro]", "acc[/x]", "[bold]", ":smile:", "p$_{$", "a\\[b]"])
def test_names_of_metrics_are_listed_as_given(name: str, tmp_path: Path) -> None:
    trainer = build_trainer(network(), max_epochs=1, output_dir=tmp_path)
    trainer.fit(build_dataset())
    (checkpoint,) = files.list_checkpoints(tmp_path)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "results": {name: 1.0}}))
    result = ckpt("ls", tmp_path)
    assert result.exit_code == 0
    assert f" {name} " in result.output

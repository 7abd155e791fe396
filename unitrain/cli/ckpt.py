"""`unitrain ckpt`: list, verify, show, convert and consolidate checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from unitrain.cli import OutputPath
from unitrain.errors import CheckpointError
from unitrain.output import plain_console, replace_unprintable

_PATH = click.Path(path_type=Path, exists=True)


@click.group()
def ckpt() -> None:
    """List, verify, show, convert and consolidate checkpoints."""


def _report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap `command` to report CheckpointError as a command-line error."""

    @wraps(command)
    def wrapped(**arguments: Any) -> None:
        try:
            command(**arguments)
        except CheckpointError as error:
            raise click.ClickException(str(error)) from error

    return wrapped


@ckpt.command("ls")
@click.argument("folder", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per checkpoint.")
@_report_errors
def list_checkpoints(folder: Path, as_json: bool) -> None:
    """List the checkpoints in FOLDER (the output_dir of a run) with epoch, step, metrics and size."""
    from unitrain.checkpoint import files

    checkpoints = files.list_checkpoints(folder)[::-1]
    if not checkpoints:
        raise CheckpointError(f"There is no checkpoint in '{folder}'. Pass the output_dir of a run.")
    manifests = {path.name: files.read_manifest(path) for path in checkpoints}
    if as_json:
        for name, manifest in manifests.items():
            click.echo(json.dumps({"name": name, **manifest}))
        return
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    damaged = [name for name, manifest in manifests.items() if not _is_well_formed(manifest)]
    manifests |= {name: {} for name in damaged}
    results = list(dict.fromkeys(name for manifest in manifests.values() for name in manifest.get("results", {})))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("checkpoint")
    for column in ("epoch", "step", *map(replace_unprintable, results), "size"):
        table.add_column(column, justify="right")
    for name, manifest in manifests.items():
        values = [manifest.get("results", {}).get(result) for result in results]
        size = sum(file["bytes"] for file in manifest.get("files", {}).values())
        epoch_and_step = [str(manifest.get(key, "?")) for key in ("epoch", "step")]
        value_texts = ["" if value is None else f"{value:.4g}" for value in values]
        without_size = "damaged manifest" if name in damaged else "no manifest"
        table.add_row(name, *epoch_and_step, *value_texts, decimal(size) if manifest else without_size)
    plain_console(width=None if plain_console().is_terminal else 200).print(table)


def _is_well_formed(manifest: dict[str, Any]) -> bool:
    """Return whether the results and the sizes of files in `manifest` have the types that unitrain writes."""
    results, files = manifest.get("results", {}), manifest.get("files", {})
    return (
        isinstance(results, dict)
        and all(isinstance(value, int | float | None) for value in results.values())
        and isinstance(files, dict)
        and all(isinstance(file, dict) and isinstance(file.get("bytes"), int) for file in files.values())
    )


@ckpt.command()
@click.argument("folder", type=_PATH)
@_report_errors
def verify(folder: Path) -> None:
    """Verify the files of a checkpoint, or of all checkpoints in FOLDER, against their manifests."""
    from unitrain.checkpoint import files

    checkpoints = files.list_checkpoints(folder)[::-1]
    if not checkpoints and not any((folder / name).exists() for name in (files.MODEL, files.TRAINING, files.MANIFEST)):
        raise CheckpointError(
            f"There is no checkpoint in '{folder}'. Pass the output_dir of a run, or one of its checkpoints."
        )
    checkpoints = checkpoints or [folder]
    damage_by_path = {path: files.find_corruption(path) for path in checkpoints}
    for path, damage in damage_by_path.items():
        click.echo(f"{path.name}  {'valid' if damage is None else f'DAMAGED: {damage}'}")
    damaged = sum(damage is not None for damage in damage_by_path.values())
    if damaged:
        raise CheckpointError(
            f"Damaged checkpoints: {damaged} of {len(checkpoints)}. Remove them, or restore their files: a run "
            "resumes from the newest valid checkpoint."
        )


@ckpt.command()
@click.argument("checkpoint", type=_PATH)
@_report_errors
def show(checkpoint: Path) -> None:
    """Print the manifest of CHECKPOINT, or of the newest valid checkpoint in a folder, and list its model tensors."""
    from unitrain.checkpoint import files, sharded_files

    path = files.find_newest_valid(checkpoint, required=True)
    assert path is not None
    manifest = files.read_manifest(path)
    click.echo(json.dumps({"checkpoint": str(path), **manifest}, indent=2))
    for name, tensor in sorted(sharded_files.open_model(path).tensors.items()):
        click.echo(f"{name}  {tensor.dtype_name} {list(tensor.original_shape)}")


@ckpt.command()
@click.argument("checkpoint", type=_PATH)
@click.argument("file", type=OutputPath(dir_okay=False))
@click.option("--average", is_flag=True, help="Write the averaged weights of a run with ema_decay.")
@_report_errors
def consolidate(checkpoint: Path, file: Path, average: bool) -> None:
    """Write the model of CHECKPOINT, or of the newest valid checkpoint in a folder, to one safetensors file, FILE.

    The checkpoint may be sharded. Tensors are read and written one at a time. FILE contains tied parameters only once.
    Load it with safetensors.torch.load_model(model, FILE).
    """
    from rich.filesize import decimal

    from unitrain.checkpoint import files
    from unitrain.checkpoint.consolidation import consolidate_model

    path = files.find_newest_valid(checkpoint, required=True)
    assert path is not None
    written = consolidate_model(path, file, average=average)
    click.echo(f"{click.format_filename(file)}  {decimal(written.bytes)}, sha256 {written.sha256}")


@ckpt.command()
@click.argument("source", type=_PATH)
@click.argument("folder", type=OutputPath(file_okay=False))
@click.option("--strip-prefix", default="", help="Prefix to remove from the parameter names, such as 'model.'.")
@click.option("--epoch", type=click.IntRange(min=0), help="Number of completed epochs. [default: as in SOURCE, else 0]")
@click.option("--step", type=click.IntRange(min=0), help="Number of completed steps. [default: as in SOURCE, else 0]")
@_report_errors
def convert(source: Path, folder: Path, strip_prefix: str, epoch: int | None, step: int | None) -> None:
    """Convert SOURCE, a checkpoint of another library, and write it to FOLDER.

    SOURCE is a torch.save file (a state dict, including that of a DDP model, or a dictionary with "model", "optimizer",
    "epoch"), a safetensors file, a Lightning .ckpt file, or an Accelerate folder. Resume from the converted checkpoint
    with TrainConfig(resume="FOLDER", output_dir=...).
    """
    from safetensors import SafetensorError

    from unitrain.checkpoint import files
    from unitrain.checkpoint.conversion import parse_count, read_foreign_checkpoint

    foreign_checkpoint = read_foreign_checkpoint(source)
    if strip_prefix and not any(name.startswith(strip_prefix) for name in foreign_checkpoint.model):
        names = ", ".join(list(foreign_checkpoint.model)[:3])
        raise CheckpointError(
            f"No name in the model begins with {strip_prefix!r}; the first names are {names}. Leave --strip-prefix out."
        )
    model = {name.removeprefix(strip_prefix): value for name, value in foreign_checkpoint.model.items()}
    progress = {
        "epoch": parse_count(source, "epoch", foreign_checkpoint.epoch) if epoch is None else epoch,
        "step": parse_count(source, "step", foreign_checkpoint.step) if step is None else step,
        "sample": 0,
    }
    training = {"optimizer": foreign_checkpoint.optimizer, "progress": progress}
    if foreign_checkpoint.scheduler is not None:
        training["scheduler"] = foreign_checkpoint.scheduler
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"Folder '{folder}' cannot be created: {error.strerror}. Use another folder.") from None
    target = files.checkpoint_path(folder, progress["step"])
    if target.exists():
        raise CheckpointError(f"'{target}' already exists. Use another folder.")
    origin = replace_unprintable(f"{foreign_checkpoint.format_name} {source}")
    try:
        files.write(target, model, training, {**progress, "converted_from": origin})
    except CheckpointError:  # a subclass of OSError
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        with suppress(OSError):  # the file system may be read-only
            files.remove(files.staging_folder(target))
        raise CheckpointError(f"'{target}' cannot be written: {error}. Use another folder.") from None
    parts = [
        f"{len(model)} tensors",
        *(part for part in ("optimizer", "scheduler") if getattr(foreign_checkpoint, part)),
    ]
    click.echo(
        f"{foreign_checkpoint.format_name}: {', '.join(parts)}; epoch {progress['epoch']}, step {progress['step']}"
    )
    count = progress["epoch"]
    if epoch is None and count and "dictionary" in foreign_checkpoint.format_name:
        click.echo(
            f"{count} epochs are completed. If {count} is the index of the last epoch, pass: --epoch {count + 1}"
        )
    click.echo(replace_unprintable(f'{target}  resume from it with TrainConfig(resume="{folder}", output_dir=...)'))

"""The file format of sharded checkpoints. Each rank writes a portion of a checkpoint.

A checkpoint is a folder `step-000000123`:

    model/rank-00000.safetensors       chunks of the parameters and buffers, under the user's names
    optimizer/rank-00000.safetensors   chunks of the optimizer state, named state.PARAMETER.KEY
    optimizer/rank-00000.pt            values of the optimizer state that are not tensors, if there are any
    average/rank-00000.safetensors     chunks of the averaged weights, with `ema_decay`
    local_sgd/rank-00000.pt            the rank's weights, optimizer state and compression error, with `local_sgd`
    training.pt                        all other state, and the hyperparameters of the optimizer
    manifest.json                      size and sha256 of the files above, sha256 of this list, number of ranks,
                                       names of tied tensors, versions, step, epoch, results, configuration and run ID
    config.yaml                        the text passed as `Trainer(config_text=...)`, if there is one; the manifest has
                                       no digest of it

`tensor_files` describes the safetensors files. The ranks write to a folder with a temporary name. Each rank then writes
a report with the sizes and digests of its files. When the reports of all ranks exist, rank 0 writes the manifest and
renames the folder, so a folder with the final name is complete. The reports are files because background threads cannot
call collectives.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain.backends.sharding.state_chunks import StateKey, StoredState, own_state
from unitrain.backends.sharding.tensor_chunks import (
    TensorChunk,
    is_distributed_tensor,
    is_storable,
    local_chunks,
    own_chunks,
)
from unitrain.checkpoint.files import (
    FINITE,
    MANIFEST,
    MODEL,
    TRAINING,
    are_finite,
    file_list_digest,
    flush,
    publish,
    read_manifest,
    save_object,
    sha256,
    write_manifest,
)
from unitrain.checkpoint.state_copy import copy_to_host, plain_state
from unitrain.checkpoint.tensor_files import StoredTensors, WrittenFile, write_chunks
from unitrain.errors import CheckpointError
from unitrain.modules.buffers import load_state
from unitrain.torch_compat import loads_state_unchanged

MODEL_FOLDER, OPTIMIZER_FOLDER, AVERAGE_FOLDER, LOCAL_FOLDER = "model", "optimizer", "average", "local_sgd"
# The metadata entry that contains the index of the parameter and the key of each state tensor, as JSON.
_STATE_KEYS_METADATA = "unitrain.optimizer"
_MAX_POLL_SECONDS = 0.25
# After the main thread has ended, rank 0 stops waiting for other ranks if none has written anything for this long.
_ABANDON_AFTER_SECONDS = 30.0


@dataclass(frozen=True)
class StateShard:
    """The portion of the state that one rank writes.

    `chunks` contains the chunks of tensors, by folder. `keys` maps each optimizer tensor to its parameter index and
    state key. `values` contains the values of the optimizer state that are not tensors. `tied` maps the names of tied
    tensors, by folder, to the names under which they are stored. `trainable` contains the names of the parameters that
    require gradients. `local_state` is this rank's local SGD state, with
    tensors in host memory.
    """

    chunks: dict[str, list[TensorChunk]]
    keys: dict[str, StateKey] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()
    local_state: dict[str, Any] = field(default_factory=dict)

    def copy_to_host(self) -> StateShard:
        """Return a copy in host memory.

        Raises CheckpointError for values that torch.load(weights_only=True) rejects.
        """
        chunks = {
            folder: [replace(chunk, data=chunk.data.to("cpu", copy=True)) for chunk in chunks]
            for folder, chunks in self.chunks.items()
        }
        values = copy_to_host(plain_state({"values": self.values}))["values"]
        return replace(self, chunks=chunks, values=values, local_state=plain_state(self.local_state))


def collect_shard(
    model: nn.Module, optimizer: Optimizer, average: Mapping[str, Tensor] | None, rank: int, size: int
) -> StateShard:
    """Return the portion of the state that rank `rank` of `size` ranks writes. Its tensors share the memory of the
    state.

    `average` contains the averaged weights, or is None. This function does not communicate, because every rank stores
    its portion. Raises CheckpointError for a value in the model's state dict that is not a dense tensor.
    """
    chunks, tied = {}, {}
    for folder, tensors in ((MODEL_FOLDER, model.state_dict()), (AVERAGE_FOLDER, average)):
        if tensors is not None:
            stored, tied[folder] = _without_duplicates(tensors)
            chunks[folder] = own_chunks(stored, rank, size)
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = own_state(optimizer, names, rank, size)
    trainable = frozenset(name for parameter, name in names.items() if parameter.requires_grad)
    return StateShard({**chunks, OPTIMIZER_FOLDER: own.chunks}, own.keys, own.values, tied, trainable)


def _without_duplicates(tensors: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors without duplicates, and the other names of tied tensors, mapped to the names under which they
    are stored."""
    first: dict[Any, str] = {}
    stored, tied = {}, {}
    for name, tensor in tensors.items():
        if not is_storable(tensor):
            raise CheckpointError(
                f"{name!r} in the state of the model is of class {type(tensor).__name__}, which a sharded checkpoint "
                "cannot store. Register a dense tensor as parameter or buffer, or leave it out of the state_dict."
            )
        key = _storage_key(tensor)
        if key in first:
            tied[name] = first[key]
        else:
            if key is not None:
                first[key] = name
            stored[name] = tensor
    return stored, tied


def _storage_key(tensor: Any) -> Any:
    """Return a value that is equal for tied parameters; None for a tensor without local elements."""
    if is_distributed_tensor(tensor):
        tensor = tensor.to_local()
    if not tensor.numel():
        return None
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *flags


# --- writing ---


def is_sharded(path: Path) -> bool:
    """Return whether checkpoint `path` is sharded."""
    return "ranks" in read_manifest(path)


def write_shard(staging_folder: Path, shard: StateShard, rank: int, token: str) -> None:
    """Write the files and the report of one rank. On failure, mark the rank as failed, so that rank 0 stops waiting.

    `token` identifies the checkpoint that is being written.
    """
    try:
        written = _write_files(staging_folder, shard, rank)
        weights = (chunk.data for chunk in shard.chunks[MODEL_FOLDER] if chunk.name in shard.trainable)
        files = {name: asdict(file) for name, file in written.items()}
        report = {"token": token, "files": files, FINITE: are_finite(weights)}
        temporary = staging_folder / f".{_stem(rank)}.new"
        temporary.write_text(json.dumps(report))
        flush(temporary)
        temporary.rename(_report_path(staging_folder, rank))
    except BaseException:
        _failure_marker_path(staging_folder, rank).touch()  # an empty file can be created even on a full disk
        raise


def _write_files(staging_folder: Path, shard: StateShard, rank: int) -> dict[str, WrittenFile]:
    written: dict[str, WrittenFile] = {}
    keys = {name: [state_key.index, state_key.key] for name, state_key in shard.keys.items()}
    for name, chunks in shard.chunks.items():
        folder = staging_folder / name
        folder.mkdir(exist_ok=True)
        metadata = {_STATE_KEYS_METADATA: json.dumps(keys)} if name == OPTIMIZER_FOLDER else {}
        files = write_chunks(folder, _stem(rank), chunks, metadata)
        written |= {f"{name}/{file}": file_fields for file, file_fields in files.items()}
    values = {"values": shard.values} if shard.values else {}
    for name, state in ((OPTIMIZER_FOLDER, values), (LOCAL_FOLDER, shard.local_state)):
        if not state:
            continue
        path = staging_folder / name / f"{_stem(rank)}.pt"
        path.parent.mkdir(exist_ok=True)
        save_object(plain_state(state), path)
        flush(path)
        written[f"{name}/{path.name}"] = WrittenFile(path.stat().st_size, sha256(path))
    return written


def commit(
    target: Path,
    shard: StateShard,
    training: dict[str, Any],
    manifest_fields: dict[str, Any],
    *,
    size: int,
    token: str,
    abandoned_event: threading.Event,
) -> bool:
    """Write the remaining files of the checkpoint, and publish it when all ranks have written their files.

    Only rank 0 calls it. `size` is the number of ranks. Return False if the checkpoint is incomplete, because
    `abandoned_event` is set, a rank failed, or all ranks have stopped writing after the main thread of this process
    ended.
    """
    staging_folder = staging_path(target)
    save_object(plain_state(training), staging_folder / TRAINING)
    flush(staging_folder / TRAINING)
    files = {
        TRAINING: asdict(WrittenFile((staging_folder / TRAINING).stat().st_size, sha256(staging_folder / TRAINING)))
    }
    reports = _wait_for_reports(staging_folder, size, token, abandoned_event)
    if reports is None:
        return False
    for rank, report in enumerate(reports):
        files |= report["files"]
        _report_path(staging_folder, rank).unlink()
    tied = {name: aliases for name, aliases in shard.tied.items() if aliases}
    is_finite = all(report[FINITE] for report in reports)
    fields = {
        **manifest_fields, FINITE: is_finite, "ranks": size, "tied": tied, "files_sha256": file_list_digest(files),
    }  # fmt: skip
    write_manifest(staging_folder, 2, fields, files)
    for name in (*shard.chunks, *([LOCAL_FOLDER] if shard.local_state else []), "."):
        flush(staging_folder / name)
    publish(staging_folder, target)
    return True


def staging_path(target: Path) -> Path:
    """Return the temporary folder in which the checkpoint is built before it is renamed to `target`."""
    return target.with_name(f".{target.name}.unfinished")


def _wait_for_reports(
    staging_folder: Path, size: int, token: str, abandoned_event: threading.Event
) -> list[dict[str, Any]] | None:
    poll_seconds, written_bytes, changed_at = 0.002, -1, time.monotonic()
    reports: dict[int, dict[str, Any]] = {}
    while len(reports) < size:
        for rank in range(size):
            if rank not in reports and (report := _read_report(staging_folder, rank)).get("token") == token:
                reports[rank] = report
            if _failure_marker_path(staging_folder, rank).exists():
                return None
        if len(reports) == size:
            break
        if abandoned_event.wait(poll_seconds):
            return None
        poll_seconds = min(2 * poll_seconds, _MAX_POLL_SECONDS)
        if not threading.main_thread().is_alive():
            found_bytes = _count_bytes(staging_folder)
            if found_bytes != written_bytes:
                written_bytes, changed_at = found_bytes, time.monotonic()
            elif time.monotonic() - changed_at > _ABANDON_AFTER_SECONDS:
                return None
    return [reports[rank] for rank in range(size)]


def _count_bytes(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another rank has renamed its report in the meantime
            sizes.append(path.stat().st_size)
    return sum(sizes)


def _read_report(staging_folder: Path, rank: int) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(_report_path(staging_folder, rank).read_text())
    except FileNotFoundError:
        return {}
    return report


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def _report_path(staging_folder: Path, rank: int) -> Path:
    return staging_folder / f".{_stem(rank)}.json"


def _failure_marker_path(staging_folder: Path, rank: int) -> Path:
    return staging_folder / f".{_stem(rank)}.failed"


# --- reading ---


def open_tensors(path: Path, folder: str) -> StoredTensors:
    """Return the index of the tensors in `folder` of sharded checkpoint `path`."""
    names = [name for name in read_manifest(path)["files"] if name.startswith(f"{folder}/")]
    tensor_names = (name.partition("/")[2] for name in names)
    return StoredTensors.open(path / folder, sorted(name for name in tensor_names if name.endswith(".safetensors")))


def read_local_states(path: Path) -> list[dict[str, Any]]:
    """Return the local SGD states of all ranks in sharded checkpoint `path`, in rank order."""
    names = [name for name in read_manifest(path)["files"] if name.startswith(f"{LOCAL_FOLDER}/")]
    return [torch.load(path / name, map_location="cpu", weights_only=True) for name in sorted(names)]


def open_model(path: Path) -> StoredTensors:
    """Return the index of the tensors of the model in checkpoint `path`, of either format."""
    return open_tensors(path, MODEL_FOLDER) if is_sharded(path) else StoredTensors.open(path, [MODEL])


def tied_names(path: Path, folder: str) -> dict[str, str]:
    """Return the names of tied parameters, mapped to the names under which they are stored.

    Raises CheckpointError if the manifest entry is invalid.
    """
    tied = read_manifest(path).get("tied", {})
    names: dict[str, str] = tied.get(folder, {}) if isinstance(tied, dict) else tied
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(
            f"'{path / MANIFEST}' is damaged: its entry \"tied\" is {tied!r}. Restore it from a copy."
        )
    return names


def load_module(path: Path, folder: str, module: nn.Module) -> None:
    """Load the tensors in `folder` of sharded checkpoint `path` into `module`.

    They are read one at a time. Only a module without DTensors that overrides how its state dict is loaded receives all
    tensors at once. Raises RuntimeError if names or shapes do not match.
    """
    stored = open_tensors(path, folder)
    state = module.state_dict()
    _check_matches(stored, state, type(module).__name__)
    if not loads_state_unchanged(module) and not any(map(is_distributed_tensor, state.values())):
        aliases = {name: source for name, source in tied_names(path, folder).items() if name in state}
        tensors = {name: stored.read_tensor(name) for name in stored.tensors}
        load_state(module, tensors | {name: tensors[source] for name, source in aliases.items()})
        return
    stored.read(
        chain.from_iterable(local_chunks(name, tensor) for name, tensor in state.items() if name in stored.tensors)
    )


def _check_matches(stored: StoredTensors, state: Mapping[str, Any], model_name: str) -> None:
    """Raise RuntimeError unless the stored tensors have the names and shapes of the tensors in `state`. Tied parameters
    may be stored once."""
    present = {_storage_key(tensor) for name, tensor in state.items() if name in stored.tensors}
    problems = [
        f"missing {name!r}"
        for name, tensor in state.items()
        if name not in stored.tensors and _storage_key(tensor) not in present and not _has_no_local_elements(tensor)
    ]
    problems += [f"unexpected {name!r}" for name in stored.tensors if name not in state]
    problems += [
        f"size mismatch for {name!r}: {list(stored_tensor.original_shape)} in the checkpoint, "
        f"{list(state[name].shape)} in the model"
        for name, stored_tensor in stored.tensors.items()
        if name in state and stored_tensor.original_shape != tuple(state[name].shape)
    ]
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict for {model_name}: {'; '.join(problems)}")


def _has_no_local_elements(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor without local elements. On this rank, it cannot be determined whether such a
    tensor is tied to another one, so it is not reported as missing."""
    return is_distributed_tensor(tensor) and not tensor.to_local().numel()


@dataclass(frozen=True)
class StoredOptimizerState(StoredState):
    """The optimizer state in a sharded checkpoint.

    Tensors stay on disk and are read on demand; non-tensor values are loaded by `open`.
    """

    stored: StoredTensors
    names_by_index: dict[int, dict[Any, str]]
    other_values: dict[Any, Any]

    @classmethod
    def open(cls, path: Path) -> StoredOptimizerState:
        """Read the headers of the files and the values that are not tensors."""
        stored = open_tensors(path, OPTIMIZER_FOLDER)
        names_by_index: dict[int, dict[Any, str]] = {}
        for metadata in stored.metadata:
            for name, (index, key) in json.loads(metadata.get(_STATE_KEYS_METADATA, "{}")).items():
                names_by_index.setdefault(index, {})[key] = name
        values: dict[Any, Any] = {}
        for name in read_manifest(path)["files"]:
            if name.startswith(f"{OPTIMIZER_FOLDER}/") and name.endswith(".pt"):
                _merge(values, torch.load(path / name, map_location="cpu", weights_only=True)["values"])
        return cls(stored, names_by_index, values)

    def tensor_names(self, index: int) -> Mapping[Any, str]:
        """Return the names of the tensors in the state of parameter `index`, by key."""
        return self.names_by_index.get(index, {})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of tensor `name`."""
        return self.stored.tensors[name].original_shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of tensor `name`."""
        return self.stored.tensors[name].original_dtype

    def values(self) -> Mapping[Any, Any]:
        """Return the values that are not tensors, by index and key."""
        return self.other_values

    def read(self, chunks: Iterable[TensorChunk]) -> None:
        """Copy the stored elements of each chunk into its data."""
        self.stored.read(chunks)

    def full_state(self) -> dict[Any, Any]:
        """Return the complete state, as in `Optimizer.state_dict()["state"]`."""
        state = {index: dict(entry) if isinstance(entry, dict) else entry for index, entry in self.other_values.items()}
        for index, names in sorted(self.names_by_index.items()):
            entry = state.setdefault(index, {})
            entry |= {key: self.stored.read_tensor(name) for key, name in names.items()}
        return state


def _merge(values: dict[Any, Any], new_values: dict[Any, Any]) -> None:
    for index, entry in new_values.items():
        if isinstance(index, int) and isinstance(entry, dict):
            values.setdefault(index, {}).update(entry)
        else:
            values[index] = entry

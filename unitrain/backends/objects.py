"""Serialization of Python objects to bytes and tensors for communication between ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.tensors import as_bytes, copy_into
from unitrain.bootstrap.authentication import SIGNATURE_BYTES, has_key, sign, verify
from unitrain.errors import AuthenticationError, ConfigError, UnitrainError

EMPTY_PAYLOAD = torch.empty(0, dtype=torch.uint8, device="cpu")
# `broadcast_with_tensors` divides the bytes of tensors into chunks of this size. The function needs twice this much
# additional memory, for a chunk and the result of its broadcast.
CHUNK_BYTES = 2**26
# `broadcast_in_parts` collects tensors until their total size is at least this, and broadcasts them in one collective.
_MIN_GROUP_BYTES = 2**25
_PICKLE_FORMAT, _TORCH_FORMAT = b"p", b"t"
_SIGNATURE_PURPOSE = "object"


def pack(obj: Any) -> tuple[Tensor, UnitrainError | None]:
    """Return `obj` as a uint8 tensor [bytes] and None, or an empty tensor and the error if it cannot be pickled."""
    file = io.BytesIO()
    try:
        try:
            _CPUPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
            file.write(_PICKLE_FORMAT)
        except _GPUTensorError:
            file = io.BytesIO()
            torch.save(obj, file)
            file.write(_TORCH_FORMAT)
    except Exception as error:  # an object's __reduce__ may raise any exception
        return EMPTY_PAYLOAD, ConfigError(
            f"A {type(obj).__name__} was passed to an object collective, but it cannot be pickled: {error}. "
            "Pass plain data: numbers, strings, tensors, and lists and dictionaries of these."
        )
    file.write(sign(file.getvalue(), _SIGNATURE_PURPOSE))
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8), None


def unpack(payload: Tensor, device: torch.device) -> Any:
    """Return the packed object, with its GPU tensors on `device`.

    If this process has a job key, raises AuthenticationError if the object was not packed by a process with the same
    key. Unpickling can run any code, so the signature is verified first.
    """
    content = payload.numpy().tobytes()
    if has_key():
        content, signature = content[:-SIGNATURE_BYTES], content[-SIGNATURE_BYTES:]
        if not verify(content, signature, _SIGNATURE_PURPOSE):
            raise AuthenticationError(
                "This rank rejected an object with an invalid signature: no rank of this job sent it. Set the same "
                "UNITRAIN_JOB_KEY on all ranks, or find the other program that can reach the job's ports. See "
                "docs/security.md"
            )
    if content.endswith(_PICKLE_FORMAT):
        return pickle.loads(content)

    def map_storage(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(content[:-1]), map_location=map_storage, weights_only=False)


class _GPUTensorError(Exception):
    """Raised if an object contains a GPU tensor. pickle would restore the tensor on the GPU with the sender's index,
    which may belong to another rank or not exist on the receiver. torch.save can map devices, but is several times
    slower.
    """


class _CPUPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type == "cuda":
            raise _GPUTensorError
        return None


def broadcast_tensors(
    communicator: Communicator, tensors: Sequence[Tensor], broadcast: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Broadcast `tensors`, of any dtype, in place from rank 0, in one collective, `communicator.broadcast` by default.
    All ranks must call this function."""
    if not tensors:
        return
    # A broadcast of bytes supports all dtypes in one collective, without rounding.
    pieces = [as_bytes(tensor).to(communicator.device) for tensor in tensors]
    shared = (broadcast or communicator.broadcast)(torch.cat(pieces))
    if communicator.rank == 0:
        return
    for tensor, piece in zip(tensors, torch.split(shared, [piece.numel() for piece in pieces]), strict=True):
        # The clone is aligned, so that it can be viewed as any dtype.
        copy_into(tensor.detach(), piece.clone().view(tensor.dtype).reshape(tensor.shape))


def broadcast_in_parts(communicator: Communicator, tensors: Iterable[Tensor]) -> None:
    """Broadcast `tensors` in place from rank 0. All ranks must call this function.

    Each collective except the last one transfers one or more complete tensors with a total size of at least 32 MiB.
    """
    group, size = list[Tensor](), 0
    for tensor in tensors:
        group.append(tensor.detach())
        size += tensor.numel() * tensor.element_size()
        if size >= _MIN_GROUP_BYTES:
            broadcast_tensors(communicator, group)
            group, size = [], 0
    broadcast_tensors(communicator, group)


def broadcast_with_tensors(communicator: Communicator, obj: Any, root: int = 0) -> Any:
    """Return the root's `obj` on every rank; the objects of other ranks are ignored. All ranks must call this function.

    Dense tensors in dictionaries, lists and tuples, but not in subclasses of these, may be of any size: they are
    broadcast in chunks, because pickling them would take several times their memory. On ranks other than the root, GPU
    tensors are on `communicator.device`, parameters are plain tensors without gradients, and tensors do not share
    memory.
    """
    tensors: list[Tensor] = []
    is_root = communicator.rank == root
    obj_without_tensors = communicator.broadcast_object(_extract_tensors(obj, tensors) if is_root else None, root)
    if not is_root:
        obj = _insert_tensors(obj_without_tensors, communicator.device, tensors)
    contents = [as_bytes(tensor) for tensor in tensors]
    for chunk in _chunks([len(content) for content in contents]):
        parts = [contents[index][elements] for index, elements in chunk]
        # A chunk may contain tensors of several devices.
        payload = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=communicator.device)
        if is_root:
            for target, part in zip(payload.split([len(part) for part in parts]), parts, strict=True):
                target.copy_(part)
        received = communicator.broadcast(payload, root)
        if not is_root:
            for part, source in zip(parts, received.split([len(part) for part in parts]), strict=True):
                part.copy_(source)
    return obj


@dataclass(frozen=True)
class _Placeholder:
    """Placeholder for a tensor that was extracted from an object."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool


def _extract_tensors(obj: Any, tensors: list[Tensor]) -> Any:
    """Return `obj` with placeholders instead of its tensors, and append the tensors to `tensors`."""
    obj_type = type(obj)
    if obj_type in (Tensor, torch.nn.Parameter) and obj.layout == torch.strided and not obj.is_quantized:
        tensors.append(obj)
        return _Placeholder(tuple(obj.shape), obj.dtype, obj.device.type == "cpu")
    if obj_type is dict:
        return {key: _extract_tensors(value, tensors) for key, value in obj.items()}
    if obj_type in (list, tuple):
        return obj_type(_extract_tensors(value, tensors) for value in obj)
    return obj


def _insert_tensors(obj: Any, device: torch.device, tensors: list[Tensor]) -> Any:
    """Return `obj` with uninitialized tensors instead of its placeholders, and append them to `tensors`."""
    if isinstance(obj, _Placeholder):
        tensors.append(torch.empty(obj.shape, dtype=obj.dtype, device="cpu" if obj.is_on_cpu else device))
        return tensors[-1]
    obj_type = type(obj)
    if obj_type is dict:
        return {key: _insert_tensors(value, device, tensors) for key, value in obj.items()}
    if obj_type in (list, tuple):
        return obj_type(_insert_tensors(value, device, tensors) for value in obj)
    return obj


def _chunks(sizes: list[int]) -> Iterator[list[tuple[int, slice]]]:
    """Yield the chunks, each as a list of pairs (index of a tensor, slice of its bytes). `sizes` contains the number of
    bytes of each tensor."""
    chunk: list[tuple[int, slice]] = []
    free_bytes = CHUNK_BYTES
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + free_bytes)
            chunk.append((index, slice(start, stop)))
            free_bytes -= stop - start
            start = stop
            if not free_bytes:
                yield chunk
                chunk, free_bytes = [], CHUNK_BYTES
    if chunk:
        yield chunk

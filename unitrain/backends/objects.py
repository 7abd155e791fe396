"""Python objects as bytes and tensors that are sent between ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.tensors import as_bytes
from unitrain.bootstrap.authentication import SIGNATURE_BYTES, has_key, sign, verify
from unitrain.errors import AuthenticationError, ConfigError, UnitrainError

EMPTY_PAYLOAD = torch.empty(0, dtype=torch.uint8)
# How much of an object's tensors is sent at a time, and so how much more memory it takes.
CHUNK_BYTES = 2**26
_PICKLED, _SAVED = b"p", b"t"
_PURPOSE = "object"


def pack(obj: Any) -> tuple[Tensor, UnitrainError | None]:
    """Return `obj` as uint8 [bytes], or no bytes and what to tell the user when it cannot be pickled."""
    file = io.BytesIO()
    try:
        try:
            _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
            file.write(_PICKLED)
        except _OnGPUError:
            file = io.BytesIO()
            torch.save(obj, file)
            file.write(_SAVED)
    except Exception as error:  # whatever an object's own __reduce__ raises
        return EMPTY_PAYLOAD, ConfigError(
            f"A {type(obj).__name__} was given to send to other ranks, and it cannot be pickled: {error}. "
            "Send plain data: numbers, strings, tensors, and lists and dictionaries of these."
        )
    file.write(sign(file.getvalue(), _PURPOSE))
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8), None


def unpack(payload: Tensor, device: torch.device) -> Any:
    """Return the object that was packed, its tensors of any GPU now on `device`.

    Raises AuthenticationError before it reads an object that no process of this job has packed: unpickling runs code.
    """
    content = payload.numpy().tobytes()
    if has_key():
        content, signature = content[:-SIGNATURE_BYTES], content[-SIGNATURE_BYTES:]
        if not verify(content, signature, _PURPOSE):
            raise AuthenticationError(
                "An object that this rank received was not sent by a rank of this job, and is not read: its signature "
                "is not valid. Give all ranks the same UNITRAIN_JOB_KEY, or see which other program can reach the "
                "job's ports: docs/security.md"
            )
    if content.endswith(_PICKLED):
        return pickle.loads(content)

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(content[:-1]), map_location=place, weights_only=False)


class _OnGPUError(Exception):
    """A tensor of a GPU was met, which pickle would send as one of the sender's GPU: on the receivers that is a
    neighbour's, or missing. torch's own format, several times as slow for a small object, can move it."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type == "cuda":
            raise _OnGPUError
        return None


def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor]) -> None:
    """Set `tensors`, of any dtypes, to rank 0's in place, in one broadcast. All ranks call it."""
    if not tensors:
        return
    # As bytes, one broadcast serves every dtype without rounding.
    pieces = [as_bytes(tensor).to(communicator.device) for tensor in tensors]
    shared = communicator.broadcast(torch.cat(pieces))
    if communicator.rank == 0:
        return
    for tensor, piece in zip(tensors, torch.split(shared, [piece.numel() for piece in pieces]), strict=True):
        # The clone is aligned, so that it can be viewed as any dtype.
        tensor.detach().copy_(piece.clone().view(tensor.dtype).reshape(tensor.shape))


def broadcast_with_tensors(communicator: Communicator, obj: Any) -> Any:
    """Return rank 0's `obj` on every rank; what other ranks pass is ignored. All ranks call it.

    The tensors in dictionaries, lists and tuples are sent as tensors, in chunks, so they may be of any size: pickled,
    they would need as much memory again, several times. Tensors of any GPU are on `communicator.device` afterwards.
    """
    tensors: list[Tensor] = []
    first = communicator.rank == 0
    skeleton = communicator.broadcast_object(_take_out(obj, tensors) if first else None)
    if not first:
        obj = _put_in(skeleton, communicator.device, tensors)
    contents = [as_bytes(tensor) for tensor in tensors]
    for chunk in _chunks([len(content) for content in contents]):
        parts = [contents[index][place] for index, place in chunk]
        size = sum(len(part) for part in parts)
        # One chunk may hold tensors of several devices.
        payload = torch.empty(size, dtype=torch.uint8, device=communicator.device)
        places = payload.split([len(part) for part in parts])
        if first:
            for place, part in zip(places, parts, strict=True):
                place.copy_(part)
        received = communicator.broadcast(payload)
        if not first:
            for part, place in zip(parts, received.split([len(part) for part in parts]), strict=True):
                part.copy_(place)
    return obj


@dataclass(frozen=True)
class _Place:
    """A tensor that was taken out of an object."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _take_out(obj: Any, tensors: list[Tensor]) -> Any:
    """Return `obj` with places for its tensors, which are added to `tensors`."""
    kind = type(obj)
    if kind in (Tensor, torch.nn.Parameter) and obj.layout == torch.strided and not obj.is_quantized:
        tensors.append(obj)
        return _Place(tuple(obj.shape), obj.dtype, obj.device.type == "cpu")
    if kind is dict:
        return {key: _take_out(value, tensors) for key, value in obj.items()}
    if kind in (list, tuple):
        return kind(_take_out(value, tensors) for value in obj)
    return obj


def _put_in(obj: Any, device: torch.device, tensors: list[Tensor]) -> Any:
    """Return `obj` with new tensors, of any values, in their places, which are added to `tensors`."""
    if isinstance(obj, _Place):
        tensors.append(torch.empty(obj.shape, dtype=obj.dtype, device="cpu" if obj.on_cpu else device))
        return tensors[-1]
    kind = type(obj)
    if kind is dict:
        return {key: _put_in(value, device, tensors) for key, value in obj.items()}
    if kind in (list, tuple):
        return kind(_put_in(value, device, tensors) for value in obj)
    return obj


def _chunks(sizes: list[int]) -> Iterator[list[tuple[int, slice]]]:
    """Yield the parts, of tensors of so many bytes, that are sent together."""
    chunk: list[tuple[int, slice]] = []
    room = CHUNK_BYTES
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            chunk.append((index, slice(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk

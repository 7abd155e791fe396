"""Table of the modules of a model: parameters, FLOPs, activations and output shapes of one forward pass."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from unitrain import validation
from unitrain.backends.checks import check_unwrapped_model
from unitrain.data.batch import map_tensors
from unitrain.errors import ModelError
from unitrain.output import plain_console
from unitrain.randomness import preserve_generators

_WIDTH = 120


@dataclass(frozen=True)
class ModuleSummary:
    """Parameters, FLOPs and activations of one module, including those of its submodules.

    `name` is the name in `named_modules`, empty for the model itself, and `kind` is the class name. `output_shapes` are
    the shapes of the tensors in the output of its first call; a module that is not called has no output shapes.
    `parameters` and `trainable_parameters` are numbers of elements; shared parameters count once. `flops` are the
    floating-point operations of its forward passes as counted by torch's FlopCounterMode: 2 per multiply-add in matrix
    multiplications, convolutions and attention; other operations are not counted. `activation_bytes` is the memory of
    the tensors that its forward passes save for the backward pass, without parameters and buffers. A tensor that
    several modules save is counted only for the module that saves it first.
    """

    name: str
    kind: str
    depth: int
    output_shapes: tuple[tuple[int, ...], ...]
    parameters: int
    trainable_parameters: int
    flops: int
    activation_bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """The result of `summarize`: `modules[0]` is the model, and the other modules follow in the order of
    `named_modules`.

    `parameter_bytes` and `buffer_bytes` are the memory of the parameters and buffers.
    """

    modules: tuple[ModuleSummary, ...]
    parameter_bytes: int
    buffer_bytes: int

    def __rich__(self) -> Table:
        """Return the table for rich. Submodules are indented by their depth."""
        total = self.modules[0]
        table = Table(
            caption=(
                f"{total.parameters:,} parameters, {total.trainable_parameters:,} trainable "
                f"({_format_bytes(self.parameter_bytes)}, buffers {_format_bytes(self.buffer_bytes)}); "
                f"forward pass: {_format_count(total.flops)} FLOPs, "
                f"{_format_bytes(total.activation_bytes)} saved for the backward pass"
            ),
            caption_justify="left",
        )
        table.add_column("module")
        for header in ("output", "parameters", "trainable", "FLOPs", "activations"):
            table.add_column(header, justify="right")
        for module in self.modules:
            name = f"{'  ' * module.depth}{module.name.rpartition('.')[2]} ({module.kind})"
            table.add_row(
                escape(name if module.name else module.kind),
                escape(" ".join(str(list(shape)) for shape in module.output_shapes)),
                f"{module.parameters:,}",
                f"{module.trainable_parameters:,}",
                _format_count(module.flops),
                _format_bytes(module.activation_bytes),
            )
        return table

    def __str__(self) -> str:
        """Return the table as text."""
        console = plain_console(file=io.StringIO(), width=_WIDTH, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())


def summarize(model: nn.Module, inputs: Any, *, max_depth: int | None = None) -> ModelSummary:
    """Run one forward pass of `model`, and return the parameters, FLOPs, activations and output shapes of its modules.

    `inputs` is the argument of the model, a tuple of arguments, or a mapping of keyword arguments. If the model is on
    the meta device, its inputs are moved there, and nothing is computed. `max_depth` limits the nesting of the modules:
    1 shows the model and its children. The model, its buffers (such as running statistics), its mode and the random
    number generators do not change. The activations are those of the current mode: call `model.train()` first for
    training. Does not communicate, so a single rank may call it. Call it before the model is distributed.

    Raises ModelError for a model that is wrapped, has lazy parameters or does not accept the `inputs`, and ConfigError
    for an invalid `max_depth`.
    """
    check_unwrapped_model("summarize(model)", model)
    validation.check_integer(
        "summarize(max_depth=...)", max_depth, 0, "Leave it out to show all modules", optional=True
    )
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "meta":
        inputs = map_tensors(lambda tensor: tensor.to("meta"), inputs)
    recorder = _Recorder(model)
    with _preserved_buffers(model), preserve_generators(device), recorder.recording(), torch.enable_grad():
        _call(model, inputs)
    modules = []
    for name, record in recorder.records.items():
        depth = name.count(".") + 1 if name else 0
        if max_depth is not None and depth > max_depth:
            continue
        module = recorder.modules[name]
        parameters = list(module.parameters())
        modules.append(
            ModuleSummary(
                name=name,
                kind=type(module).__name__,
                depth=depth,
                output_shapes=record.output_shapes,
                parameters=sum(parameter.numel() for parameter in parameters),
                trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                flops=record.flops,
                activation_bytes=record.activation_bytes,
            )
        )
    return ModelSummary(
        tuple(modules),
        sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    )


@dataclass
class _ModuleRecord:
    output_shapes: tuple[tuple[int, ...], ...] = ()
    flops: int = 0
    activation_bytes: int = 0
    calls: int = 0


class _Recorder:
    """Hooks that record the outputs, FLOPs and saved tensors of each module."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.records = {name: _ModuleRecord() for name in self.modules}
        self._stack: list[_ModuleRecord] = []
        self._flops = FlopCounterMode(display=False)
        self._flops_at_start: list[int] = []
        # Keep the storages alive, so that the address of a freed storage is not reused.
        self._storages: dict[int, torch.UntypedStorage] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._add_storage(tensor)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which forward passes are recorded."""
        handles = []
        for name, module in self.modules.items():
            record = self.records[name]
            handles.append(module.register_forward_pre_hook(self._entry_hook(record), prepend=True))
            handles.append(module.register_forward_hook(self._exit_hook(record)))
        try:
            with self._flops, torch.autograd.graph.saved_tensors_hooks(self._count_saved_tensor, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entry_hook(self, record: _ModuleRecord) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            self._stack.append(record)
            self._flops_at_start.append(self._flops.get_total_flops())

        return hook

    def _exit_hook(self, record: _ModuleRecord) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._stack.pop()
            record.flops += self._flops.get_total_flops() - self._flops_at_start.pop()
            if not record.calls:
                record.output_shapes = _shapes_of(output)
            record.calls += 1

        return hook

    def _count_saved_tensor(self, tensor: Tensor) -> Tensor:
        size_bytes = self._add_storage(tensor)
        for record in {id(record): record for record in self._stack}.values():
            record.activation_bytes += size_bytes
        return tensor

    def _add_storage(self, tensor: Tensor) -> int:
        """Add the storage of `tensor`, and return its number of bytes, or 0 if it was already added. For a tensor whose
        layout is not strided, return the number of elements times the element size."""
        if tensor.layout != torch.strided:
            return tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage).cdata
        if key in self._storages:
            return 0
        self._storages[key] = storage
        return storage.nbytes()


def _shapes_of(output: Any) -> tuple[tuple[int, ...], ...]:
    shapes: list[tuple[int, ...]] = []

    def add(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    map_tensors(add, output)
    return tuple(shapes)


@contextmanager
def _preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the buffers of `model`, even if they were replaced with other tensors."""
    buffer_locations = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    copies = [buffer.detach().clone() for _, _, buffer in buffer_locations]
    try:
        yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), saved in zip(buffer_locations, copies, strict=True):
                buffer.copy_(saved)
                setattr(module, name, buffer)


def _call(model: nn.Module, inputs: Any) -> Any:
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ModelError(
            f"summarize could not call {type(model).__name__} with these inputs: {error}. Pass the argument of the "
            "model, a tuple of arguments, or a mapping of keyword arguments."
        ) from error


def _format_count(count: int) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {suffix}"
    return str(count)


def _format_bytes(num_bytes: int) -> str:
    for limit, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {suffix}"
    return f"{num_bytes} B"

"""`summarize` returns numbers that equal a calculation by hand, and does not change the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unitrain import summarize
from unitrain.errors import ConfigError, ModelError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5)))


def modules_by_name(model: nn.Module, inputs: Any, **given: Any) -> dict[str, Any]:
    return {module.name: module for module in summarize(model, inputs, **given).modules}


def test_numbers_equal_those_computed_by_hand() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    inputs = torch.randn(2, 4)
    summary = summarize(model, inputs)
    modules = {module.name: module for module in summary.modules}
    assert list(modules) == ["", "0", "1", "2", "3", "3.0", "3.1"]
    first, second = 2 * 2 * 4 * 8, 2 * 2 * 8 * 3
    assert [module.flops for module in summary.modules] == [first + second, first, 0, 0, second, second, 0]
    assert [module.parameters for module in summary.modules] == [40 + 16 + 27, 40, 16, 0, 27, 27, 0]
    assert modules[""].trainable_parameters == 40 + 16 + 27 - 8
    assert modules["0"].output_shapes == ((2, 8),)
    assert modules["3"].output_shapes == ((2, 3),)
    assert (summary.parameter_bytes, summary.buffer_bytes) == (4 * 83, 4 * 16 + 8)
    assert modules["0"].activation_bytes == inputs.nbytes  # Linear saves its input
    # BatchNorm saves its input, and the means and inverse standard deviations of 8 channels.
    assert modules["1"].activation_bytes == 4 * (16 + 8 + 8)
    assert modules["2"].activation_bytes == 4 * 16  # ReLU saves its output; the next layer saves the same tensor
    assert modules["3.0"].activation_bytes == 0
    assert modules[""].activation_bytes == sum(modules[name].activation_bytes for name in "0123")


def test_activation_bytes_equal_the_tensors_saved_by_the_graph() -> None:
    model, inputs = network(), torch.randn(16, 4)
    held: dict[int, Any] = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    expected = sum(storage.nbytes() for address, storage in held.items() if address not in known)
    assert summarize(model, inputs).modules[0].activation_bytes == expected
    del output


def test_parameters_buffers_modes_and_random_state_do_not_change() -> None:
    model = network()
    model[1].eval()
    parameter_ids = [id(parameter) for parameter in model.parameters()]
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    state = torch.get_rng_state()
    buffers = [id(buffer) for buffer in model.buffers()]
    model[1].train()
    summarize(model, torch.randn(2, 4, generator=torch.Generator().manual_seed(1)))
    model[1].eval()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(parameter) for parameter in model.parameters()] == parameter_ids
    assert [id(buffer) for buffer in model.buffers()] == buffers
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_model_on_the_meta_device_has_the_same_numbers() -> None:
    real = summarize(network(), torch.randn(2, 4))
    with torch.device("meta"):
        meta = network()
    assert summarize(meta, torch.randn(2, 4)) == real


class Shared(nn.Module):
    """A model that calls one layer twice, does not call another layer, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.same = self.layer

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Any]:
        return {"sum": self.layer(first) + self.same(second), "parts": [first, None]}


def test_repeated_calls_are_summed_and_nested_outputs_are_listed() -> None:
    inputs = torch.randn(3, 4), torch.randn(3, 4)
    modules = modules_by_name(Shared(), inputs)
    assert modules == modules_by_name(Shared(), {"first": inputs[0], "second": inputs[1]})
    assert modules[""].output_shapes == ((3, 4), (3, 4))
    assert modules["layer"].flops == 2 * (2 * 3 * 4 * 4)
    assert (modules["unused"].flops, modules["unused"].output_shapes) == (0, ())
    assert modules[""].parameters == 40


def test_depth_is_limited_and_the_table_is_printed() -> None:
    text = str(summarize(network(), torch.randn(2, 4), max_depth=1))
    assert "3 (Sequential)" in text
    assert "Dropout" not in text
    assert "[2, 8]" in text
    assert "83 parameters, 83 trainable (332 B, buffers 72 B); forward pass: 224 FLOPs" in text
    assert str(summarize(network(), torch.randn(2, 4), max_depth=0)).count("Sequential") == 1


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"summarize\(max_depth=...\) must be at least 0, got -1"):
        summarize(network(), torch.randn(2, 4), max_depth=-1)
    with pytest.raises(ModelError, match=r"summarize\(model\) must be a torch.nn.Module, got 3"):
        summarize(3, torch.randn(2, 4))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="has lazy parameters"):
        summarize(nn.LazyLinear(3), torch.randn(2, 4))
    with pytest.raises(ModelError, match="could not call Sequential with these inputs"):
        summarize(network(), (torch.randn(2, 4), 1))
    model = network()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        summarize(model, torch.randn(2, 5))
    assert not any(module._forward_hooks for module in model.modules())

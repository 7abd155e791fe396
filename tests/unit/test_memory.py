"""`unitrain memory`: saved tensors, tensor bytes, predictions and the report, in one process."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from unitrain.backends.base import ShardingMode
from unitrain.errors import UnsupportedError
from unitrain.memory import process_memory, report
from unitrain.memory.record import BlockRecord, RankMemory, read_records
from unitrain.memory.saved_tensors import SavedStorage, SavedTensorTracker, checkpointing_by_class
from unitrain.memory.savings import Usage, list_savings, persistent_bytes
from unitrain.memory.tensor_bytes import (
    element_bytes,
    formula_state_bytes,
    is_state_complete,
    state_tensors,
    storage_bytes,
    storages_of,
)
from unitrain.modules.activation_checkpointing import checkpoint_activations

WIDTH, CLASSES, BATCH = 32, 1000, 16
MB = 2**20


class Block(nn.Module):
    """A block that saves several tensors. With `is_checkpointed`, torch recomputes them in the backward pass."""

    is_checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self.compute, inputs, use_reentrant=True)
        return self.compute(inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs + self.layers(inputs))


def build_network(blocks: int = 5, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, classes))


@contextmanager
def track_saved_tensors(model: nn.Module) -> Iterator[tuple[SavedTensorTracker, list[tuple[int, list[SavedStorage]]]]]:
    """Track the saved tensors of `model`. Yield the tracker and a list of (bytes, storages) at each local maximum."""
    maxima: list[tuple[int, list[SavedStorage]]] = []
    saved = SavedTensorTracker(lambda: maxima.append((saved.total_bytes, saved.update_sizes())), lambda module: None)
    saved.excluded_addresses = set(storages_of([*model.parameters(), *model.buffers()]))
    saved.start()
    try:
        yield saved, maxima
    finally:
        saved.stop()


def measure_step(model: nn.Module, classes: int = CLASSES) -> tuple[int, list[SavedStorage]]:
    """Train one step. Return the maximum number of saved bytes and the storages at that time."""
    inputs = torch.randn(BATCH, WIDTH)
    with track_saved_tensors(model) as (saved, maxima):
        cross_entropy(model(inputs), torch.randint(classes, (BATCH,))).backward()
        assert saved.total_bytes == 0, "the backward pass must release all saved tensors"
        assert not saved.update_sizes()
    return max(maxima, key=lambda one: one[0])


def test_bytes_of_saved_tensors_equal_a_calculation_by_hand() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    with track_saved_tensors(model) as (saved, maxima):
        loss = model(torch.randn(10, 8)).square().mean()
        # The inputs of both linear layers and of `square`. The output that the sigmoid saves is the second of them.
        assert saved.total_bytes == 4 * 10 * (8 + 16 + 4)
        del loss
        assert saved.total_bytes == 0, "deleting the loss must release the graph"
    assert len(maxima) == 1


def test_saved_tensors_of_a_compiled_model_equal_those_of_the_plain_model() -> None:
    found = []
    for is_compiled in (False, True):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        if is_compiled:
            model.compile(backend="aot_eager")
        with track_saved_tensors(model) as (saved, _):
            loss = model(torch.randn(10, 8)).square().mean()
            found.append(saved.total_bytes)
            loss.backward()
            assert saved.total_bytes == 0
    assert found == [4 * 10 * (8 + 16 + 16 + 4)] * 2


def test_retained_graph_keeps_its_saved_tensors() -> None:
    model = nn.Linear(8, 16)
    with track_saved_tensors(model) as (saved, _):
        loss = model(torch.randn(10, 8)).exp().sum()
        loss.backward(retain_graph=True)
        assert saved.total_bytes == 4 * 10 * (8 + 16)
        loss.backward()
        assert saved.total_bytes == 0


def test_storages_at_the_same_address_are_counted_separately() -> None:
    """FSDP frees gathered parameters that autograd has saved. Other tensors may then use the same addresses."""
    factor = torch.ones((), requires_grad=True)
    memory = bytearray(MB)
    with track_saved_tensors(nn.Identity()) as (saved, _):
        storages = [torch.frombuffer(memory, dtype=torch.int8) for _ in range(2)]
        assert storages[0].data_ptr() == storages[1].data_ptr()
        products = [factor * values[:4] for values in storages]
        assert len(saved.update_sizes()) == 2
        assert saved.total_bytes == 2 * MB
        products.clear()
        assert not saved.update_sizes()
        assert saved.total_bytes == 0


def test_freed_storage_counts_zero_bytes() -> None:
    factor = torch.ones((), requires_grad=True)
    with track_saved_tensors(nn.Identity()) as (saved, _):
        gathered = torch.empty(MB, dtype=torch.int8)
        product = factor * gathered[:4]
        assert saved.total_bytes == MB
        gathered.untyped_storage().resize_(0)
        assert [storage.size_bytes for storage in saved.update_sizes()] == [0]
        assert saved.total_bytes == 0
        del product
        assert not saved.update_sizes()


def test_gradients_are_the_same_while_saved_tensors_are_tracked() -> None:
    found = []
    for is_tracked in (False, True):
        model = build_network(2)
        torch.manual_seed(1)
        inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
        with track_saved_tensors(model) if is_tracked else io.StringIO():
            loss = cross_entropy(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(gradient.square().sum() for gradient in gradients)).backward()  # a gradient penalty
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("classes", [10, 1000], ids=["blocks dominate", "outputs dominate"])
def test_checkpointed_activations_equal_the_prediction(classes: int) -> None:
    """With `checkpoint_activations`, autograd keeps the predicted number of bytes, and reentrant checkpointing reaches
    the predicted peak.

    In the reentrant variant, autograd also saves the recomputed tensors.
    """
    (predicted,) = [
        block for block in checkpointing_by_class(measure_step(build_network(classes=classes), classes)[1])
        if block.name == "Block"
    ]  # fmt: skip
    assert predicted.calls == 5

    model = build_network(classes=classes)
    checkpoint_activations(model, Block)
    kept, storages = measure_step(model, classes)
    assert kept == predicted.kept_bytes
    assert "Block" not in {block.name for block in checkpointing_by_class(storages)}

    model = build_network(classes=classes)
    for block in model.children():
        block.is_checkpointed = isinstance(block, Block)
    assert measure_step(model, classes)[0] == predicted.peak_bytes


def test_classes_without_submodules_or_with_one_outermost_block_are_not_listed() -> None:
    assert {block.name for block in checkpointing_by_class(measure_step(build_network())[1])} == {"Block"}
    assert not checkpointing_by_class(measure_step(build_network(1))[1])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, all": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_bytes_of_each_optimizer_equal_the_formula_within_one_percent(name: str) -> None:
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 100))
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    measured, formula = storage_bytes(state_tensors(optimizer)), formula_state_bytes(optimizer)
    assert formula is not None
    assert abs(measured - formula) <= 0.01 * formula


def test_formula_is_none_for_unknown_optimizers() -> None:
    assert formula_state_bytes(torch.optim.Adafactor(nn.Linear(2, 2).parameters())) is None


def test_shared_storage_is_counted_once() -> None:
    bucket = torch.zeros(100)
    views = [bucket[:40], bucket[40:80], bucket[:40]]
    assert storage_bytes(views) == 400
    assert element_bytes([*views, views[0]]) == 480
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 8), (10, 8), check_invariants=True)
    assert element_bytes([sparse]) == 32


def test_state_is_incomplete_only_if_a_parameter_that_needs_state_has_none() -> None:
    """SGD has state only for parameters with momentum."""
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    layers(torch.ones(4, 2)).sum().backward()
    assert not is_state_complete(optimizer), "the momentum is missing before the first step"
    optimizer.step()
    assert is_state_complete(optimizer)
    assert not is_state_complete(torch.optim.Adam([*layers.parameters()]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_of_adam_per_parameter_equal_the_published_formulas(ranks: int) -> None:
    sizes = {"parameters": 4, "gradients": 4, "state": 8}
    by_stage = {
        stage: sum(persistent_bytes(**sizes, shard=stage, ranks=ranks).values())
        for stage in ("none", "state", "gradients", "parameters")
    }
    assert by_stage == pytest.approx(
        {"none": 16, "state": 8 + 8 / ranks, "gradients": 4 + 12 / ranks, "parameters": 16 / ranks}
    )


def create_record(**changes: Any) -> RankMemory:
    values: dict[str, Any] = {
        "rank": 0, "size": 2, "backend": "ddp", "device": "cpu", "optimizers": ["Adam"],
        "settings": {"precision": "fp32", "batch_size": 8, "shard": "none", "gradient_accumulation_steps": 1},
        "steps": 3, "parameters": 100 * MB, "trained": 100 * MB, "buffers": 0, "gradients": 100 * MB,
        "gradient_storages": 100 * MB, "buckets": 0, "fusion_buffer": 0, "state": 200 * MB, "is_state_complete": True,
        "formula_state": 200 * MB, "average": 0, "activations": 400 * MB, "float32_activations": 300 * MB,
        "early_gradients": 100 * MB, "activations_at_peak": 400 * MB, "gradients_at_peak": 100 * MB,
        "blocks": [BlockRecord(name="Layer", calls=6, kept_bytes=0, peak_bytes=0)],
        "other": 100 * MB, "forward_backward_peak": 1000 * MB, "step_peak": 600 * MB, "startup_peak": 0,
    }  # fmt: skip
    return RankMemory(**values | changes)


def compute_savings(ranks: int, *records: RankMemory) -> dict[str, int]:
    return {saving.setting: saving.saved_bytes for saving in list_savings(Usage.of_ranks(records), ranks)}


def test_savings_are_differences_of_the_peak() -> None:
    found = compute_savings(4, create_record())
    assert found.pop('checkpoint_activations=("Layer",)') == 400 * MB
    assert found.pop("batch_size=4, gradient_accumulation_steps=2") == 200 * MB
    assert found.pop('precision="bf16"') == 150 * MB
    expected = {"state": 150 * MB, "gradients": 225 * MB, "parameters": 300 * MB}
    assert found == {f'shard="{stage}"': size for stage, size in expected.items() if stage in get_args(ShardingMode)}


@pytest.mark.parametrize(("batch_size", "setting"), [(9, "batch_size=3, gradient_accumulation_steps=3"),
                                                     (7, "batch_size=1, gradient_accumulation_steps=7")])  # fmt: skip
def test_suggested_smaller_batch_keeps_the_global_batch_size(batch_size: int, setting: str) -> None:
    assert setting in compute_savings(
        4, create_record(settings={"precision": "fp32", "batch_size": batch_size, "shard": "none"})
    )


def test_suggested_smaller_batch_scales_the_accumulation_schedule(tmp_path: Path) -> None:
    settings = {"precision": "fp32", "batch_size": 8, "shard": "none", "gradient_accumulation_steps": {0: 1, 4: 4}}
    create_record(size=1, settings=settings).write(tmp_path)
    records = read_records(tmp_path)
    assert records is not None
    assert "batch_size=4, gradient_accumulation_steps={0: 2, 4: 8}" in compute_savings(4, *records)


def test_saving_of_activations_is_limited_by_the_peak_of_the_optimizer_step() -> None:
    found = compute_savings(2, create_record(step_peak=900 * MB))
    assert found['checkpoint_activations=("Layer",)'] == found['precision="bf16"'] == 100 * MB
    assert 'precision="bf16"' not in compute_savings(2, create_record(step_peak=1000 * MB))


def test_saving_of_activations_is_limited_by_gradients_created_in_backward() -> None:
    """On one rank, the backward pass allocates the gradients while it frees activations."""
    found = compute_savings(8, create_record(size=1, early_gradients=0, gradients_at_peak=0))
    assert found['checkpoint_activations=("Layer",)'] == 300 * MB


def test_settings_in_use_are_not_suggested() -> None:
    in_use = {"precision": "bf16", "batch_size": 1, "shard": "state"}
    sharded = create_record(settings=in_use, state=100 * MB, is_state_complete=False, blocks=[])
    found = compute_savings(2, sharded, sharded)
    later = [stage for stage in get_args(ShardingMode) if stage not in ("none", "state")]
    assert set(found) == {f'shard="{stage}"' for stage in later}
    assert Usage.of_ranks([sharded, sharded]).state == 200 * MB
    # A custom training loop has no settings, so sharding is detected from the optimizer state.
    assert Usage.of_ranks([create_record(settings={}, is_state_complete=False)] * 2).shard == "state"


def summarize_record(ranks: int = 4, **changes: Any) -> str:
    usage = Usage.of_ranks([create_record(**changes)])
    return report.summarize(usage, list_savings(usage, ranks), ranks)


def test_summary_names_the_largest_part_and_the_best_setting() -> None:
    found = summarize_record()
    assert found.startswith("Activations are the largest part of training memory: 400 MB of 900 MB per rank (44%). ")
    assert 'checkpoint_activations=("Layer",) would save the most: 400 MB (44%). ' in found
    assert "Sharding over 4 ranks would save at most" in found
    without = {"activations": 0, "activations_at_peak": 0, "float32_activations": 0, "blocks": []}
    found = summarize_record(**without, state=600 * MB)
    assert found.startswith("Optimizer state is the largest part of training memory: 600 MB of 900 MB per rank (67%). ")
    assert "over 4 ranks would save the most: " in found
    found = summarize_record(**without, forward_backward_peak=10_000 * MB, other=9_400 * MB, ranks=1)
    assert found.endswith(
        "Python, libraries and data need 9.18 GB, so none of the settings would save a significant part of the memory."
    )


def test_rows_of_the_report_add_up_to_the_peak() -> None:
    for changes in ({}, {"step_peak": 2000 * MB}, {"fusion_buffer": 16 * MB, "buffers": MB, "average": 5 * MB}):
        usage = Usage.of_ranks([create_record(**changes)])
        rows = report.memory_rows(usage)
        assert sum(row.at_peak for row in rows) == usage.record.peak
        assert {row.name: row.predicted for row in rows}["optimizer state"] == 200 * MB


def test_the_report_fits_80_columns() -> None:
    output = io.StringIO()
    block = BlockRecord(name="TransformerEncoderLayer", calls=48, kept_bytes=MB, peak_bytes=MB)
    report.show([create_record(blocks=[block])] * 2, 8, Console(file=output, width=80))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("checkpoint_activations=" in line for line in lines)
    assert any(line.split()[:1] == ["peak"] and "1000 MB" in line for line in lines)


def test_peak_of_the_process_includes_released_memory() -> None:
    memory = process_memory.process_memory(torch.device("cpu"))
    memory.reset_peak()
    before = memory.current()
    assert memory.peak() < before + 16 * MB
    tensor = torch.ones(16 * MB)  # 64 MiB
    del tensor
    assert 60 * MB < memory.peak() - before < 80 * MB
    memory.reset_peak()
    assert memory.peak() < before + 16 * MB


def test_system_on_which_the_peak_cannot_be_reset_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with pytest.raises(UnsupportedError, match=r"Run the program on Linux, in a container with a writable /proc\.$"):
        process_memory.process_memory(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="got the device 'meta'"):
        process_memory.process_memory(torch.device("meta"))

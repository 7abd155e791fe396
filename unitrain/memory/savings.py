"""Predicted savings of each setting, based on the record of one rank.

Bytes per rank for parameters P, gradients G and optimizer state S on d ranks, with the stages of ZeRO
(https://arxiv.org/abs/1910.02054): P + G + S / d, P + (G + S) / d, and (P + G + S) / d. For Adam in float32, these are
8 + 8 / d, 4 + 12 / d and 16 / d bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from unitrain.accumulation import scale_accumulation
from unitrain.backends.base import ShardingMode
from unitrain.memory.record import RankMemory

# The stages of ZeRO, and whether each of them shards the parameters, the gradients and the optimizer state.
_STAGES = {
    "none": (False, False, False),
    "state": (False, False, True),
    "gradients": (False, True, True),
    "parameters": (True, True, True),
}
_MIN_PEAK_FRACTION = 0.005  # smaller savings are not listed


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The memory of the rank with the highest peak, in bytes, and the complete optimizer state.

    `gradients` are the gradients in memory at the peak of the forward and backward pass.
    """

    record: RankMemory
    gradients: int
    state: int
    shard: str

    @classmethod
    def of_ranks(cls, records: Sequence[RankMemory]) -> Usage:
        """Return the memory of the rank with the highest peak in the `records` of all ranks."""
        highest = max(records, key=lambda record: record.peak)
        is_complete = highest.size == 1 or all(record.is_state_complete for record in records)
        shard = highest.settings.get("shard") or ("none" if is_complete else "state")
        return cls(
            record=highest,
            gradients=highest.gradients_at_peak,
            state=highest.state if shard == "none" else sum(record.state for record in records),
            shard=shard,
        )

    @property
    def batch_size(self) -> int | None:
        """The number of samples per rank and micro-batch, or None if it is unknown."""
        return self.record.settings.get("batch_size")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The predicted reduction of the peak by a setting, in bytes. `is_estimate` is False if the reduction is computed
    from the run's tensors. `note` states the cost or the condition.
    """

    setting: str
    saved_bytes: int
    is_estimate: bool
    note: str = ""


def persistent_bytes(*, parameters: int, gradients: int, state: int, shard: str, ranks: int) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer state on one of `ranks` ranks with `shard`.

    The arguments are the bytes of the complete model without sharding.
    """
    sharded = _STAGES[shard]
    sizes = {"parameters": parameters, "gradients": gradients, "state": state}
    return {
        name: size / ranks if is_sharded else float(size)
        for (name, size), is_sharded in zip(sizes.items(), sharded, strict=True)
    }


def list_savings(usage: Usage, ranks: int) -> list[Saving]:
    """Return how much each setting reduces the peak of the run, largest savings first. Sharding is predicted for
    `ranks` ranks.

    Settings that the script already uses, or that save almost nothing, are not listed.
    """
    record = usage.record
    savings = [
        *_sharding(usage, ranks),
        *_checkpointing(record),
        *_smaller_batch(record, usage.batch_size),
        *_precision(record),
    ]
    large_savings = [saving for saving in savings if saving.saved_bytes >= _MIN_PEAK_FRACTION * record.peak]
    return sorted(large_savings, key=lambda saving: -saving.saved_bytes)


def _sharding(usage: Usage, ranks: int) -> list[Saving]:
    record = usage.record
    stages = [stage for stage in _STAGES if stage in get_args(ShardingMode)]
    if ranks < 2 or usage.shard not in stages:
        return []
    shards_parameters, shards_gradients, _ = _STAGES[usage.shard]
    parameters = record.parameters * (record.size if shards_parameters else 1)
    gradients = usage.gradients * (record.size if shards_gradients else 1)
    current_bytes = record.parameters + usage.gradients + record.state
    savings = []
    for stage in stages[stages.index(usage.shard) + 1 :]:
        sizes = persistent_bytes(
            parameters=parameters, gradients=gradients, state=usage.state, shard=stage, ranks=ranks
        )
        saved = current_bytes - round(sum(sizes.values()))
        note = "plus the gathered parameters of one block at a time" if stage == "parameters" else ""
        savings.append(Saving(setting=f'shard="{stage}"', saved_bytes=saved, is_estimate=False, note=note))
    return savings


def _checkpointing(record: RankMemory) -> list[Saving]:
    """Return the saving from checkpointing the class of blocks that leaves the fewest bytes of activations."""
    blocks = sorted(record.blocks, key=lambda block: block.peak_bytes)
    return [
        Saving(
            setting=f'checkpoint_activations=("{block.name}",)',
            saved_bytes=_peak_reduction(record, block.peak_bytes),
            is_estimate=False,
            note=f"recomputes the forward pass of {block.calls} blocks",
        )
        for block in blocks[:1]
    ]


def _smaller_batch(record: RankMemory, batch_size: int | None) -> list[Saving]:
    if batch_size == 1:
        return []
    # A divisor of the batch size keeps the global batch size.
    factor = next(number for number in range(2, (batch_size or 2) + 1) if (batch_size or 2) % number == 0)
    reduced = "half the batch" if batch_size is None else f"batch_size={batch_size // factor}"
    steps = scale_accumulation(record.settings.get("gradient_accumulation_steps"), factor)
    return [
        Saving(
            setting=f"{reduced}, gradient_accumulation_steps={steps}",
            saved_bytes=_peak_reduction(record, record.activations // factor),
            is_estimate=True,
        )
    ]


def _precision(record: RankMemory) -> list[Saving]:
    if record.settings.get("precision", "fp32") != "fp32":
        return []
    saved = _peak_reduction(record, record.activations - record.float32_activations // 2)
    return [
        Saving(
            setting='precision="bf16"',
            saved_bytes=saved,
            is_estimate=True,
            note="upper bound; results differ by rounding",
        )
    ]


def _peak_reduction(record: RankMemory, activations: int) -> int:
    """Return how much the peak decreases if activations take only `activations` bytes.

    At the end of the backward pass, all gradients and no activations are in memory. During an optimizer step, no
    activations are in memory.
    """
    current_bytes = record.activations_at_peak + record.gradients_at_peak
    remaining_bytes = max(activations + record.early_gradients, record.gradient_storages)
    return record.peak - max(record.forward_backward_peak - (current_bytes - remaining_bytes), record.step_peak)

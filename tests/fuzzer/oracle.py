"""Computes the expected result of a fuzzer case that uses the Trainer. The computation uses plain torch in one process,
with the global batch and float64.

This module does not use unitrain. The only input from the run under test is the trace: the samples of each step, which
depend on random shuffling. `check_samples` checks the trace, and `Oracle` trains on it. Interruptions, checkpoints,
backends, numbers of ranks, accumulation and workers are not simulated, because they must not change the result. The
exceptions are properties that the contract defines per rank: unsynchronized BatchNorm and other state that a forward
pass changes depend on the samples of one rank, and compression rounds the gradients of each rank.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from . import parts
from .cases import BATCHES_PER_STEP

Case = dict[str, Any]
LOCAL_STATE = {"norm", "buffer", "max_norm"}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Piece(NamedTuple):
    """The samples of one forward pass. `live` is False for a dummy batch."""

    rank: int
    numbers: list[int]
    live: bool


class Step(NamedTuple):
    """One optimizer step of the trace: the epoch, counted from 0, and the pieces of each micro-batch in rank order."""

    epoch: int
    micro_steps: list[list[Piece]]

    @property
    def samples(self) -> list[int]:
        return [
            number for micro_step in self.micro_steps for piece in micro_step if piece.live for number in piece.numbers
        ]


# Checks of the samples of a run


def check_samples(case: Case, trace: list[Step]) -> list[str]:
    """Return descriptions of the errors in the samples of the steps.

    Each step must use the next samples in the order of the epoch.
    """
    wrong = []
    for epoch in sorted({step.epoch for step in trace}):
        steps = [step.samples for step in trace if step.epoch == epoch]
        is_complete = epoch < max(step.epoch for step in trace) or case["_ended"]
        wrong += [f"samples: epoch {epoch + 1}: {text}" for text in check_epoch(case, epoch, steps, is_complete)]
    return wrong


def check_epoch(case: Case, epoch: int, steps: list[list[int]], is_complete: bool) -> Iterator[str]:
    batches = _samples_by_step(case, epoch)
    if batches is not None:
        expected = [sorted(_without_bad_samples(case, batch)) for batch in batches]
        found = [sorted(step) for step in steps]
        if found != (expected if is_complete else expected[: len(found)]) and not (
            case["collate"] == "skip"
            and _equals_except_bad_samples(found, batches[: len(found)], is_complete and len(found) < len(batches))
        ):
            at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
            yield f"step {at + 1} of {len(found)}: {found[at : at + 2]}, not {expected[at : at + 2]} of {len(expected)}"
        return
    # The order is random: only the set of samples and the number of samples per step are known.
    counts = Counter(number for step in steps for number in step)
    allowed, most, length = _possible_samples(case)
    expected_length = length - length % case["global_batch"] if case["drop_last"] else length
    lengths = [len(step) for step in steps]
    if case["collate"] != "skip":
        sizes = [case["global_batch"]] * (expected_length // case["global_batch"])
        sizes += [expected_length % case["global_batch"]] if expected_length % case["global_batch"] else []
        if case["source"] != "own" and lengths != (sizes if is_complete else sizes[: len(lengths)]):
            yield f"steps of {lengths} samples, not of {sizes}"
    for number, times in counts.items():
        if number not in allowed or times > most:
            yield f"sample {number} was used {times} times"
    missing = [number for number in _without_bad_samples(case, sorted(allowed)) if number not in counts]
    all_used = most == 1 and len(allowed) == length and not case["drop_last"] and case["uneven"] != "drop"
    if is_complete and all_used and missing:
        yield f"samples {missing} were not used"


def _possible_samples(case: Case) -> tuple[set[int], float, int]:
    """Return the samples that an epoch in random order may contain, the maximum count of each, and the number of
    samples."""
    count = case["samples"] if case["sampler"] == "twins" else len(parts.training_samples(case)[0])
    everything = set(parts.subset_indices(case)) if case["source"] == "subset" else set(range(count))
    length = len(everything)
    positions = parts.subset_indices(case) if case["source"] == "subset" else list(range(count))
    part = parts.part_length(length)
    return {
        "random_part": lambda: ({positions[i] for i in range(part)}, 1, part),
        "random_few": lambda: (everything, 1, part),
        "replacement": lambda: (everything, math.inf, part),
        "subset_random": lambda: ({positions[i] for i in range(1, length)}, 1, length - 1),
        "weighted": lambda: (everything, math.inf, length),
    }.get(case["sampler"], lambda: (everything, 1, length))()


def _samples_by_step(case: Case, epoch: int) -> list[list[int]] | None:
    """Return the samples of each step of an epoch, or None if the order is random."""
    count, source, size = len(parts.training_samples(case)[0]), case["source"], case["segments"][-1]["size"]
    if source in ("batches", "map_batches") or case["sampler"] == "batches":
        batches = parts.split_into_batches(case, count)
        if case["uneven"] == "drop":
            batches = batches[: len(batches) // BATCHES_PER_STEP * BATCHES_PER_STEP]
        groups = [batches[at : at + BATCHES_PER_STEP] for at in range(0, len(batches), BATCHES_PER_STEP)]
        return [[number for batch in group for number in batch] for group in groups]
    if source == "own":
        return None if case["workers"] else _steps_of_own_streams(case, size)
    order: list[int] = parts.subset_indices(case) if source == "subset" else list(range(count))
    if case["shuffle"] or case["sampler"] not in (None, "sequential_part", "own"):
        return None
    if case["sampler"] == "sequential_part":
        order = order[: parts.part_length(len(order))]
    if case["sampler"] == "own":
        order = [order[i] for i in parts.custom_order(len(order), epoch)]
    step_size = case["global_batch"]
    steps = [order[at : at + step_size] for at in range(0, len(order), step_size)]
    return [step for step in steps if len(step) == step_size or not case["drop_last"]]


def steps_in_epoch(case: Case) -> int:
    """Return the number of steps of an epoch."""
    steps = _samples_by_step(case, 0)
    return -(-_possible_samples(case)[2] // case["global_batch"]) if steps is None else len(steps)


def _steps_of_own_streams(case: Case, size: int) -> list[list[int]]:
    """Return the steps for streams that differ between ranks. Each rank uses the next samples of its stream."""
    accumulate = case["segments"][-1]["accumulate"]
    length = case["global_batch"] // size // accumulate
    streams = []
    for rank in range(size):
        own = list(range(size - 1 - rank, case["samples"], size))
        batches = [own[at : at + length] for at in range(0, len(own), length)]
        streams.append([batch for batch in batches if len(batch) == length or not case["drop_last"]])
    steps = []
    for at in range(0, max(map(len, streams)), accumulate):
        taken = [stream[at : at + accumulate] for stream in streams]
        if case["uneven"] == "drop" and any(len(own) < accumulate for own in taken):
            break
        steps.append([number for own in taken for batch in own for number in batch])
    return steps


def _without_bad_samples(case: Case, numbers: list[int]) -> list[int]:
    return [number for number in numbers if case["collate"] != "skip" or not parts.is_bad(number)]


def _equals_except_bad_samples(found: list[list[int]], expected: list[list[int]], too_few: bool) -> bool:
    """Return whether each step contains all good samples of its batch in `expected`, no sample twice, and no other
    samples except bad ones of the batch. Return False if there are `too_few` steps."""
    return not too_few and all(
        set(step) <= set(batch)
        and {n for n in batch if not parts.is_bad(n)} <= set(step)
        and len(set(step)) == len(step)
        for step, batch in zip(found, expected, strict=False)
    )


# Training on the samples


class Oracle:
    """Runs the steps of the case in order, on the samples of the trace."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.features = set(case["features"])
        self.model = parts.Network(case)
        self.optimizer = parts.create_optimizer(case, self.model, late=False)
        self.scheduler = parts.create_scheduler(case, self.optimizer, case.get("total_steps"))
        self.forward, self.loss_fn = parts.Forward(case), parts.loss_function(case)
        self.inputs, self.targets = parts.samples(case)
        self.average: nn.Module | None = copy.deepcopy(self.model) if case["ema"] else None
        if case["change"] and case["change"][0] == "unfreeze":
            self.model.first.requires_grad_(False)
        self.steps = 0

    def train(self, trace: list[Step]) -> dict[str, Any]:
        """Train, and return the outcome of the complete run."""
        rates: list[list[float]] = []
        epochs: dict[int, dict[str, float]] = {}
        results: dict[str, float] = {}
        early_stopping = _EarlyStopping(self.case)
        for position, step in enumerate(trace):
            if position == 0 or trace[position - 1].epoch != step.epoch:
                self.losses = self.counted = 0.0
            if early_stopping.is_stopped:
                break
            rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self._step(step)
            last = position + 1 == len(trace)
            if last or trace[position + 1].epoch != step.epoch:
                results = {"train_loss": self.losses / self.counted if self.counted else 0.0, **self._validate()}
                if not last or self.case["_ended"]:
                    epochs[step.epoch] = results
                    early_stopping.update(results)
                    self._step_epoch_scheduler(results)
        return {
            "rates": rates,
            "epochs": epochs,
            "results": results,
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "average": None if self.average is None else dict(self.average.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "counting": self.steps,
            **self._run_extra_call(),
        }

    def _step(self, step: Step) -> None:
        case = self.case
        self.model.train()
        self._set_gradients(step)
        if case["clip"] is not None:
            held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(held, case["clip"])
        factor = self._rate_factor()
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] /= factor
        self.model.zero_grad(set_to_none=True)
        if self.scheduler is not None and case["scheduler_every"] == "step":
            self.scheduler.step()
        self._update_average()
        self.steps += 1
        if case["change"] and self.steps == case["change"][1]:
            parts.apply_change(case, self.model, self.optimizer)

    def _set_gradients(self, step: Step) -> None:
        """Set every gradient to the gradient of the mean loss over the samples, or tokens, of the step.

        Each rank starts the step with rank 0's buffers, and rank 0's buffers are kept.
        """
        total = self._count_samples_or_tokens(step.samples)
        by_rank: dict[int, dict[str, Tensor]] = {}
        before = after = [buffer.clone() for buffer in self.model.buffers()]
        for rank, pieces in self._samples_by_forward(step).items():
            self._set_buffers(before)
            for numbers in pieces:
                self._backward(numbers, total)
            if rank == 0:
                after = [buffer.clone() for buffer in self.model.buffers()]
            if self.case["compression"] in HALF:
                by_rank[rank] = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
                self.model.zero_grad(set_to_none=True)
        self._set_buffers(after)
        self.counted += total
        for name, parameter in self.model.named_parameters():
            gradients = [own[name] for _, own in sorted(by_rank.items()) if name in own]
            if gradients:
                parameter.grad = self._round_gradient(gradients)

    def _backward(self, numbers: list[int], total: float) -> None:
        output, target = self.forward(self.model, self._batch(numbers))
        loss = self.loss_fn(output, target)
        value = loss[0] if isinstance(loss, tuple) else loss * len(numbers)
        self.losses += float(value.detach())
        (value / max(total, 1)).backward()

    def _samples_by_forward(self, step: Step) -> dict[int, list[list[int]]]:
        """Return the samples of each forward pass by rank. All samples of the step form one forward pass, unless the
        results of samples depend on each other, or compression rounds the gradient of each rank. Dummy batches are
        excluded from all sums and statistics.
        """
        live = [[piece for piece in micro_step if piece.live] for micro_step in step.micro_steps]
        if self.features & LOCAL_STATE or self.case["compression"] in HALF:
            ranks = sorted({piece.rank for pieces in live for piece in pieces})
            return {rank: [p.numbers for pieces in live for p in pieces if p.rank == rank] for rank in ranks}
        if "sync_norm" in self.features:
            merged = [[number for piece in pieces for number in piece.numbers] for pieces in live]
            return {0: [numbers for numbers in merged if numbers]}
        return {0: [step.samples]} if step.samples else {}

    def _set_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.model.buffers(), values, strict=True):
            buffer.copy_(value)

    def _round_gradient(self, gradients: list[Tensor]) -> Tensor:
        """Return round(sum(round(g))) over the gradients of the ranks, summed in float32 if there are several ranks."""
        dtype = HALF[self.case["compression"]]

        def rounded(real: list[Tensor]) -> Tensor:
            if self.case["segments"][-1]["size"] == 1:
                return real[0].to(dtype).double()
            total = torch.zeros_like(real[0], dtype=torch.float32)
            for part in real:
                total += part.to(dtype).float()
            return total.to(dtype).double()

        if gradients[0].is_complex():
            return torch.view_as_complex(rounded([torch.view_as_real(part).contiguous() for part in gradients]))
        return rounded(gradients)

    def _count_samples_or_tokens(self, numbers: list[int]) -> float:
        if self.case["loss"] != "tokens":
            return len(numbers)
        return int((self._batch(numbers)[1] != parts.MASKED).sum())

    def _batch(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        return self.inputs[numbers].clone(), self.targets[numbers]

    def _rate_factor(self) -> float:
        """Return the factor of the learning rates: 1 at the start, and the full factor after the warm-up."""
        case = self.case
        if case["lr_scaling"] == "none":
            return 1.0
        ratio = case["global_batch"] / 4
        full = ratio if case["lr_scaling"] == "linear" else math.sqrt(ratio)
        return 1.0 + (full - 1.0) * min(1.0, self.steps / case["warmup"]) if case["warmup"] else full

    @torch.no_grad()
    def _update_average(self) -> None:
        if self.average is None:
            return
        decay = self.case["ema"] if self.steps else 0.0
        for averaged, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            averaged.copy_(decay * averaged + (1 - decay) * weight)
        for copied, buffer in zip(self.average.buffers(), self.model.buffers(), strict=True):
            copied.copy_(buffer)

    def _step_epoch_scheduler(self, results: dict[str, float]) -> None:
        if self.scheduler is None or self.case["scheduler_every"] != "epoch":
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(results.get("val_loss", results["train_loss"]))
        else:
            self.scheduler.step()

    def _validate(self) -> dict[str, float]:
        if self.case["validation"] is None:
            return {}
        return {f"val_{name}": value for name, value in self.evaluate().items()}

    def evaluate(self) -> dict[str, float]:
        """Return the loss and each metric over all validation samples at once."""
        output, target = self._outputs()
        loss = self.loss_fn(output, target)
        results = {"loss": float(loss[0] / loss[1]) if isinstance(loss, tuple) else float(loss)}
        for name, metric in parts.create_metrics(self.case).items():
            if name[0].isupper():
                metric.update(output, target)
                results[name] = float(metric.compute())
            else:
                results[name] = float(metric(output, target).mean())
        return results

    def _outputs(self) -> tuple[Any, Tensor]:
        model = self.model if self.average is None else self.average
        model.eval()
        inputs, target = parts.validation_samples(self.case)
        with torch.no_grad():
            output, target = self.forward(model, (inputs, target))
        model.train()
        return output, target

    def _run_extra_call(self) -> dict[str, Any]:
        call = self.case["extra_call"]
        if call == "evaluate":
            return {"evaluate": self.evaluate()}
        return {"predict": self._outputs()[0].detach()} if call == "predict" else {}


class _EarlyStopping:
    """Stops the run if a result has not decreased for `patience` consecutive complete epochs."""

    def __init__(self, case: Case) -> None:
        self.monitor, self.patience = case["early_stopping"] or ("train_loss", math.inf)
        self.best, self.waited, self.is_stopped = math.inf, 0, False

    def update(self, results: dict[str, float]) -> None:
        found = results[self.monitor]
        self.best, self.waited = (found, 0) if found < self.best else (self.best, self.waited + 1)
        self.is_stopped = self.waited >= self.patience

"""Training loops without the Trainer: random forward and backward passes between steps, inside and outside `no_sync`. A
step must either use the mean over ranks of all gradients accumulated since the previous step, or raise ModelError on
every rank. A loop in the usual form must not raise an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Case = dict[str, Any]
OUTPUTS = ("tensor", "dict", "dataclass", "object")
LAYOUTS = [("ddp", 2), ("horovod", 2), ("ddp", 3), ("horovod", 3), ("local", 1)]
UNUSUAL = ("round", "forward", "backward", "unwrapped")


def draw_loop(r: random.Random, seed: int) -> Case:
    """Return a random loop: steps of operations on a stack of losses."""
    backend, size = r.choices(LAYOUTS, [8, 6, 2, 2, 1])[0]
    case = {"kind": "loop", "seed": seed % 1000, "backend": backend, "size": size, "unused": r.random() < 0.3}
    case["output"] = r.choice(OUTPUTS)
    case["compression"] = r.choice(["none", "none", "none", "full"])
    unusual = r.choice(["nothing", "nothing", *UNUSUAL, "everything"])
    return {**case, "steps": [_draw_step(r, case, unusual) for _ in range(r.randint(1, 4))]}


def _draw_step(r: random.Random, case: Case, unusual: str) -> list[list[Any]]:
    """Return operations: ["forward", in sync, through the wrapped model, part], ["backward", index of the loss, in
    sync, retain], ["grad"], and ["sum"], which replaces the losses by their sum. `unusual` names the kind of operation
    that is used in an unusual way."""

    def draw_unusual(kind: str) -> bool:
        return unusual in (kind, "everything") and r.random() < 0.35

    operations: list[list[Any]] = []
    rounds = r.choice([1, 1, 2, 3])
    for number in range(rounds):
        sync = number == rounds - 1 and not draw_unusual("round")
        part = r.choice(["all", "left", "right"]) if case["unused"] else "all"
        forwards = r.choice([1, 1, 1, 2])
        for _ in range(forwards):
            forward_sync = not sync if draw_unusual("forward") else sync
            operations.append(["forward", forward_sync, not draw_unusual("unwrapped"), part])
        if r.random() < 0.15:
            operations.append(["grad"])
        if forwards == 2 and r.random() < 0.5:
            operations.append(["sum"])
            forwards = 1
        for left in range(forwards, 0, -1):
            while r.random() < 0.2:
                operations.append(["backward", r.randrange(left), sync, True])
            backward_sync = not sync if draw_unusual("backward") else sync
            operations.append(["backward", r.randrange(left), backward_sync, False])
    return operations


def is_usual(case: Case) -> bool:
    """Return whether every rank must accept the loop. In such a loop, each round is completely inside or outside
    `no_sync`, and the last round is outside."""
    for operations in case["steps"]:
        moves = [operation for operation in operations if operation[0] in ("forward", "backward")]
        if not moves or not all(operation[2] for operation in moves if operation[0] == "forward"):
            return False
        syncs = [operation[1] if operation[0] == "forward" else operation[2] for operation in moves]
        if not syncs[-1] or sorted(syncs) != syncs:
            return False
        if case["output"] == "object" and len([m for m in moves if m[0] == "backward"]) > syncs.count(False) // 2 + 1:
            return False  # an output whose tensors are not accessible may raise an error
    return not (case["output"] == "object" and case["unused"])


@dataclass
class DataclassOutput:
    value: Tensor


class OutputWithHiddenTensor:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class SharedParts(nn.Module):
    """A model with two parts that forward passes may use separately, and a third part that both use."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case["seed"])
        self.left, self.right, self.both = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.output = case["output"]
        self.double()

    def forward(self, x: Tensor, part: str) -> Any:
        h = sum(getattr(self, name)(x) for name in ("left", "right") if part in ("all", name))
        value = self.both(torch.tanh(h))
        made = {"tensor": lambda: value, "dict": lambda: {"value": value}, "dataclass": lambda: DataclassOutput(value)}
        return made.get(self.output, lambda: OutputWithHiddenTensor(value))()


def run_step(
    case: Case,
    step_index: int,
    rank: int,
    model: nn.Module,
    call: Callable[..., Any],
    no_sync: Callable[[], Any] = nullcontext,
) -> None:
    """Run the operations before step `step_index` on one rank's inputs. `call` is the wrapped model."""
    forwards = sum(operation[0] == "forward" for operations in case["steps"][:step_index] for operation in operations)
    losses: list[Tensor] = []
    for name, *settings in case["steps"][step_index]:
        if name == "forward":
            sync, wrapped, part = settings
            generator = torch.Generator().manual_seed(1000 * case["seed"] + 10 * forwards + rank)
            x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
            forwards += 1
            with nullcontext() if sync else no_sync():
                output = (call if wrapped else model)(x, part)
            losses.append(_value(output).square().mean())
        elif name == "sum":
            losses = [torch.stack(losses).sum()]
        elif name == "grad":
            torch.autograd.grad(losses[-1], list(model.parameters()), retain_graph=True, allow_unused=True)
        else:
            which, sync, retain = settings
            loss = losses[which] if retain else losses.pop(which)
            with nullcontext() if sync else no_sync():
                loss.backward(retain_graph=retain)


def _value(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["value"] if isinstance(output, dict) else output.value


def create_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)


def expected_parameters(case: Case) -> list[list[Tensor]]:
    """Return the parameters after each step of SGD on the mean of the gradients of all ranks."""
    model = SharedParts(case)
    parameters, optimizer = list(model.parameters()), create_optimizer(model)
    after = []
    for number in range(len(case["steps"])):
        sums: list[Tensor | None] = [None] * len(parameters)
        for rank in range(case["size"]):
            optimizer.zero_grad()
            run_step(case, number, rank, model, model)
            for at, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    sums[at] = parameter.grad + (0 if sums[at] is None else sums[at])
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = None if total is None else total / case["size"]
        optimizer.step()
        after.append([parameter.detach().clone() for parameter in parameters])
    return after


def run(backend: Any, case: Case) -> dict[str, Any]:
    """Run a case on this rank and return the parameters after each step, and the exception that stopped it, if any."""
    import unitrain

    model = SharedParts(case)
    after: list[list[Tensor]] = []
    try:
        compression: Any = "none"
        if case["compression"] == "full":
            compression = unitrain.PowerSGD(rank=8, start_step=0, min_compression_rate=1e-3)
        wrapped = backend.distributed_model(model, find_unused_parameters=case["unused"], compression=compression)
        optimizer = backend.distributed_optimizer(create_optimizer(model), wrapped)
        for number in range(len(case["steps"])):
            run_step(case, number, backend.rank, model, wrapped, lambda: backend.no_sync(wrapped))
            optimizer.step()
            optimizer.zero_grad()
            after.append([parameter.detach().clone() for parameter in model.parameters()])
    except Exception as error:
        import traceback

        return {"after": after, "error": (type(error).__name__, str(error), traceback.format_exc())}
    return {"after": after, "error": None}


def check(case: Case, run_on_ranks: Callable[..., list[Any]]) -> list[str]:
    """Return a description of the first difference from the expected results of a loop, or an empty list."""
    rank_results = run_on_ranks((case["backend"], case["size"]), run, case)
    errors = [one["error"] for one in rank_results]
    if any(errors):
        kinds = {error[0] if error else "nothing" for error in errors}
        first = next(error for error in errors if error)
        if kinds != {"ModelError"} and kinds != {"NonFiniteGradientError"}:
            return [f"error {first[0]}: the ranks raised {sorted(kinds)}: {first[1]}\n{first[2]}"]
        if is_usual(case):
            return [f"error {first[0]}: a valid loop raised an error: {first[1]}"]
    wanted = expected_parameters(case)
    for rank, one in enumerate(rank_results):
        if len(one["after"]) != len(rank_results[0]["after"]):
            return [f"steps: rank {rank} ran {len(one['after'])} steps, rank 0 ran {len(rank_results[0]['after'])}"]
        for step, (found, right) in enumerate(zip(one["after"], wanted, strict=False)):
            worst = max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True))
            if not worst <= 1e-9:
                return [f"parameters: rank {rank} differs by {worst:.3g} after step {step + 1}, without an error"]
    return []


def simpler_loop(case: Case) -> Iterator[Case]:
    """Yield loops that are each simpler in one respect."""
    steps = case["steps"]
    for at in range(len(steps)):
        if len(steps) > 1:
            yield {**case, "steps": steps[:at] + steps[at + 1 :]}
    for name, value in {
        "compression": "none",
        "unused": False,
        "output": "tensor",
        "backend": "ddp",
        "size": 2,
    }.items():
        if case[name] != value and not (name == "size" and case["backend"] == "local"):
            yield {**case, name: value}
    for at, operations in enumerate(steps):
        for place, operation in enumerate(operations):
            without = operations[:place] + operations[place + 1 :]
            changes = [without] if _is_balanced(without) else []
            pairs = [
                [o for i, o in enumerate(operations) if i not in (place, other)]
                for other in range(place + 1, len(operations))
            ]
            changes += [pair for pair in pairs if _is_balanced(pair)]
            if operation[0] == "forward" and operation != ["forward", True, True, "all"]:
                for value in (
                    ["forward", True, *operation[2:]],
                    [*operation[:2], True, operation[3]],
                    [*operation[:3], "all"],
                ):
                    changes += [[*operations[:place], value, *operations[place + 1 :]]] if value != operation else []
            if operation[0] == "backward" and not operation[2]:
                changes.append(
                    [*operations[:place], ["backward", operation[1], True, operation[3]], *operations[place + 1 :]]
                )
            for changed in changes:
                yield {**case, "steps": [*steps[:at], changed, *steps[at + 1 :]]}


def _is_balanced(operations: list[list[Any]]) -> bool:
    """Return whether each backward pass has a loss, and whether at least one loss remains."""
    losses = backwards = 0
    for operation in operations:
        if operation[0] == "forward":
            losses += 1
        elif operation[0] == "backward":
            if operation[1] >= losses:
                return False
            losses -= not operation[3]
            backwards += 1
        elif not losses:
            return False
        elif operation[0] == "sum":
            losses = 1
    return backwards > 0

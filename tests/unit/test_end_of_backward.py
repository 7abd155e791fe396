"""The steps at the end of a backward pass run in the order of `BackwardStage`, regardless of the order of the hooks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from unitrain.backends.gradients.end_of_backward import (
    BackwardStage,
    EndOfBackwardCallbacks,
    tensors_requiring_grad,
)
from unitrain.torch_compat import queue_backward_callback

ORDER = [
    "FIND_UNUSED_PARAMETERS", "REDUCE_BUCKETS", "COMPRESS", "WAIT_FOR_WORK_OBJECTS", "MARK_REDUCED", "DDP",
    "REBUILD_BUCKETS", "RAISE_ERRORS",
]  # fmt: skip


def run_backward(on_gradient: object) -> None:
    with torch.enable_grad():  # gradients are disabled inside a backward pass
        tensor = torch.ones(1, requires_grad=True)
        output = tensor * 2
        output.register_hook(on_gradient)
        output.backward()


@pytest.mark.parametrize("order", [list(BackwardStage), list(reversed(BackwardStage))], ids=["in order", "reversed"])
def test_steps_run_in_a_fixed_order_before_and_after_the_callback_of_ddp(order: list[BackwardStage]) -> None:
    end_of_backward, ran = EndOfBackwardCallbacks(), list[str]()

    def add_all(_: Tensor) -> None:
        for step in order:
            end_of_backward.add(step, lambda name=step.name: ran.append(name))
        queue_backward_callback(lambda: ran.append("DDP"))  # DDP queues its callback after the last bucket

    run_backward(add_all)
    assert ran == ORDER


def test_step_may_add_steps_to_the_same_backward_pass() -> None:
    end_of_backward, ran = EndOfBackwardCallbacks(), list[str]()

    def add(step: BackwardStage, name: str) -> None:
        end_of_backward.add(step, lambda: ran.append(name))

    def find_unused() -> None:
        ran.append("find")
        add(BackwardStage.RAISE_ERRORS, "raise")
        add(BackwardStage.COMPRESS, "compress")

    def add_first(_: Tensor) -> None:
        add(BackwardStage.MARK_REDUCED, "mark")
        end_of_backward.add(BackwardStage.FIND_UNUSED_PARAMETERS, find_unused)

    run_backward(add_first)
    assert ran == ["find", "compress", "mark", "raise"]


def test_nested_backward_pass_has_separate_steps() -> None:
    end_of_backward, ran = EndOfBackwardCallbacks(), list[str]()

    def run_inner() -> None:
        run_backward(lambda _: end_of_backward.add(BackwardStage.MARK_REDUCED, lambda: ran.append("inner")))
        ran.append("outer")

    def add_outer(_: Tensor) -> None:
        end_of_backward.add(BackwardStage.MARK_REDUCED, lambda: ran.append("outer, last"))
        end_of_backward.add(BackwardStage.FIND_UNUSED_PARAMETERS, run_inner)

    run_backward(add_outer)
    assert ran == ["inner", "outer", "outer, last"]


def test_backward_pass_that_raises_discards_its_steps() -> None:
    end_of_backward, ran = EndOfBackwardCallbacks(), list[str]()

    def add_and_raise(_: Tensor) -> None:
        end_of_backward.add(BackwardStage.MARK_REDUCED, lambda: ran.append("marked"))
        raise ValueError("in a hook")

    with pytest.raises(ValueError, match="in a hook"):
        run_backward(add_and_raise)
    gc.collect()
    assert ran == []
    assert len(end_of_backward._sequences) == 0


class OneSlot:
    __slots__ = "logits"

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class _PrivateSlot:
    __slots__ = ("__hidden", "unset")

    def __init__(self, hidden: Tensor) -> None:
        self.__hidden = hidden


def test_tensors_are_found_in_slots_and_in_recursive_lists() -> None:
    first, second, third = (torch.ones(1, requires_grad=True) for _ in range(3))
    output: list[object] = [OneSlot(first), {"private": _PrivateSlot(second)}, third, torch.ones(1)]
    output.append(output)
    found = tensors_requiring_grad(output)
    assert len(found) == 3
    assert all(tensor is expected for tensor, expected in zip(found, (first, second, third), strict=True))

"""Single collectives with random operations, dtypes and values, on the backend and on its process group."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Case = dict[str, Any]
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
GROUP_DTYPES = (*DTYPES, "complex64", "complex128", "uint32", "uint64", "int8", "int16", "float8_e4m3fn")
OPS = ("sum", "mean", "min", "max", "product")
CALLS = ("allreduce", "allreduce", "reducescatter", "allgather", "broadcast", "differentiable_allgather")
GROUP_CALLS = ("all_reduce", "coalesced", "reduce", "reduce_scatter")
# Small tensors are transferred together with the consistency check. Tensors with this number of rows are not.
MANY_ROWS = 600


def draw_collectives(r: random.Random, seed: int) -> Case:
    """Return a case with random collectives, each a list [level, name, op, dtype, rows, special values]."""
    backend, size = r.choice([("ddp", 2), ("ddp", 3), ("horovod", 2), ("horovod", 3), ("local", 1)])
    calls = []
    for _ in range(20):
        level = "group" if size > 1 and r.random() < 0.5 else "backend"
        dtype = r.choice(DTYPES if level == "backend" else GROUP_DTYPES)
        name = r.choice(CALLS if level == "backend" else GROUP_CALLS)
        if name == "differentiable_allgather" and not getattr(torch, dtype).is_floating_point:
            name = "allgather"
        call = [level, name, r.choice(OPS), dtype, r.choice([0, 1, 2, 3, MANY_ROWS])]
        special = r.choice(["plain", "nan", "inf", "large"])
        if special == "nan" and level == "group" and backend == "ddp":
            special = "plain"  # torch's process group does not propagate NaN in a minimum or maximum
        # The product of complex infinities depends on the algorithm.
        calls.append([*call, "plain" if dtype.startswith("complex") else special])
    return {"kind": "collective", "seed": seed % 1000, "backend": backend, "size": size, "calls": calls}


def simpler_collectives(case: Case) -> Iterator[Case]:
    """Yield cases with fewer or simpler calls."""
    for at, call in enumerate(case["calls"]):
        if len(case["calls"]) > 1:
            yield {**case, "calls": case["calls"][:at] + case["calls"][at + 1 :]}
        for place, value in ((5, "plain"), (4, 1), (3, "float32"), (2, "sum")):
            if call[place] != value:
                changed = [*call[:place], value, *call[place + 1 :]]
                yield {**case, "calls": [*case["calls"][:at], changed, *case["calls"][at + 1 :]]}
    if case["size"] == 3:
        yield {**case, "size": 2}


def input_tensor(case: Case, call_index: int, rank: int) -> Tensor:
    """Return the input of a rank for call `call_index`: a tensor of shape [rows * size, 2]."""
    _, _, op, name, rows, special = case["calls"][call_index]
    dtype: torch.dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(100 * case["seed"] + 10 * call_index + rank)
    shape = (rows * case["size"], 2)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        value = torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        if special in ("nan", "inf") and rows and rank == case["seed"] % case["size"]:
            # Transports reduce parts of a tensor in different orders. NaN is lost only in some of these orders.
            value[call_index % len(value), 0] = value[len(value) // 2, 0] = value[-1, 1] = float(special)
        return value.to(dtype)
    value = torch.randint(0, 5, shape, generator=generator)
    if special == "large" and op in ("min", "max", "sum") and rows:
        largest = torch.iinfo(dtype).max if dtype != torch.uint64 else 2**62
        value[0, 0] = largest // 4 + rank
        if op != "sum":
            value[-1, 1] = largest - rank
            if rank == case["seed"] % case["size"]:  # numbers above and below half of the dtype's maximum
                value[-1, 0] = largest
    return value.to(dtype)


def input_weights(case: Case, call_index: int, rank: int) -> Tensor:
    """Return the weights by which a rank multiplies the result of a differentiable allgather. The loss of the rank is
    the sum of the products."""
    _, _, _, name, rows, _ = case["calls"][call_index]
    generator = torch.Generator().manual_seed(100 * case["seed"] + 10 * call_index + rank + 5)
    value = torch.randn(rows * case["size"] ** 2, 2, generator=generator, dtype=torch.float64)
    return value.to(getattr(torch, name))


def reduce_tensors(tensors: list[Tensor], op: str) -> Tensor:
    """Return the reduction of the ranks' tensors, computed in the widest dtype. A minimum or maximum propagates NaN."""
    dtype = tensors[0].dtype
    if dtype.is_floating_point:
        wide = torch.stack(tensors).double()
    elif dtype.is_complex:
        wide = torch.stack(tensors).to(torch.complex128)
    else:
        wide = torch.stack([tensor.to(torch.int64) for tensor in tensors])
    reductions = {
        "sum": lambda: wide.sum(0),
        "mean": lambda: wide.mean(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
        "product": lambda: wide.prod(0),
    }
    return reductions[op]().to(dtype)


def run(backend: Any, case: Case) -> list[Any]:
    """Run the calls of a case on this rank. For each call, return the result, or a text if the call raises an exception
    or changes its input."""
    results: list[Any] = []
    for number, (level, name, op, *_) in enumerate(case["calls"]):
        tensor = input_tensor(case, number, backend.rank)
        before = tensor.clone()
        try:
            if level == "group":
                results.append(_group_call(name, op, tensor, backend.size))
                continue
            if name == "differentiable_allgather":
                results.append(_gather_with_gradient(backend, tensor, input_weights(case, number, backend.rank)))
                continue
            arguments: dict[str, Any] = {"op": op} if name in ("allreduce", "reducescatter") else {}
            results.append(getattr(backend, name)(tensor, **arguments).clone())
            if not _is_close(tensor, before, 0.0):
                results[-1] = "changed its input"
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    # Return lists, because torch cannot pickle every dtype.
    return [one if isinstance(one, str) else (str(one.dtype), list(one.shape), one.tolist()) for one in results]


def _gather_with_gradient(backend: Any, tensor: Tensor, weights: Tensor) -> Tensor:
    """Return the tensors of all ranks, followed by the gradient of this rank's tensor."""
    import unitrain

    own = tensor.clone().requires_grad_()
    gathered = unitrain.differentiable_allgather(own, backend)
    (gathered * weights).sum().backward()
    assert own.grad is not None, "the gradient is missing"
    return torch.cat([gathered.detach(), own.grad])


def _group_call(name: str, op: str, tensor: Tensor, size: int) -> Tensor:
    reduce_op = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "product": dist.ReduceOp.PRODUCT}.get(
        op, dist.ReduceOp.SUM
    )
    if name == "all_reduce":
        dist.all_reduce(tensor, reduce_op)
    elif name == "coalesced":  # with an empty tensor at the end
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced([tensor, tensor.new_empty(0)], reduce_op)
    elif name == "reduce":
        dist.reduce(tensor, 0, reduce_op)
    else:
        own = tensor.new_empty(len(tensor) // size, 2)
        dist.reduce_scatter(
            own, list(tensor.chunk(size)) if len(tensor) else [tensor.new_empty(0, 2)] * size, reduce_op
        )
        return own
    return tensor


def check(case: Case, run_on_ranks: Callable[..., list[Any]]) -> list[str]:
    """Return a description of the first wrong result, or an empty list.

    Only calls that may be rejected may raise an error. If one rank raises an error, all ranks must raise one.
    """
    rank_results = run_on_ranks((case["backend"], case["size"]), run, case)
    for number, (level, name, op, dtype, rows, special) in enumerate(case["calls"]):
        tensors = [input_tensor(case, number, rank) for rank in range(case["size"])]
        kind = tensors[0].dtype
        found = [results[number] for results in rank_results]
        call = f"{level} {name}({dtype} [{rows * case['size']}, 2], {op}, {special}) on {case['backend']}"
        rejected = [isinstance(result, str) for result in found]
        if any(rejected):
            integers = not (kind.is_floating_point or kind.is_complex)
            may_be_rejected = level == "group" or (op == "mean" and integers) or kind == torch.bool
            if not all(rejected) or not may_be_rejected or any("changed" in str(result) for result in found):
                return [f"collective: {call} gave {[r if isinstance(r, str) else 'a result' for r in found]}"]
            continue
        if level == "group" and op == "mean":
            op = "sum"
        for rank, (found_dtype, shape, values) in enumerate(found):
            result = torch.tensor(values, dtype=getattr(torch, found_dtype.removeprefix("torch."))).reshape(shape)
            if name == "allgather":
                expected = torch.cat(tensors)
            elif name == "differentiable_allgather":
                gradients = reduce_tensors([input_weights(case, number, other) for other in range(case["size"])], "sum")
                expected = torch.cat([*tensors, gradients.chunk(case["size"])[rank] if rows else gradients])
            elif name == "broadcast":
                expected = tensors[0]
            elif name == "reduce" and rank:
                continue
            else:
                expected = reduce_tensors(tensors, op)
                if name in ("reducescatter", "reduce_scatter"):
                    expected = expected.chunk(case["size"])[rank] if len(expected) else expected
            tolerance = {"float16": 1e-2, "bfloat16": 3e-2, "float32": 1e-5, "complex64": 1e-5}.get(dtype, 1e-12)
            if not _is_close(result, expected, tolerance):
                return [f"collective: {call}: rank {rank} has {_format_tensor(result)}, not {_format_tensor(expected)}"]
    return []


def _format_tensor(tensor: Tensor) -> str:
    values = str(tensor.tolist())
    return values if len(values) <= 400 else f"{values[:200]} ... {values[-200:]}"


def _is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype.is_floating_point or found.dtype.is_complex:
        if found.dtype.itemsize == 1:
            found, expected = found.float(), expected.float()
        return torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return found.tolist() == expected.tolist()

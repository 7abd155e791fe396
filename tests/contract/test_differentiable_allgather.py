"""With a loss over the samples of all ranks, N ranks train like one process with the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from groups import GROUPS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import unitrain
from unitrain.backends.base import Backend
from unitrain.errors import CollectiveMismatchError, TensorError
from unitrain.testing import RankGroup

SAMPLES = 12
STEPS = 3
# Number of samples on each rank, by number of ranks.
EVEN = {1: [12], 2: [6, 6], 3: [4, 4, 4]}
UNEVEN = {1: [12], 2: [7, 5], 3: [7, 0, 5]}


class Encoder(nn.Module):
    """An encoder with parameters before and after the allgather. They do not fit in DDP's first bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 6))
        self.head = nn.Linear(6, 6)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.double()


class Contrastive(nn.Module):
    """InfoNCE loss of two views of each sample, either of all samples, or of this rank's samples against all
    samples."""

    def __init__(self, backend: Backend | None, form: str) -> None:
        super().__init__()
        self.encoder, self.backend, self.form = Encoder(), backend, form

    def gather(self, tensor: Tensor) -> Tensor:
        if self.backend is None:
            return tensor
        if self.form == "without gradient":
            return self.backend.allgather(tensor.detach())
        return unitrain.differentiable_allgather(tensor, self.backend)

    def forward(self, one: Tensor, two: Tensor, first: int) -> Tensor:
        body = self.encoder.body
        if self.form == "recomputed":
            one, two = (checkpoint(body, view, use_reentrant=False) for view in (one, two))
        else:
            one, two = body(one), body(two)
        full_first, full_second = (normalize(self.encoder.head(self.gather(view))) for view in (one, two))
        if self.form in ("same everywhere", "recomputed"):
            scores = full_first @ full_second.t() / self.encoder.temperature
            return cross_entropy(scores, torch.arange(len(scores)), reduction="sum") / len(scores)
        own = normalize(self.encoder.head(one))
        scores = own @ full_second.t() / self.encoder.temperature
        targets = torch.arange(len(own)) + first
        size = 1 if self.backend is None else self.backend.size
        return cross_entropy(scores, targets, reduction="sum") * size / len(full_second)


def create_views(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    samples = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return samples + 0.3 * torch.randn(2, SAMPLES, 8, generator=generator, dtype=torch.float64)


def train(backend: Backend | None, form: str, counts: list[int], micro_steps: int = 1) -> list[Tensor]:
    model: Any = Contrastive(backend, form)
    wrapped = model if backend is None else backend.distributed_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank = 0 if backend is None else backend.rank
    first = sum(counts[:rank])
    own = slice(first, first + counts[rank])
    for step in range(STEPS):
        for micro_step in range(micro_steps):
            one, two = create_views(10 * step + micro_step)
            if backend is not None and micro_step + 1 < micro_steps:
                with backend.no_sync(wrapped):
                    wrapped(one[own], two[own], first).backward()
            else:
                wrapped(one[own], two[own], first).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def largest_difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    backend, size = request.param
    with RankGroup(backend, size) as group:
        yield group


def train_cases(backend: Backend, cases: list[tuple[str, list[int], int]]) -> list[list[Tensor]]:
    return [train(backend, *case) for case in cases]


def test_contrastive_loss_equals_one_process_with_the_global_batch(ranks: RankGroup) -> None:
    cases = [
        (form, counts[ranks.size], micro_steps)
        for form in ("same everywhere", "own samples")
        for counts, micro_steps in ((EVEN, 1), (UNEVEN, 1), (EVEN, 2))
    ]
    cases.append(("recomputed", EVEN[ranks.size], 1))
    found = ranks.run(train_cases, cases)
    for of_rank in found:
        for (form, counts, micro_steps), parameters in zip(cases, of_rank, strict=True):
            wanted = train(None, form, [SAMPLES], micro_steps)
            assert largest_difference(parameters, wanted) < 1e-11, (form, counts, micro_steps)
    if ranks.size > 1:  # without contributions from other ranks, the results must differ
        lost = ranks.run(train_cases, [("without gradient", EVEN[ranks.size], 1)])[0][0]
        assert largest_difference(lost, train(None, "own samples", [SAMPLES])) > 1e-4


def check_gradients(backend: Backend) -> None:
    rank, size = backend.rank, backend.size

    def random_tensor(seed: int, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 3, generator=generator, dtype=torch.float64)

    counts = [2, 0, 3][:size] if size > 1 else [2]
    parts = [random_tensor(other, rows).requires_grad_() for other, rows in enumerate(counts)]
    weights = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    # Each rank computes a different loss of all parts. The expected gradient is that of the sum of all losses.
    concatenated = torch.cat(parts)
    total = sum(((other + 1) * concatenated**3 * weights).sum() for other in range(size))
    wanted = torch.autograd.grad(total, parts, create_graph=True)
    wanted_second = torch.autograd.grad(sum((one**2).sum() for one in wanted), parts)

    own = parts[rank].detach().clone().requires_grad_()
    kept = own.detach().clone()
    gathered = unitrain.differentiable_allgather(own, backend)
    assert torch.equal(gathered, concatenated)
    assert torch.equal(own, kept)
    (first,) = torch.autograd.grad(((rank + 1) * gathered**3 * weights).sum(), own, create_graph=True)
    torch.testing.assert_close(first, wanted[rank])
    (second,) = torch.autograd.grad((first**2).sum(), own)
    torch.testing.assert_close(second, wanted_second[rank])

    # Ranks whose tensor does not require a gradient also run the backward pass.
    own = parts[rank].detach().clone().requires_grad_(rank == 0)
    gathered = unitrain.differentiable_allgather(own, backend)
    assert gathered.requires_grad
    (gathered.sum() * (rank + 1)).backward()
    if rank == 0:
        assert own.grad is not None
        torch.testing.assert_close(own.grad, torch.full_like(own, size * (size + 1) / 2))

    # Test scalars, half precision, integers and no_grad.
    number = torch.tensor(rank + 1.0, requires_grad=True)
    (unitrain.differentiable_allgather(number, backend) * torch.arange(1.0, size + 1)).sum().backward()
    assert number.grad is not None
    assert number.grad.shape == ()
    assert number.grad.item() == (rank + 1.0) * size
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    unitrain.differentiable_allgather(half, backend).sum().backward()
    assert half.grad is not None
    assert half.grad.tolist() == [size, size]
    labels = unitrain.differentiable_allgather(torch.tensor([rank]), backend)
    assert labels.tolist() == list(range(size))
    with torch.no_grad():
        assert not unitrain.differentiable_allgather(number, backend).requires_grad


def call_with_mismatched_arguments(backend: Backend) -> list[str]:
    last = backend.rank == backend.size - 1
    texts = []
    with pytest.raises(CollectiveMismatchError) as mismatch:
        unitrain.differentiable_allgather(torch.ones(2, 4 if last else 3), backend)
    texts.append(str(mismatch.value))
    with pytest.raises(CollectiveMismatchError) as mismatch, torch.set_grad_enabled(not last):
        unitrain.differentiable_allgather(torch.ones(2), backend)
    texts.append(str(mismatch.value))
    with pytest.raises(TensorError) as raised:
        unitrain.differentiable_allgather(torch.ones(2, dtype=torch.float8_e5m2), backend)
    texts.append(str(raised.value))
    with pytest.raises(CollectiveMismatchError) as mismatch:  # the exchanged row counts are also integers
        unitrain.differentiable_allgather(torch.ones(2, dtype=torch.int64 if last else torch.float32), backend)
    texts.append(str(mismatch.value))
    backend.barrier()  # the group can still communicate
    return texts


def test_gradient_equals_the_gradient_of_the_sum_of_all_losses(ranks: RankGroup) -> None:
    ranks.run(check_gradients)


def test_mismatched_ranks_raise_the_same_error(ranks: RankGroup) -> None:
    if ranks.size > 1:
        rank_results = ranks.run(call_with_mismatched_arguments)
        assert all(one == rank_results[0] for one in rank_results)
        assert "float8_e5m2" in rank_results[0][2]

"""The exact reduction computes bit-identical means of gradients for any number of processes."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

import pytest
import torch
from torch import Tensor

from unitrain.backends.gradients.exact_reduction import ExactReduction
from unitrain.backends.logical_ranks import local_logical_ranks
from unitrain.errors import ModelError
from unitrain.metrics.exact_sums import ExactMeans, ExactSum, sum_exactly

Term = list[Tensor | None]
SHAPES = [(5, 3), (), (40_000,), (0, 2), (2, 3, 4, 4)]


class ThreadedAllreduce:
    """Allreduce between threads that simulate processes. The order of the additions is arbitrary."""

    def __init__(self, size: int) -> None:
        self._barrier, self._lock = Barrier(size), Lock()
        self._totals: dict[int, Tensor] = {}
        self._counts = [0] * size

    def start_allreduce_of(self, process: int) -> Callable[[Tensor, str], Callable[[], None]]:
        def start(tensor: Tensor, op: str) -> Callable[[], None]:
            number = self._counts[process]
            self._counts[process] += 1
            with self._lock:
                before = self._totals.get(number)
                combine = torch.maximum if op == "max" else torch.add
                self._totals[number] = tensor.clone() if before is None else combine(tensor, before)

            def wait() -> None:
                self._barrier.wait(10)
                tensor.copy_(self._totals[number])

            return wait

        return start


def reduce_on_processes(
    terms: Sequence[Term], size: int = 1, *, parameters: Sequence[Tensor] | None = None, allows_unused: bool = False
) -> list[list[Tensor | None]]:
    """Reduce the terms of all logical ranks on `size` processes, and return the means of each process."""
    likes = parameters or [next(one for one in same if one is not None) for same in zip(*terms, strict=True)]
    count, allreduce = len(terms), ThreadedAllreduce(size)

    def run(process: int) -> list[Tensor | None]:
        reduction = ExactReduction(
            [f"p{number}" for number in range(len(likes))],
            [like.detach().clone().requires_grad_() for like in likes],
            logical_ranks=count,
            bucket_bytes=100_000,
            start_allreduce=allreduce.start_allreduce_of(process) if size > 1 else None,
            allows_unused=allows_unused,
        )
        own = [
            [None if one is None else one.clone() for one in terms[rank]]
            for rank in local_logical_ranks(count, process, size)
        ]
        return reduction.compute_mean(own, all_ranks_have_run=True)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def random_terms(count: int, dtype: torch.dtype = torch.float32) -> list[Term]:
    generator = torch.Generator().manual_seed(count)
    return [
        [
            torch.randn(shape, generator=generator, dtype=torch.float64).pow(5).mul(10.0**-number).to(dtype)
            for number, shape in enumerate(SHAPES)
        ]
        for _ in range(count)
    ]


def exact_mean(values: Sequence[Tensor]) -> Tensor:
    rows = zip(*(value.double().reshape(-1).tolist() for value in values), strict=True)
    return torch.tensor([math.fsum(row) / len(values) for row in rows], dtype=torch.float64).view(values[0].shape)


@pytest.mark.parametrize("count", [1, 3, 8, 24])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float64, 53)])
def test_error_of_the_mean_is_at_most_a_few_roundings(count: int, dtype: torch.dtype, bits: int) -> None:
    terms = random_terms(count, dtype)
    (means,) = reduce_on_processes(terms)
    quantum = 2.0 ** (math.ceil(math.log2(count)) - (30 if dtype == torch.float32 else 62))
    for number, mean in enumerate(means):
        expected = exact_mean([term[number] for term in terms])
        assert mean is not None
        assert mean.dtype == dtype
        largest = max((float(term[number].abs().max()) for term in terms if term[number].numel()), default=0.0)
        assert ((mean.double() - expected).abs() <= expected.abs() * 2.0 ** (2 - bits) + largest * quantum).all()


@pytest.mark.parametrize("count", [2, 3, 8, 24, 100])
def test_error_of_the_mean_is_less_than_twice_that_of_an_ordinary_sum(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    terms: list[Term] = [[torch.randn(20_000, generator=generator)] for _ in range(count)]
    expected = exact_mean([term[0] for term in terms])
    ordinary = sum(term[0] for term in terms) / count
    ((mean,),) = reduce_on_processes(terms)
    errors = [float((found.double() - expected).square().mean().sqrt()) for found in (mean, ordinary)]
    assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_do_not_depend_on_the_number_of_processes_or_the_order(size: int, dtype: torch.dtype) -> None:
    terms = random_terms(5, dtype)
    (alone,) = reduce_on_processes(terms)
    for means in [*reduce_on_processes(terms, size), *reduce_on_processes(terms[::-1], size)]:
        for mean, expected in zip(means, alone, strict=True):
            assert torch.equal(mean, expected)


def test_ordinary_sums_depend_on_the_order() -> None:
    """Ensure that the values of the previous test do not have exact ordinary sums."""
    terms = random_terms(5)
    sums = {tuple(sum(term[0] for term in order).flatten().tolist()) for order in itertools.permutations(terms)}
    assert len(sums) > 1


def reduce_in_backward(
    terms: Sequence[Term], process: int, allreduce: ThreadedAllreduce, size: int
) -> tuple[int, list[bool]]:
    """Reduce the terms in two steps. In the second step, each process adds its gradients in a different order.

    Return the number of operations that start while the gradients of the second step are added, and for each parameter
    whether the results of both steps are equal.
    """
    started = 0
    start = allreduce.start_allreduce_of(process)

    def counting_start(tensor: Tensor, op: str) -> Callable[[], None]:
        nonlocal started
        started += 1
        return start(tensor, op)

    reduction = ExactReduction(
        [f"p{number}" for number in range(len(SHAPES))],
        [torch.zeros(shape, requires_grad=True) for shape in SHAPES],
        logical_ranks=len(terms),
        bucket_bytes=60_000,
        start_allreduce=counting_start,
        allows_unused=False,
    )
    own = [terms[rank] for rank in local_logical_ranks(len(terms), process, size)]
    first = reduction.compute_mean([[one.clone() for one in term] for term in own], all_ranks_have_run=True)
    *complete, last = [[one.clone() for one in term] for term in own]
    reduction.begin(complete, all_ranks_have_run=True)
    before = started
    for number in torch.randperm(len(SHAPES), generator=torch.Generator().manual_seed(process)).tolist():
        reduction.add(number, last[number])
    in_backward = started - before
    return in_backward, [torch.equal(*both) for both in zip(first, reduction.finish(last), strict=True)]


def test_lazy_conjugates_are_reduced() -> None:
    terms = [[torch.randn(70, dtype=torch.complex64).conj()] for _ in range(2)]
    expected = ((terms[0][0] + terms[1][0]) / 2).resolve_conj()
    assert all(term[0].is_conj() for term in terms)
    reduction = ExactReduction(
        ["p0"],
        [torch.zeros(70, dtype=torch.complex64, requires_grad=True)],
        logical_ranks=2,
        bucket_bytes=100_000,
        start_allreduce=None,
        allows_unused=False,
    )
    (mean,) = reduction.compute_mean(terms, all_ranks_have_run=True)
    assert mean is not None
    torch.testing.assert_close(mean.resolve_conj(), expected)


def test_reduction_overlaps_with_the_backward_pass() -> None:
    terms, size = random_terms(5), 3
    allreduce = ThreadedAllreduce(size)
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(lambda process: reduce_in_backward(terms, process, allreduce, size), range(size)))
    for in_backward, are_equal in results:
        assert in_backward == results[0][0] > 2
        assert all(are_equal)


def test_gradient_that_is_added_twice_disables_overlap_or_raises_an_error() -> None:
    """In the first step, the second addition disables the overlap in later steps. In a later step, it is an error."""
    for is_first in (True, False):
        parameter = torch.zeros(3, requires_grad=True)
        reduction = ExactReduction(
            ["weight"], [parameter], logical_ranks=1, bucket_bytes=100, start_allreduce=None, allows_unused=False
        )
        for step in range(3):
            reduction.begin([], all_ranks_have_run=True)
            gradient = torch.full((3,), 1.0)
            reduction.add(0, gradient)
            if is_first:
                gradient += step
                reduction.add(0, gradient)
            (mean,) = reduction.finish([gradient])
            assert torch.equal(mean, torch.full((3,), 1.0 + step * is_first))
        if not is_first:
            reduction.begin([], all_ranks_have_run=True)
            reduction.add(0, torch.ones(3))
            with pytest.raises(ModelError, match="'weight' was accumulated twice in one backward pass"):
                reduction.add(0, torch.ones(3))


@pytest.mark.parametrize("factor", [1e30, 1e-38])
def test_mean_is_accurate_if_one_logical_rank_has_far_larger_or_smaller_gradients(factor: float) -> None:
    terms = random_terms(4)
    terms[2] = [value * factor for value in terms[2]]
    (alone,) = reduce_on_processes(terms)
    for means in reduce_on_processes(terms, 3):
        assert all(torch.equal(mean, other) for mean, other in zip(means, alone, strict=True))
    for number in (0, 2):
        expected = exact_mean([term[number] for term in terms])
        torch.testing.assert_close(alone[number].double(), expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_makes_the_gradient_nan(value: float) -> None:
    terms = random_terms(3)
    terms[1][0][0, 0] = value
    for means in reduce_on_processes(terms, 2):
        assert means[0].isnan().all()
        assert means[2].isfinite().all()


def test_zero_gradients_stay_zero() -> None:
    for means in reduce_on_processes([[torch.zeros(3)], [-torch.zeros(3)]], 2):
        assert torch.equal(means[0], torch.zeros(3))


def test_unused_parameters_raise_an_error_unless_they_are_allowed() -> None:
    first: list[Term] = [[torch.ones(2), None, None], [None, torch.ones(3), None], [torch.ones(2), None, None]]
    parameters = [torch.ones(2), torch.ones(3), torch.ones(4)]
    for means in reduce_on_processes(first, 3, parameters=parameters, allows_unused=True):
        torch.testing.assert_close(means[0], torch.full((2,), 2 / 3))
        torch.testing.assert_close(means[1], torch.full((3,), 1 / 3))
        assert means[2] is None
    with pytest.raises(ModelError, match="3 parameters received no gradient on some logical rank: p0, p1, p2"):
        reduce_on_processes(first, 1, parameters=parameters)


@pytest.mark.parametrize("allows_unused", [False, True])
def test_processes_that_freeze_different_parameters_raise_an_error(allows_unused: bool) -> None:
    allreduce, barrier = ThreadedAllreduce(2), Barrier(2)

    def run(process: int) -> None:
        parameters = [torch.ones(2).requires_grad_(), torch.ones(3).requires_grad_(process == 0)]
        reduction = ExactReduction(
            ["p0", "p1"], parameters, logical_ranks=2, bucket_bytes=4,
            start_allreduce=allreduce.start_allreduce_of(process), allows_unused=allows_unused,
        )  # fmt: skip
        gradients = [torch.ones(2), torch.ones(3) if process == 0 else None]
        with pytest.raises(ModelError, match="Parameter 'p1' is trained by some processes and frozen by others"):
            reduction.compute_mean([gradients], all_ranks_have_run=True)
        barrier.wait(10)  # both processes have raised the error

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def test_gradients_may_be_complex_or_channels_last() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    numbers = torch.randn(5, dtype=torch.complex64)
    ((mean_images, mean_numbers),) = reduce_on_processes([[images, numbers], [images * 3, numbers.conj()]])
    assert mean_images.stride() == images.stride()
    torch.testing.assert_close(mean_images, images * 2)
    torch.testing.assert_close(mean_numbers, numbers.real.to(torch.complex64))


def test_sparse_gradients_raise_an_error() -> None:
    sparse = torch.ones(3, 2).to_sparse()
    with pytest.raises(ModelError, match=r"layout torch\.sparse_coo"):
        reduce_on_processes([[sparse]], parameters=[torch.ones(3, 2)])


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_logical_ranks_are_divided_in_order_and_evenly_among_processes(processes: int) -> None:
    parts = [local_logical_ranks(8, rank, processes) for rank in range(processes)]
    assert [rank for part in parts for rank in part] == list(range(8))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_exact_sum_does_not_depend_on_the_order() -> None:
    values = [1e16, 1.0, -1e16, 1e-30, 3.0, -1e-30]
    for order in itertools.permutations(values):
        assert sum_exactly(ExactSum(order).components) == 4.0
    assert sum_exactly([1e308, 1e308]) == math.inf
    assert sum_exactly([math.inf, 1.0]) == math.inf
    assert math.isnan(sum_exactly([math.inf, -math.inf]))
    assert math.isnan(sum_exactly([math.nan, 1.0]))


def test_exact_means_do_not_keep_the_losses_of_all_batches() -> None:
    means = ExactMeans(("loss",), torch.device("cpu"))
    losses = [torch.tensor(float(number)) for number in range(250)]
    first = weakref.ref(losses[0])
    for loss in losses:
        means.add_loss(loss, 2, torch.tensor(3.0), is_owned=True)
    del loss, losses
    assert first() is None
    assert means.state() == {"exact": [[31_125.0]], "samples": 0, "tokens": [750.0]}

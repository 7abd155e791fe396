"""Checks of a model before and while it is trained on several ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from one_rank import simulate_rank
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore

from unitrain.backends.checks import (
    check_optimizer_of_model,
    check_same_weights,
    check_trainable_model,
    digest_bits,
)
from unitrain.backends.gradients.unused_parameters import gather_unused
from unitrain.backends.local import LocalBackend
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import CollectiveTimeoutError, ModelError
from unitrain.testing.parameters import EmbeddingLookup

CPU = torch.device("cpu")


class Pruned(nn.Module):
    """A module with an unrelated attribute `sparse`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sparse = nn.Linear(2, 2), True


def test_models_with_sparse_gradients_are_rejected() -> None:
    check_trainable_model(nn.Sequential(Pruned(), nn.Embedding(3, 2), nn.EmbeddingBag(3, 2)), "none", CPU)
    with pytest.raises(ModelError, match=r"^Module '1' produces sparse .*: Embedding\(\.\.\., sparse=False\)\.$"):
        check_trainable_model(nn.Sequential(Pruned(), nn.Embedding(3, 2, sparse=True)), "none", CPU)

    class Words(nn.EmbeddingBag):
        pass

    with pytest.raises(ModelError, match=r"^Module 'Words' produces sparse gradients"):
        check_trainable_model(Words(3, 2, sparse=True), "none", CPU)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_weights_of_real_and_complex_dtypes_are_compared(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=dtype))
    assert check_same_weights(simulate_rank(0, 2), model)
    assert not check_same_weights(simulate_rank(0, 2, gathered=[[1], [2]]), model)  # only the digests differ


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_digest_changes_if_one_bit_or_all_signs_change(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    assert digest_bits(torch.zeros(0, dtype=dtype)) == 0
    for size in (1, 3, 255, 257, 1000, 70_001):
        values = (5 * torch.randn(size + 1, generator=generator)).round().to(dtype)[1:]  # an unaligned address
        before = digest_bits(values)
        assert digest_bits(values.clone()) == before
        assert digest_bits(-values) != before  # flips the sign bit of every floating-point value
        content = values.view(torch.uint8)
        for _ in range(20):
            position, bit = (
                torch.randint(len(content), (), generator=generator),
                torch.randint(8, (), generator=generator),
            )
            content[position] ^= 1 << int(bit)
            after = digest_bits(values)
            assert after != before
            before = after


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_digest_changes_if_values_are_swapped_or_permuted(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    for size in (2, 5, 300, 70_001):
        values = torch.arange(size).remainder(100).add(1).to(dtype)
        digests = {int(digest_bits(values))}
        orders = [torch.arange(size).roll(shift) for shift in (1, 2, 8, 256)] + [torch.arange(size).flip(0)]
        orders += [torch.randperm(size, generator=generator) for _ in range(20)]
        for _ in range(50):  # pairs within a word, within a row, and in different rows
            first = int(torch.randint(size, (), generator=generator))
            second = (first + int(torch.randint(1, 1 + min(size, 9), (), generator=generator))) % size
            order = torch.arange(size)
            order[first], order[second] = second, first
            orders.append(order)
        contents = {bytes(values[order].view(torch.uint8).numpy()) for order in orders} | {
            bytes(values.view(torch.uint8).numpy())
        }
        digests |= {int(digest_bits(values[order])) for order in orders}
        assert len(digests) == len(contents)
    matrix = torch.randn(600, 600, generator=generator).to(dtype)
    assert digest_bits(matrix) != digest_bits(matrix.T.contiguous())


def test_model_on_another_device_is_rejected() -> None:
    check_trainable_model(nn.Linear(2, 2), "none", CPU)
    with pytest.raises(
        ModelError, match=r"^The model is on cpu and this rank computes on cuda:0\. Use model\.to\(backend\.device\) f"
    ):
        check_trainable_model(nn.Linear(2, 2), "none", torch.device("cuda", 0))
    with FakeTensorMode():  # does not require GPUs
        first, second = nn.Linear(2, 2, device="cuda:0"), nn.Linear(2, 2, device="cuda:1")
        check_trainable_model(first, "none", torch.device("cuda", 0))
        check_trainable_model(nn.Sequential(first, second), "none", torch.device("cuda", 0))
        with pytest.raises(
            ModelError, match=r"^The model is on cuda:0 and this rank computes on cuda:1\. Use model\.t"
        ):
            check_trainable_model(first, "none", torch.device("cuda", 1))
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ModelError, match=r"^Sequential has tensors on device meta, which have no values: 1\.weight, 1\.b"
    ):
        LocalBackend(CPU).distributed_model(partly)


def test_model_that_is_not_a_module_is_rejected() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"^distributed_optimizer\(model\) must be a torch\.nn\.Module, got 'net'\."):
        check_optimizer_of_model(optimizer, "net")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("detaches", [False, True])
def test_compiled_embedding_function_with_max_norm_is_rejected(detaches: bool) -> None:
    model = EmbeddingLookup(nn.functional.embedding, detaches=detaches)
    model.max_norm = 0.5
    compiled = torch.compile(LocalBackend(CPU).distributed_model(model), backend="eager")
    # torch.compile raises a different exception class with the same message.
    with pytest.raises(RuntimeError, match=r"max_norm=0\.5 for parameter 'weight' of EmbeddingLookup"):
        compiled(torch.arange(3))


@pytest.mark.filterwarnings("ignore")
def test_embedding_with_max_norm_is_rejected_inside_torch_func() -> None:
    model = LocalBackend(CPU).distributed_model(EmbeddingLookup(nn.functional.embedding, detaches=False))
    model.max_norm = 0.5
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, torch.arange(3))
        return output.sum()

    with pytest.raises(ModelError, match=r"max_norm=0\.5 for parameter 'weight' of EmbeddingLookup"):
        torch.func.grad(loss)(parameters)


@pytest.mark.filterwarnings("ignore")
def test_embedding_with_max_norm_of_other_modules_is_allowed() -> None:
    """The other weight has the same shape and dtype as a parameter of the distributed model."""
    distributed = LocalBackend(CPU).distributed_model(EmbeddingLookup(nn.functional.embedding, detaches=False))
    empty = LocalBackend(CPU).distributed_model(nn.ParameterList([torch.zeros(0, 4)]))
    other = EmbeddingLookup(nn.functional.embedding, detaches=False)
    other.max_norm = 0.5
    assert other.weight.shape == distributed.weight.shape
    other(torch.arange(3))
    torch.compile(other, backend="aot_eager")(torch.arange(3)).sum().backward()
    nn.functional.embedding(torch.zeros(0, dtype=torch.int64), torch.zeros_like(empty[0]), max_norm=0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_embedding_can_be_scripted_after_a_model_was_distributed() -> None:
    LocalBackend(CPU).distributed_model(nn.Linear(2, 2))
    for layer in (nn.Embedding(5, 4, max_norm=0.5), nn.Embedding(5, 4)):
        assert torch.jit.script(layer)(torch.arange(5)).shape == (5, 4)


def test_timeout_after_the_first_backward_pass_states_that_this_rank_used_parameters() -> None:
    rendezvous = Rendezvous(RankInfo("env", 1, 2, 1), HashStore(), "127.0.0.1", timedelta(seconds=0.1))
    with pytest.raises(
        CollectiveTimeoutError, match=r"Missing: rank 0\. On rank 1, a backward pass has used parameters"
    ):
        gather_unused(rendezvous, "model/1", [])

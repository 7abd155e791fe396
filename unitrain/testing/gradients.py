"""The contract of `distributed_model` and `no_sync`: when `backward` returns, every gradient is the mean over ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unitrain.backends.base import Backend
from unitrain.errors import ConfigError, ModelError
from unitrain.testing.cases import contract, raises, same_on_every_rank
from unitrain.testing.models import FEATURES, assert_gradients, batch, build, gradients, loss_of, mean_gradients


def _backward(model: nn.Module, rank: int, step: int = 0) -> None:
    loss_of(model(batch(rank, step))).backward()


@contract
def gradients_are_the_mean_when_backward_returns(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for step in range(4):
        model.zero_grad()
        _backward(wrapped, backend.rank, step)
        assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: _backward(m, rank, step)))


@contract
def parameters_and_buffers_become_those_of_rank_0(backend: Backend) -> None:
    model = nn.Sequential(build(seed=backend.rank), nn.BatchNorm1d(3).double())
    for buffer in model[1].buffers():
        buffer += backend.rank
    backend.distributed_model(model)
    expected = nn.Sequential(build(seed=0), nn.BatchNorm1d(3).double()).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@contract
def nothing_else_changes_parameters(backend: Backend) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), wrapped)
    _backward(wrapped, backend.rank)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state, "the optimizer was stepped"
    assert optimizer.param_groups[0]["lr"] == 0.1


@contract
def no_sync_adds_locally_then_reduces_all_of_it(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    step = 0
    for micro_steps in (1, 3, 2, 5, 1):
        model.zero_grad()
        window = range(step, step + micro_steps)
        for number in window:
            if number == window[-1]:
                _backward(wrapped, backend.rank, number)
            else:
                with backend.no_sync(wrapped):
                    _backward(wrapped, backend.rank, number)

        def whole_window(m: nn.Module, rank: int, window: range = window) -> None:
            for number in window:
                _backward(m, rank, number)

        assert_gradients(model, mean_gradients(backend, twin, whole_window))
        step += micro_steps


@contract
def no_sync_keeps_gradients_local(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    with backend.no_sync(wrapped):
        _backward(wrapped, backend.rank)
    _backward(twin, backend.rank)
    assert_gradients(model, gradients(twin), 0)


@contract
def no_sync_takes_the_distributed_model_only(backend: Backend) -> None:
    if backend.size > 1:
        raises(ModelError, "no_sync takes the model that distributed_model returned", lambda: backend.no_sync(build()))


@contract
def clipping_sees_global_gradients(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    _backward(wrapped, backend.rank)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = mean_gradients(backend, twin, _backward)
    for name, parameter in twin.named_parameters():
        parameter.grad = expected[name]
    want = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
    assert_gradients(model, gradients(twin))


class TwoHeads(nn.Module):
    """A trunk with two heads, of which a forward uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(FEATURES, 5).double()
        self.left = nn.Linear(5, 2).double()
        self.right = nn.Linear(5, 2).double()

    def forward(self, x: Tensor, heads: str) -> Tensor:
        hidden = self.trunk(x).tanh()
        return torch.stack([getattr(self, head)(hidden) for head in heads.split()]).sum(0)


def _heads(rank: int, step: int) -> str:
    """Return the heads a rank uses: only rank 0 leaves one out, all leave one out, none does, they take turns."""
    return [
        "left" if rank == 0 else "left right",
        "left",
        "left right",
        "left" if (rank + step) % 2 else "right",
    ][step]


@contract
def unused_parameters_count_as_zero_or_stay_none(backend: Backend) -> None:
    model, twin = TwoHeads(), TwoHeads()
    wrapped = backend.distributed_model(model, unused_parameters=True)
    for step in range(4):
        model.zero_grad()
        loss_of(wrapped(batch(backend.rank, step), _heads(backend.rank, step))).backward()
        expected = mean_gradients(
            backend, twin, lambda m, rank, step=step: loss_of(m(batch(rank, step), _heads(rank, step))).backward()
        )
        assert_gradients(model, expected)


@contract
def unused_parameters_are_the_same_error_everywhere(backend: Backend) -> None:
    for heads in ("left", "left" if backend.rank == 0 else "left right"):
        wrapped = backend.distributed_model(TwoHeads())

        def step(wrapped: nn.Module = wrapped, heads: str = heads) -> None:
            loss_of(wrapped(batch(backend.rank), heads)).backward()

        text = raises(ModelError, "2 parameters got no gradient on", step)
        assert "right.weight, right.bias" in text
        assert "unused_parameters=True" in text
        same_on_every_rank(backend, text)


@contract
def frozen_parameters_stay_out(backend: Backend) -> None:
    model, twin = build(), build()
    for module in (model, twin):
        module[0].requires_grad_(False)  # type: ignore[index]
    wrapped = backend.distributed_model(model)
    _backward(wrapped, backend.rank)
    assert_gradients(model, mean_gradients(backend, twin, _backward))
    assert model[0].weight.grad is None  # type: ignore[index]


class Tied(nn.Module):
    """Input and output share one weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encode = nn.Linear(FEATURES, FEATURES, bias=False).double()
        self.decode = nn.Linear(FEATURES, FEATURES).double()
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decode(self.encode(x).tanh())
        return result


@contract
def shared_parameters_are_reduced_once(backend: Backend) -> None:
    model, twin = Tied(), Tied()
    wrapped = backend.distributed_model(model)
    for _ in range(2):
        model.zero_grad()
        _backward(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, _backward))
    assert model.decode.weight is model.encode.weight


@contract
def two_backwards_per_step_add_up(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for _ in range(2):
        model.zero_grad()
        _backward(wrapped, backend.rank, 0)
        _backward(wrapped, backend.rank, 1)

        def both(m: nn.Module, rank: int) -> None:
            _backward(m, rank, 0)
            _backward(m, rank, 1)

        assert_gradients(model, mean_gradients(backend, twin, both))


@contract
def two_forwards_then_one_backward(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)

    def run(m: nn.Module, rank: int) -> None:
        (loss_of(m(batch(rank, 0))) + loss_of(m(batch(rank, 1)))).backward()

    for _ in range(2):
        model.zero_grad()
        run(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, run))


@contract
def a_retained_graph_is_reduced_every_time(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)

    def run(m: nn.Module, rank: int) -> None:
        loss = loss_of(m(batch(rank)))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(2):
        model.zero_grad()
        run(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, run))


class Recomputed(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = build(seed=5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


@contract
def activation_checkpointing_is_reduced(backend: Backend) -> None:
    model, twin = Recomputed(), Recomputed()
    wrapped = backend.distributed_model(model)
    for _ in range(2):
        model.zero_grad()
        _backward(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, _backward))


@contract
def zero_grad_may_keep_or_drop_the_tensors(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for step, set_to_none in enumerate((True, False, False, True)):
        model.zero_grad(set_to_none=set_to_none)
        _backward(wrapped, backend.rank, step)
        assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: _backward(m, rank, step)))


@contract
def evaluation_between_steps_needs_no_other_rank(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for step in range(2):
        with torch.no_grad():
            for _ in range(backend.rank):  # another number on every rank
                wrapped(batch(backend.rank))
        model.zero_grad()
        _backward(wrapped, backend.rank, step)
        assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: _backward(m, rank, step)))


@contract
def unwrap_returns_the_users_model(backend: Backend) -> None:
    model = build()
    wrapped = backend.distributed_model(model)
    assert backend.unwrap(wrapped) is model
    assert backend.unwrap(model) is model
    assert list(backend.unwrap(wrapped).state_dict()) == list(build().state_dict())


@contract
def compression_stays_within_its_format(backend: Backend) -> None:
    for compression, tolerance in (("fp16", 2e-3), ("bf16", 1e-2)):
        model, twin = build().float(), build()
        wrapped = backend.distributed_model(model, compression=compression)  # type: ignore[arg-type]
        loss_of(wrapped(batch(backend.rank).float()).double()).backward()
        expected = mean_gradients(backend, twin, _backward)
        rounded = {name: None if g is None else g.float() for name, g in expected.items()}
        assert_gradients(model, rounded, tolerance)
        same_on_every_rank(backend, [p.grad.tolist() for p in model.parameters() if p.grad is not None])
    unknown: Any = "fp8"
    raises(ConfigError, "fp16, bf16", lambda: backend.distributed_model(build(), compression=unknown))


@contract
def models_that_cannot_be_trained_are_refused(backend: Backend) -> None:
    frozen = build().requires_grad_(False)
    raises(ModelError, "has no parameter that requires a gradient", lambda: backend.distributed_model(frozen))
    raises(ModelError, "nothing to train", lambda: backend.distributed_model(nn.ReLU()))
    sparse = nn.Sequential(nn.Embedding(10, 3, sparse=True))
    raises(ModelError, "sparse=False", lambda: backend.distributed_model(sparse))


@contract
def models_that_differ_between_ranks_are_refused(backend: Backend) -> None:
    if backend.size == 1:
        return
    last = backend.rank == backend.size - 1
    model = nn.Sequential(nn.Linear(3, 4 if last else 2))
    text = raises(ModelError, "'0.weight' is float32 [2, 3] on rank 0", lambda: backend.distributed_model(model))
    same_on_every_rank(backend, text)
    text = raises(
        ModelError,
        "no parameter that requires a gradient",
        lambda: backend.distributed_model(build().requires_grad_(not last)),
    )
    same_on_every_rank(backend, text)


def _compile(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager")
    return compiled  # type: ignore[no-any-return]


@contract
def compiled_models_are_reduced(backend: Backend) -> None:
    for compile_inside in (True, False):
        model, twin = build(), build()
        if compile_inside:
            wrapped = backend.distributed_model(_compile(model))
        else:
            wrapped = _compile(backend.distributed_model(model))
        for step in range(2):
            model.zero_grad()
            with backend.no_sync(wrapped):
                _backward(wrapped, backend.rank, step)
            _backward(wrapped, backend.rank, step + 7)

            def run(m: nn.Module, rank: int, step: int = step) -> None:
                _backward(m, rank, step)
                _backward(m, rank, step + 7)

            assert_gradients(model, mean_gradients(backend, twin, run))
        assert backend.unwrap(wrapped) is model

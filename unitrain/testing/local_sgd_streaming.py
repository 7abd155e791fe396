"""Contract tests of `LocalSGD` with fragments, overlapped transfers, and groups of ranks that train synchronously."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPointToPoint
from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.errors import ConfigError
from unitrain.optim.local_sgd import LocalSGD
from unitrain.testing.cases import assert_same_on_every_rank, contract, may_raise_unsupported_error, raises
from unitrain.testing.local_sgd_simulation import (
    adamw,
    compare_with_simulation,
    create_local_sgd,
    parameter_vector,
    sgd,
    train,
)
from unitrain.testing.models import batch, build, compute_loss

STREAMING = LocalSGDConfig(steps=6, outer_lr=0.7, outer_momentum=0.9, fragments=3, overlap_steps=2)


@contract
def fragments_are_synchronized_in_different_steps(backend: Backend) -> None:
    compare_with_simulation(backend, LocalSGDConfig(steps=4, fragments=2), sgd, steps=9)
    compare_with_simulation(
        backend, LocalSGDConfig(steps=5, fragments=3, outer_lr=0.7, outer_momentum=0.9), adamw, steps=11
    )


@contract
def transfers_are_merged_after_the_overlapped_steps(backend: Backend) -> None:
    compare_with_simulation(backend, STREAMING, adamw, steps=14)
    compare_with_simulation(backend, LocalSGDConfig(steps=3, overlap_steps=1, mixing=0.0), sgd, steps=8)
    compare_with_simulation(
        backend, LocalSGDConfig(steps=4, fragments=2, overlap_steps=3, mixing=0.9, warmup_steps=2), sgd, steps=13
    )


@contract
def overlapped_transfers_are_compressed_with_error_feedback(backend: Backend) -> None:
    for settings in (
        replace(STREAMING, compression="bf16", overlap_steps=1),
        replace(STREAMING, compression="int8", overlap_steps=5),
    ):
        compare_with_simulation(backend, settings, adamw, steps=14)


@contract
def no_overlap_with_one_fragment_equals_diloco(backend: Backend) -> None:
    results = []
    for settings in (
        replace(STREAMING, fragments=1, overlap_steps=0),
        LocalSGDConfig(steps=6, outer_lr=0.7, outer_momentum=0.9),
    ):
        local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw)
        train(backend, local_sgd, model, optimizer, range(13))
        results.append(parameter_vector(model))
    assert torch.equal(*results)


@contract
@may_raise_unsupported_error
def groups_of_ranks_train_synchronously(backend: Backend) -> None:
    compare_with_simulation(backend, LocalSGDConfig(steps=2, synchronous_ranks=2, warmup_steps=1), sgd, steps=6)
    settings = LocalSGDConfig(steps=2, synchronous_ranks="host", outer_lr=0.7, outer_momentum=0.9, compression="int8")
    compare_with_simulation(backend, settings, adamw, steps=5)


@contract
@may_raise_unsupported_error
def groups_of_different_sizes_are_weighted_by_their_ranks(backend: Backend) -> None:
    """On three or more ranks, the first group has two ranks, and each other group has one."""
    sizes = (2, *([1] * (backend.size - 2))) if backend.size > 1 else (1,)
    for compression in ("none", "int8"):
        settings = LocalSGDConfig(steps=2, synchronous_ranks=sizes, outer_lr=0.7, compression=compression)
        compare_with_simulation(backend, settings, adamw, steps=5)
    compare_with_simulation(backend, replace(STREAMING, synchronous_ranks=sizes, compression="bf16"), adamw, steps=13)


@contract
@may_raise_unsupported_error
def one_local_step_of_groups_equals_synchronous_training(backend: Backend) -> None:
    sizes = (1, backend.size - 1) if backend.size > 1 else (1,)
    local_sgd, model, optimizer = create_local_sgd(backend, LocalSGDConfig(steps=1, synchronous_ranks=sizes), plain_sgd)
    twin = build()
    wrapped = backend.distributed_model(twin)
    synchronous = backend.distributed_optimizer(plain_sgd(twin.parameters()), wrapped)
    for step in range(6):
        train(backend, local_sgd, model, optimizer, range(step, step + 1))
        compute_loss(wrapped(batch(backend.rank, step))).backward()
        synchronous.step()
        synchronous.zero_grad()
        torch.testing.assert_close(parameter_vector(model), parameter_vector(twin), rtol=0, atol=1e-12)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without momentum."""
    return torch.optim.SGD(parameters, lr=0.1)


@contract
def resumed_training_with_transfers_in_progress_is_bit_identical(backend: Backend) -> None:
    """Resume from a checkpoint after every step, so that some checkpoints are within a transfer."""
    group_size = 2 if isinstance(backend, SupportsPointToPoint) else 1
    settings = replace(STREAMING, steps=3, compression="int8", synchronous_ranks=group_size)
    expected, uninterrupted, optimizer = create_local_sgd(backend, settings, adamw)
    train(backend, expected, uninterrupted, optimizer, range(9))
    local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw)
    for step in range(9):
        train(backend, local_sgd, model, optimizer, range(step, step + 1))
        with local_sgd.averaged_weights():
            state, weights = local_sgd.state_dict(), copy.deepcopy(model.state_dict())
        local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw, seed=7)
        model.load_state_dict(weights)
        local_sgd.load_state_dict(state if backend.rank == 0 else {})
    assert torch.equal(parameter_vector(model), parameter_vector(uninterrupted))


@contract
def fragments_may_change_at_a_resume(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, STREAMING, adamw)
    train(backend, local_sgd, model, optimizer, range(7))  # the transfer of the last fragment is in progress
    state = local_sgd.state_dict()
    assert backend.rank or state["merges_in"], "no transfer is in progress"
    for changed in (
        replace(STREAMING, fragments=1),
        replace(STREAMING, fragments=2, overlap_steps=0, compression="int8"),
        replace(STREAMING, overlap_steps=4, outer_momentum=0.0),
        LocalSGDConfig(steps=2),
    ):
        other, model, optimizer = create_local_sgd(backend, changed, adamw, seed=7)
        other.load_state_dict(state)
        train(backend, other, model, optimizer, range(7, 17))
        other.synchronize()
        assert_same_on_every_rank(backend, parameter_vector(model).tolist())
        assert parameter_vector(model).isfinite().all()


@contract
@may_raise_unsupported_error
def groups_may_change_at_a_resume(backend: Backend) -> None:
    """Ranks of a group need equal weights, so a new group of ranks from different groups continues with the mean
    weights."""
    local_sgd, model, optimizer = create_local_sgd(backend, LocalSGDConfig(steps=4, compression="int8"), adamw)
    train(backend, local_sgd, model, optimizer, range(5))
    with local_sgd.averaged_weights():
        state, mean = local_sgd.state_dict(), parameter_vector(model)
    other, model, optimizer = create_local_sgd(
        backend, LocalSGDConfig(steps=4, synchronous_ranks="host"), adamw, seed=7
    )
    other.load_state_dict(state)
    torch.testing.assert_close(parameter_vector(model), mean, rtol=0, atol=1e-12)
    train(backend, other, model, optimizer, range(5, 6))
    assert_same_on_every_rank(backend, parameter_vector(model).tolist())


@contract
@may_raise_unsupported_error
def divided_groups_keep_their_compression_errors(backend: Backend) -> None:
    """If a resumed run divides the groups, the mean error of all groups, and thus its effect on the next outer
    gradient, does not change."""
    ranks: Any = (backend.size - 1, 1) if backend.size > 2 else "host"
    settings = LocalSGDConfig(steps=2, synchronous_ranks=ranks, compression="int8")
    local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw)
    train(backend, local_sgd, model, optimizer, range(3))
    state = local_sgd.state_dict()
    other, _, _ = create_local_sgd(backend, LocalSGDConfig(steps=2, compression="int8"), adamw, seed=7)
    other.load_state_dict(state)
    loaded = other.state_dict()

    def mean_errors(state: dict[str, Any]) -> dict[str, Any]:
        errors = [rank["errors"] for rank in state["ranks"] if rank["errors"]]
        return {name: torch.stack([error[name] for error in errors]).mean(0) for name in errors[0]}

    if backend.rank == 0:
        assert sum(bool(rank["errors"]) for rank in loaded["ranks"]) == backend.size
        before, after = mean_errors(state), mean_errors(loaded)
        assert any(error.abs().max() > 0 for error in before.values())
        torch.testing.assert_close(after, before, rtol=0, atol=1e-15)


@contract
def loaded_weights_discard_transfers(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, replace(STREAMING, outer_momentum=0.0), sgd)
    train(backend, local_sgd, model, optimizer, range(7))
    model.load_state_dict(build(3).state_dict())
    local_sgd.restart()
    optimizer.param_groups[0]["lr"] = 0.0
    train(backend, local_sgd, model, optimizer, range(7, 20))
    torch.testing.assert_close(parameter_vector(model), parameter_vector(build(3)), rtol=0, atol=1e-12)


@contract
def synchronized_weights_are_equal_on_every_rank(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, STREAMING, adamw)
    for step in range(13):
        train(backend, local_sgd, model, optimizer, range(step, step + 1))
        own = parameter_vector(model)
        with local_sgd.synchronized_weights():
            assert_same_on_every_rank(backend, parameter_vector(model).tolist())
            assert step < 8 or not torch.equal(parameter_vector(model), own)
        assert torch.equal(parameter_vector(model), own)


@contract
def half_precision_fragments_keep_unchanged_weights(backend: Backend) -> None:
    settings = replace(STREAMING, compression="bf16")
    model = build().bfloat16()
    local_sgd = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.01), backend, settings)
    before = parameter_vector(model)
    for _ in range(14):
        local_sgd.step()
    assert torch.equal(parameter_vector(model), before)


@contract
def group_sizes_of_another_number_of_ranks_raise(backend: Backend) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = LocalSGDConfig(steps=2, synchronous_ranks=(4, 4))
    message = f"synchronous_ranks=(4, 4) divides 8 ranks into groups, but the job has {backend.size}. Use"
    text = raises(ConfigError, message, lambda: LocalSGD(model, optimizer, backend, settings))
    assert_same_on_every_rank(backend, text)

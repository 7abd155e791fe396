"""Predict the step time and the network traffic of gradient compression and low-communication training.

The predictions use the cost of a ring (`cost_model.py`). A compressed reduction is an all-to-all and an allgather, with
as many messages and bytes as a reducescatter and an allgather in a ring. With `bf16`, the allgathers start after the
backward pass; on two ranks, one allgather during the backward pass replaces both collectives
(`backends/gradients/compression.py`). Transfers that are in progress at the same time share the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unitrain import __version__
from unitrain.backends.local_sgd_config import LocalSGDConfig, OuterCompression
from unitrain.bench.cost_model import (
    Network,
    operation_seconds,
    ring_allgather,
    ring_allreduce,
    ring_reducescatter,
    tree_broadcast,
)
from unitrain.bench.cost_prediction import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    FittedNetwork,
    HostLayout,
    Model,
    PredictedStep,
    describe_networks,
    predict_step,
)
from unitrain.errors import ConfigError, did_you_mean
from unitrain.optim.outer_gradient import bytes_per_synchronization
from unitrain.optim.parameter_bucket import BUCKET_ELEMENTS

SYNCHRONOUS = "synchronous"
# Local SGD and DiLoCo communicate in the same way.
LOCAL, LOCAL_BF16, LOCAL_INT8 = "local-sgd", "local-sgd-bf16", "local-sgd-int8"
STREAMING, HOSTS = "streaming", "local-sgd-hosts"
BF16 = "bf16"
METHODS = (SYNCHRONOUS, BF16, LOCAL, LOCAL_BF16, LOCAL_INT8, STREAMING, HOSTS)
_FRAGMENTS, _OVERLAP_STEPS = 5, 5
_BF16_BYTES = 2
_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PredictedMethod:
    """`seconds` is the mean time per step over the steps between two synchronizations, and `exposed_seconds` is the
    time per step in which a rank only waits for communication. `sent_bytes` is the number of bytes per step that a rank
    sends to other ranks; for `local-sgd-hosts`, the number of bytes that a host sends to other hosts.
    """

    seconds: float
    exposed_seconds: float
    sent_bytes: float


def check_methods(names: Sequence[str], hosts: HostLayout | None, ranks: Sequence[int]) -> None:
    """Raise ConfigError for unknown names, and for `local-sgd-hosts` without a host layout or with different numbers of
    ranks on the hosts."""
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"Unknown method {name!r}. {did_you_mean(name, METHODS)}Available: {', '.join(METHODS)}.")
    if HOSTS not in names:
        return
    if hosts is None:
        raise ConfigError(
            f"The method {HOSTS} needs a description of the hosts. "
            "Use --ranks-per-host 8 --host-latency 5e-6 --host-bandwidth 20"
        )
    for size in ranks:
        if size > hosts.ranks_per_host and size % hosts.ranks_per_host:
            raise ConfigError(
                f"{size} ranks are not a multiple of {hosts.ranks_per_host} ranks per host. "
                "Use multiples of --ranks-per-host for --ranks."
            )


def method_settings(local_steps: int) -> dict[str, str]:
    """Return the argument of TrainConfig that selects each method, with `local_steps` steps per synchronization.

    The argument of synchronous training, the default, is empty.
    """
    streaming = _local_config(STREAMING, local_steps)
    return {
        SYNCHRONOUS: "",
        BF16: 'compression="bf16"',
        LOCAL: f"local_sgd={local_steps}",
        LOCAL_BF16: f'local_sgd=LocalSGDConfig(steps={local_steps}, compression="bf16")',
        LOCAL_INT8: f'local_sgd=LocalSGDConfig(steps={local_steps}, compression="int8")',
        STREAMING: f"local_sgd=LocalSGDConfig(steps={local_steps}, fragments={streaming.fragments}, "
        f"overlap_steps={streaming.overlap_steps})",
        HOSTS: f'local_sgd=LocalSGDConfig(steps={local_steps}, synchronous_ranks="host")',
    }


def predict_method(
    name: str,
    model: Model,
    num_ranks: int,
    network: Network,
    *,
    local_steps: int,
    hosts: HostLayout | None = None,
    bucket_bytes: float = BUCKET_BYTES,
) -> PredictedMethod:
    """Return the predicted step of the method `name`. The time of the outer optimizer is not included.

    The allreduces of synchronous methods overlap with the backward pass, except for the allgathers of `bf16` on more
    than two ranks. Local SGD waits for each synchronization; with streaming, the transfer of a fragment overlaps with
    the next steps.
    """
    if name in (SYNCHRONOUS, BF16):
        ratio = min(1.0, _BF16_BYTES / model.bytes_per_parameter) if name == BF16 else 1.0
        step = _predict_synchronous(name, ratio, model, num_ranks, network, bucket_bytes)
        size = ratio * model.parameters * model.bytes_per_parameter
        return PredictedMethod(
            seconds=step.seconds,
            exposed_seconds=step.exposed_seconds,
            sent_bytes=2 * (num_ranks - 1) / num_ranks * size,
        )
    if name == HOSTS:
        assert hosts is not None
        return _predict_hosts(model, num_ranks, network, hosts, local_steps)
    local = _local_config(name, local_steps)
    transfer_seconds = _synchronization_seconds(model, num_ranks, network, local)
    exposed = _waiting_seconds(local, model.step_seconds, transfer_seconds) / local_steps
    return PredictedMethod(
        seconds=model.step_seconds + exposed,
        exposed_seconds=exposed,
        sent_bytes=_bytes_per_synchronization(model, num_ranks, local.compression) / local_steps,
    )


def _predict_synchronous(
    name: str, ratio: float, model: Model, num_ranks: int, network: Network, bucket_bytes: float
) -> PredictedStep:
    """Return the predicted step of a method that reduces all gradients. `ratio` is their compressed size divided by
    their size. The limit of collectives that run at the same time is also applied to the exchanges of `bf16`."""

    def first_collective(size: float) -> float:
        if name == SYNCHRONOUS:
            return operation_seconds(ring_allreduce, num_ranks, size, network)
        if num_ranks == 2:
            return operation_seconds(ring_allgather, num_ranks, num_ranks * ratio * size, network)
        # An all-to-all sends the same messages as a reducescatter.
        return operation_seconds(ring_reducescatter, num_ranks, ratio * size, network)

    return predict_step(
        model.work(bucket_bytes),
        first_collective,
        second_collective=(lambda size: operation_seconds(ring_allgather, num_ranks, ratio * size, network))
        if name == BF16 and num_ranks > 2
        else None,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=min(bucket_bytes, FIRST_BUCKET_BYTES),
        max_in_flight=network.max_in_flight,
    )


def _waiting_seconds(config: LocalSGDConfig, step_seconds: float, transfer_seconds: float) -> float:
    """Return the time in an interval of `config.steps` steps in which a rank waits for the transfers of the fragments,
    each of which takes `transfer_seconds`.

    Each transfer overlaps with `config.overlap_steps` steps, and all transfers of an interval overlap with its steps.
    If a transfer starts before the previous one is complete, it also waits for the previous one.
    """
    waiting_for_each_transfer = config.fragments * max(0.0, transfer_seconds - config.overlap_steps * step_seconds)
    waiting_for_all_transfers = config.fragments * transfer_seconds - config.steps * step_seconds
    return max(waiting_for_each_transfer, waiting_for_all_transfers)


def _predict_hosts(
    model: Model, num_ranks: int, network: Network, hosts: HostLayout, local_steps: int
) -> PredictedMethod:
    """Return the prediction for training in which the ranks of a host average their gradients after each backward pass.
    The first ranks of the hosts synchronize, and broadcast the result within their hosts."""
    per_host = min(num_ranks, hosts.ranks_per_host)
    num_hosts = num_ranks // per_host
    size = model.parameters * _element_bytes(model)
    buckets = _count_buckets(model.parameters)
    within = buckets * ring_allreduce(per_host, size / buckets, hosts.network)
    broadcasts = buckets * tree_broadcast(per_host, size / buckets, hosts.network)
    between = _synchronization_seconds(model, num_hosts, network, _local_config(LOCAL, local_steps))
    exposed = within + (between + broadcasts) / local_steps
    return PredictedMethod(
        seconds=model.step_seconds + exposed,
        exposed_seconds=exposed,
        sent_bytes=_bytes_per_synchronization(model, num_hosts, "none") / local_steps,
    )


def _synchronization_seconds(model: Model, num_ranks: int, network: Network, config: LocalSGDConfig) -> float:
    """Return the seconds of the synchronization of a fragment, which reduces one bucket after another. In a ring
    allreduce of n bytes, each rank sends 2(p-1)/p n bytes."""
    if num_ranks == 1:
        return 0.0
    buckets = _count_buckets(model.parameters / config.fragments)
    sent = _bytes_per_synchronization(model, num_ranks, config.compression) / config.fragments / buckets
    operations = 1 if config.compression == "none" else 2
    transfer_seconds = ring_allreduce(num_ranks, sent * num_ranks / (2 * (num_ranks - 1)), network)
    return buckets * (operations * network.overhead_seconds + transfer_seconds)


def _bytes_per_synchronization(model: Model, num_ranks: int, compression: OuterCompression) -> float:
    return bytes_per_synchronization(round(model.parameters), num_ranks, compression, _element_bytes(model))


def _element_bytes(model: Model) -> int:
    """Return the size in bytes of an element in a synchronization without compression. Local SGD converts
    half-precision weights to float32."""
    return max(_FLOAT32_BYTES, round(model.bytes_per_parameter))


def _count_buckets(num_elements: float) -> int:
    return max(1, math.ceil(num_elements / BUCKET_ELEMENTS))


def _local_config(name: str, local_steps: int) -> LocalSGDConfig:
    if name == STREAMING:
        fragments, overlap_steps = min(_FRAGMENTS, local_steps), min(_OVERLAP_STEPS, local_steps - 1)
        return LocalSGDConfig(steps=local_steps, fragments=fragments, overlap_steps=overlap_steps)
    compressions: dict[str, OuterCompression] = {LOCAL: "none", LOCAL_BF16: "bf16", LOCAL_INT8: "int8"}
    return LocalSGDConfig(steps=local_steps, compression=compressions[name])


def predict_methods(
    names: Sequence[str],
    model: Model,
    networks: Mapping[tuple[str, str], FittedNetwork],
    ranks: Sequence[int],
    *,
    local_steps: int,
    hosts: HostLayout | None = None,
    bucket_bytes: float = BUCKET_BYTES,
) -> dict[str, Any]:
    """Return the predicted step per network, number of ranks and method, as plain data.

    `networks` has the fitted network per (name, "ring"). Each row has the speedup relative to synchronous training.
    """
    rows = []
    for (network_name, _), (network, _) in networks.items():
        for size in ranks:
            prediction_by_method = {
                name: predict_method(
                    name, model, size, network, local_steps=local_steps, hosts=hosts, bucket_bytes=bucket_bytes
                )
                for name in dict.fromkeys([SYNCHRONOUS, *names])
            }
            rows += [
                {
                    "name": network_name,
                    "method": name,
                    "ranks": size,
                    "step_seconds": prediction_by_method[name].seconds,
                    "exposed_seconds": prediction_by_method[name].exposed_seconds,
                    "sent_bytes": prediction_by_method[name].sent_bytes,
                    "speedup": prediction_by_method[SYNCHRONOUS].seconds / prediction_by_method[name].seconds,
                }
                for name in names
            ]
    settings = method_settings(local_steps)
    return {
        "kind": "method_prediction",
        "unitrain": __version__,
        "model": vars(model),
        "local_steps": local_steps,
        "settings": {name: settings[name] for name in names},
        "networks": describe_networks(networks),
        "rows": rows,
    }

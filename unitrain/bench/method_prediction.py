"""Predict the step time and the network traffic of gradient compression and low-communication training.

The predictions use the cost of a ring (`cost_model.py`). A compressed reduction is an all-to-all and an allgather, with
as many messages and bytes as a reducescatter and an allgather in a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unitrain import __version__
from unitrain.backends.local_sgd_config import LocalSGDConfig, OuterCompression
from unitrain.bench.cost_model import Network, ring_allreduce, tree_broadcast
from unitrain.bench.cost_prediction import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    FittedNetwork,
    HostLayout,
    Model,
    describe_networks,
    predict_step,
)
from unitrain.errors import ConfigError, did_you_mean
from unitrain.optim.outer_gradient import bytes_per_synchronization

SYNCHRONOUS = "synchronous"
# Local SGD and DiLoCo communicate in the same way.
LOCAL, LOCAL_BF16, LOCAL_INT8 = "local-sgd", "local-sgd-bf16", "local-sgd-int8"
STREAMING, HOSTS = "streaming", "local-sgd-hosts"
BF16 = "bf16"
METHODS = (SYNCHRONOUS, BF16, LOCAL, LOCAL_BF16, LOCAL_INT8, STREAMING, HOSTS)
_FRAGMENTS, _OVERLAP_STEPS = 5, 5
_BF16_BYTES = 2


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

    The allreduces of synchronous methods overlap with the backward pass. Local SGD waits for each synchronization; with
    streaming, the transfer of a fragment overlaps with the next steps.
    """
    if name in (SYNCHRONOUS, BF16):
        ratio = min(1.0, _BF16_BYTES / model.bytes_per_parameter) if name == BF16 else 1.0
        step = predict_step(
            model.work(bucket_bytes),
            lambda size: ring_allreduce(num_ranks, ratio * size, network),
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=min(bucket_bytes, FIRST_BUCKET_BYTES),
        )
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
    exposed = local.fragments * max(
        0.0,
        _synchronization_seconds(model.parameters / local.fragments, num_ranks, network, local)
        - local.overlap_steps * model.step_seconds,
    )
    return PredictedMethod(
        seconds=model.step_seconds + exposed / local_steps,
        exposed_seconds=exposed / local_steps,
        sent_bytes=bytes_per_synchronization(round(model.parameters), num_ranks, local.compression) / local_steps,
    )


def _predict_hosts(
    model: Model, num_ranks: int, network: Network, hosts: HostLayout, local_steps: int
) -> PredictedMethod:
    """Return the prediction for training in which the ranks of a host average their gradients after each backward pass,
    and the first ranks of the hosts synchronize."""
    per_host, size = min(num_ranks, hosts.ranks_per_host), 4 * model.parameters
    num_hosts = num_ranks // per_host
    between = ring_allreduce(num_hosts, size, network) + tree_broadcast(per_host, size, hosts.network)
    within = ring_allreduce(per_host, model.parameters * model.bytes_per_parameter, hosts.network)
    exposed = within + (between if num_hosts > 1 else 0.0) / local_steps
    return PredictedMethod(
        seconds=model.step_seconds + exposed,
        exposed_seconds=exposed,
        sent_bytes=bytes_per_synchronization(round(model.parameters), num_hosts, "none") / local_steps,
    )


def _synchronization_seconds(num_elements: float, num_ranks: int, network: Network, config: LocalSGDConfig) -> float:
    """Return the seconds of a synchronization of `num_elements` elements. In a ring allreduce of n bytes, each rank
    sends 2(p-1)/p n bytes."""
    if num_ranks == 1:
        return 0.0
    sent = bytes_per_synchronization(round(num_elements), num_ranks, config.compression)
    return ring_allreduce(num_ranks, sent * num_ranks / (2 * (num_ranks - 1)), network)


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

"""`unitrain bench predict`."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain.cli import FiniteRange
from unitrain.cli.bench_options import (
    check_can_draw,
    check_output_files,
    json_option,
    output_option,
    parse_bytes,
    parse_numbers,
    report_errors,
    show_and_save,
)
from unitrain.errors import ConfigError

_DEFAULT_RANKS = "1,2,4,8,16,32,64,128,256,512,1024"
_DEFAULT_RANKS_OF_METHODS = 8


@click.command()
@click.argument("measured", required=False, type=click.Path(path_type=Path))
@click.option("--train", type=click.Path(path_type=Path), metavar="FILE", help="Result of bench train with the model.")
@click.option("--parameters", type=FiniteRange(min=1), help="Number of model parameters, such as 25.6e6.")
@click.option("--step-seconds", type=FiniteRange(min=0, min_open=True), help="Step time on one rank.")
@click.option(
    "--backward-share",
    type=FiniteRange(0, 1),
    default=2 / 3,
    show_default="two thirds",
    help="Fraction of the step time spent in the backward pass.",
)
@click.option(
    "--bytes-per-parameter",
    type=FiniteRange(min=0, min_open=True),
    default=4,
    show_default=True,
    help="Communicated bytes per parameter.",
)
@click.option("--bucket-bytes", metavar="SIZE", default="25MB", show_default=True, help="Gradient bucket size.")
@click.option("--latency", type=FiniteRange(min=0), metavar="SECONDS", help="Message latency, instead of MEASURED.")
@click.option(
    "--bandwidth",
    type=FiniteRange(min=0, min_open=True),
    metavar="GB/S",
    help="Bandwidth per rank, instead of MEASURED.",
)
@click.option("--algorithms", metavar="NAME,...", help="Allreduce algorithms. [default: ring; with --latency, all]")
@click.option(
    "--methods",
    metavar="NAME,...",
    help='Communication methods to compare, or "all". Methods: synchronous, bf16, local-sgd, local-sgd-bf16, '
    "local-sgd-int8, streaming and, with --ranks-per-host, local-sgd-hosts.",
)
@click.option(
    "--local-steps",
    type=click.IntRange(min=1),
    default=25,
    show_default=True,
    help="Steps between two synchronizations, with --methods.",
)
@click.option(
    "--ranks",
    metavar="N,...",
    help=f"Numbers of ranks to predict. [default: {_DEFAULT_RANKS}; with --methods, the measured number, or 8]",
)
@click.option(
    "--ranks-per-host",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks per host, for the hierarchical algorithm and local-sgd-hosts.",
)
@click.option("--host-latency", type=FiniteRange(min=0), metavar="SECONDS", help="Latency within a host.")
@click.option(
    "--host-bandwidth", type=FiniteRange(min=0, min_open=True), metavar="GB/S", help="Bandwidth within a host."
)
@click.option(
    "--servers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of parameter servers."
)
@json_option
@output_option
def predict(
    measured: Path | None,
    train: Path | None,
    parameters: float | None,
    step_seconds: float | None,
    backward_share: float,
    bytes_per_parameter: float,
    bucket_bytes: str,
    latency: float | None,
    bandwidth: float | None,
    algorithms: str | None,
    methods: str | None,
    local_steps: int,
    ranks: str | None,
    ranks_per_host: int | None,
    host_latency: float | None,
    host_bandwidth: float | None,
    servers: int,
    json_file: Path | None,
    output: Path | None,
) -> None:
    """Predict step time and scaling efficiency for different numbers of ranks, or compare methods of communication.

    The prediction uses an alpha-beta model (unitrain/bench/cost_model.py), which is fitted to MEASURED, a result of
    bench collectives, or defined by --latency and --bandwidth. The allreduce of a bucket overlaps with the rest of the
    backward pass. The model ignores stragglers and data loading, so the prediction is a lower bound on the step time.

    With --methods, the table has the step time and the bytes that a rank sends per step with gradient compression and
    with local steps (TrainConfig.local_sgd), which change the results of training.

    \b
      unitrain bench predict here.json --train trained.json
      unitrain bench predict here.json --parameters 25.6e6 --step-seconds 0.3
      unitrain bench predict --latency 10e-6 --bandwidth 2.5 --parameters 138e6 --step-seconds 0.42
      unitrain bench predict here.json --parameters 25.6e6 --step-seconds 0.3 --methods all
    """
    with report_errors():
        from unitrain.bench import cost_model, cost_prediction, method_prediction, results

        has_network_options = latency is not None or bandwidth is not None
        if (measured is not None) == has_network_options or (latency is None) != (bandwidth is None):
            raise ConfigError(
                "The network is described either by a result of bench collectives, or by --latency and --bandwidth. "
                "Use --latency 10e-6 --bandwidth 3"
            )
        has_model_options = parameters is not None or step_seconds is not None
        if (train is not None) == has_model_options or (parameters is None) != (step_seconds is None):
            raise ConfigError(
                "The model is described either by --train (a result of bench train) or by --parameters and "
                "--step-seconds. Use --parameters 25.6e6 --step-seconds 0.3"
            )
        if len({ranks_per_host is None, host_latency is None, host_bandwidth is None}) > 1:
            raise ConfigError(
                "--ranks-per-host, --host-latency and --host-bandwidth must be used together. "
                "Use --ranks-per-host 8 --host-latency 5e-6 --host-bandwidth 20"
            )
        if methods is not None and (algorithms is not None or output is not None):
            excluded = "--algorithms" if algorithms is not None else "--output"
            raise ConfigError(f"--methods prints a table of methods with the ring algorithm. Leave {excluded} out")
        if output is not None:
            check_can_draw(output)
        check_output_files(json_file, output)
        hosts = None
        if ranks_per_host is not None and host_latency is not None and host_bandwidth is not None:
            host_network = cost_model.Network(alpha=host_latency, beta=1e-9 / host_bandwidth)
            hosts = cost_prediction.HostLayout(ranks_per_host=ranks_per_host, network=host_network)
        default_algorithms = [*cost_model.ALGORITHMS, *([cost_model.HIERARCHICAL] if hosts is not None else [])]
        default_algorithms = default_algorithms if methods is None else ["ring"]
        selected = (
            [part.strip() for part in algorithms.split(",")]
            if algorithms
            else default_algorithms
            if measured is None
            else ["ring"]
        )
        cost_model.check_algorithms(selected)
        if cost_model.HIERARCHICAL in selected and hosts is None:
            raise ConfigError(
                "The hierarchical algorithm needs a description of the hosts. "
                "Use --ranks-per-host 8 --host-latency 5e-6 --host-bandwidth 20"
            )
        cost_by_algorithm = cost_prediction.cost_functions(selected, hosts, servers)
        network = None
        if latency is not None and bandwidth is not None:
            network = cost_model.Network(alpha=latency, beta=1e-9 / bandwidth)
        result = None if measured is None else results.read(measured, "collectives")
        networks = cost_prediction.fit_networks(result, network, cost_by_algorithm)
        trained = None if train is None else results.read(train, "train")
        if trained is not None:
            model = cost_prediction.model_from_result(trained, bytes_per_parameter)
        else:
            assert parameters is not None
            assert step_seconds is not None
            model = cost_prediction.Model(
                parameters=parameters,
                bytes_per_parameter=bytes_per_parameter,
                step_seconds=step_seconds,
                backward_share=backward_share,
            )
        bucket_size = parse_bytes("--bucket-bytes", bucket_bytes)
        if methods is not None:
            measured_ranks = _DEFAULT_RANKS_OF_METHODS if result is None else result["ranks"]
            sizes = parse_numbers("--ranks", ranks or str(measured_ranks))
            if methods.strip() == "all":
                names = [name for name in method_prediction.METHODS if name != method_prediction.HOSTS or hosts]
            else:
                names = [part.strip() for part in methods.split(",")]
            method_prediction.check_methods(names, hosts, sizes)
            predicted = method_prediction.predict_methods(
                names, model, networks, sizes, local_steps=local_steps, hosts=hosts, bucket_bytes=bucket_size
            )
        else:
            sizes = parse_numbers("--ranks", ranks or _DEFAULT_RANKS)
            predicted = cost_prediction.predict(model, networks, cost_by_algorithm, sizes, bucket_size)
            if trained is not None:
                predicted["measured"] = cost_prediction.compare_with_measured(
                    model, trained, networks, cost_by_algorithm
                )
    show_and_save(predicted, json_file, output)

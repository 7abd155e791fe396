"""`unitrain bench predict`."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain.cli.bench_options import check_can_draw, json_option, keep, number_of_bytes, numbers, output_option, told
from unitrain.errors import ConfigError


@click.command()
@click.argument("measured", required=False, type=click.Path(path_type=Path))
@click.option("--train", type=click.Path(path_type=Path), metavar="FILE", help="A result of bench train: the model.")
@click.option("--parameters", type=click.FloatRange(min=1), help="Of the model, as in 25.6e6.")
@click.option("--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Of one rank alone.")
@click.option(
    "--backward-share", type=click.FloatRange(0, 1), default=2 / 3, show_default="two thirds", help="Of the step."
)
@click.option("--bytes-per-parameter", type=click.FloatRange(min=0, min_open=True), default=4, show_default=True)
@click.option(
    "--bucket-bytes", metavar="SIZE", default="25MB", show_default=True, help="Gradients that travel at once."
)
@click.option("--latency", type=click.FloatRange(min=0), metavar="SECONDS", help="Of a message, instead of MEASURED.")
@click.option(
    "--bandwidth", type=click.FloatRange(min=0, min_open=True), metavar="GB/S", help="Of a rank, instead of MEASURED."
)
@click.option("--algorithms", metavar="NAME,...", help="[default: ring; with --latency, all that are known]")
@click.option("--ranks", metavar="N,...", default="1,2,4,8,16,32,64,128,256,512,1024", show_default=True)
@click.option("--ranks-per-host", type=click.IntRange(min=1), metavar="N", help="For the hierarchical algorithm.")
@click.option("--host-latency", type=click.FloatRange(min=0), metavar="SECONDS", help="Inside a host.")
@click.option("--host-bandwidth", type=click.FloatRange(min=0, min_open=True), metavar="GB/S", help="Inside a host.")
@click.option("--servers", type=click.IntRange(min=1), default=1, show_default=True, help="Parameter servers.")
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
    ranks: str,
    ranks_per_host: int | None,
    host_latency: float | None,
    host_bandwidth: float | None,
    servers: int,
    json_file: Path | None,
    output: Path | None,
) -> None:
    """Predict training steps and efficiency on up to 1,024 ranks.

    By the alpha-beta model (unitrain/bench/cost_model.py), fitted to MEASURED, a result of bench collectives, or of a
    network with this latency and bandwidth. Communication of one bucket overlaps with the backward of the next. Slower
    ranks and input are left out, so what is predicted is the best to hope for.

    \b
      unitrain bench predict here.json --train trained.json
      unitrain bench predict here.json --parameters 25.6e6 --step-seconds 0.3
      unitrain bench predict --latency 10e-6 --bandwidth 2.5 --parameters 138e6 --step-seconds 0.42
    """
    with told():
        from unitrain.bench import cost_model, cost_prediction, results

        if (measured is None) == (latency is None or bandwidth is None):
            raise ConfigError(
                "What to predict from is either a result of bench collectives, or --latency and --bandwidth. "
                "Use --latency 10e-6 --bandwidth 3"
            )
        if (train is None) == (parameters is None or step_seconds is None):
            raise ConfigError(
                "What is trained is either --train with a result of bench train, or --parameters and --step-seconds. "
                "Use --parameters 25.6e6 --step-seconds 0.3"
            )
        if (ranks_per_host is None) != (host_latency is None or host_bandwidth is None):
            raise ConfigError(
                "--ranks-per-host, --host-latency and --host-bandwidth go together. "
                "Use --ranks-per-host 8 --host-latency 5e-6 --host-bandwidth 20"
            )
        if output is not None:
            check_can_draw(output)
        hosts = None
        if ranks_per_host is not None and host_latency is not None and host_bandwidth is not None:
            inside = cost_model.Network(alpha=host_latency, beta=1e-9 / host_bandwidth)
            hosts = cost_prediction.Hosts(ranks=ranks_per_host, network=inside)
        known = [*cost_model.ALGORITHMS, *([cost_model.HIERARCHICAL] if hosts is not None else [])]
        asked = algorithms.split(",") if algorithms else known if measured is None else ["ring"]
        cost_model.check_algorithms(asked)
        if cost_model.HIERARCHICAL in asked and hosts is None:
            raise ConfigError(
                "The hierarchical algorithm needs to know the hosts. "
                "Use --ranks-per-host 8 --host-latency 5e-6 --host-bandwidth 20"
            )
        wanted = cost_prediction.costs(asked, hosts, servers)
        given = None
        if latency is not None and bandwidth is not None:
            given = cost_model.Network(alpha=latency, beta=1e-9 / bandwidth)
        result = None if measured is None else results.read(measured, "collectives")
        networks = cost_prediction.networks_of(result, given, wanted)
        trained = None if train is None else results.read(train, "train")
        if trained is not None:
            model = cost_prediction.model_of(trained, bytes_per_parameter)
        else:
            assert parameters is not None
            assert step_seconds is not None
            model = cost_prediction.Model(
                parameters=parameters,
                bytes_per_parameter=bytes_per_parameter,
                step_seconds=step_seconds,
                backward_share=backward_share,
            )
        sizes = numbers("--ranks", ranks)
        predicted = cost_prediction.predict(
            model, networks, wanted, sizes, number_of_bytes("--bucket-bytes", bucket_bytes)
        )
        if trained is not None:
            predicted["measured"] = cost_prediction.measured_beside(model, trained, networks, wanted)
    keep(predicted, json_file, output)

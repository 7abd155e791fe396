"""`unitrain train`: train as described by configuration files."""

from __future__ import annotations

import click

from unitrain.bootstrap import environment
from unitrain.errors import ConfigError, MissingDependencyError


@click.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG ...] [--KEY VALUE ...]")
def train(words: tuple[str, ...]) -> None:
    """Train as described by the YAML or JSON files CONFIG. Later files override earlier ones.

    The keys are the settings of TrainConfig, and the model, optimizer, scheduler, loss function, metrics, data,
    callbacks and loggers, whose classes or functions are named by import path. Options override the files. The resolved
    configuration is stored as config.yaml in output_dir and in each checkpoint. The command needs the extra "config".

    With several ranks, use `unitrain launch -np 2 config.yaml`, or start `python -m unitrain train config.yaml` with
    any launcher.

    \b
      --help                print all keys with their types and defaults
      --KEY.help [CLASS]    print the arguments of a class or function, as in --model.help package.Network
                            [default: the class or function in CONFIG]
      --print_config        print the resolved configuration and exit: a file to start from

    \b
      unitrain train config.yaml
      unitrain train config.yaml fast.yaml --batch_size 64 --optimizer.lr 0.01
      unitrain train runs/first/config.yaml                  # repeats the run in a new folder
      unitrain train runs/first/config.yaml --resume true    # continues the run
      unitrain train --print_config > config.yaml
    """
    if "--help" in words or "-h" in words:
        click.echo(click.get_current_context().get_help())
        _print_keys()
        return
    if not words:
        raise click.UsageError(
            "unitrain train takes a configuration file. Create one with: unitrain train --print_config > config.yaml"
        )
    from unitrain.config_files import instantiation, training

    try:
        parsed = instantiation.read_command_line(words)
    except ConfigError as error:
        raise click.UsageError("\n".join([str(error), *getattr(error, "__notes__", [])])) from error
    except MissingDependencyError as error:
        raise click.ClickException(str(error)) from error
    results = training.train(parsed)
    if environment.detect().rank == 0:
        click.echo("final " + " ".join(f"{name}={value:.6g}" for name, value in results.items()))


def _print_keys() -> None:
    """Print all keys with their types and help texts, or the reason if jsonargparse is not installed."""
    from unitrain.config_files.parser import keys_help

    try:
        click.echo("\n" + keys_help())
    except MissingDependencyError as error:
        click.echo(f"\nThe keys cannot be printed: {error}", err=True)

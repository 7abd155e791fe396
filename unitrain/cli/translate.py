"""`unitrain translate`: convert a launcher command line to another launcher, a batch script or a manifest."""

from __future__ import annotations

from dataclasses import replace

import click

from unitrain.backends import registry
from unitrain.errors import ConfigError
from unitrain.launchers import LaunchError, parse_hosts, translation
from unitrain.launchers.translation.hosts import place_processes
from unitrain.launchers.translation.words import join


@click.command()
@click.option("--to", "target", required=True, metavar="TARGET", help=f"{', '.join(translation.TARGETS)}.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts of the converted job. [default: as in LINE]")
@click.option("--backend", metavar="NAME", help="ddp, horovod, or a plug-in. [default: as in LINE]")
@click.option("--kind", metavar="KIND", help="kubernetes: TrainJob, PyTorchJob or MPIJob. [default: TrainJob]")
@click.argument("line", nargs=-1, required=True)
def translate(target: str, hosts: str | None, backend: str | None, kind: str | None, line: tuple[str, ...]) -> None:
    """Convert LINE, the command line of a launcher, to another launcher.

    The result is written to standard output. For each option without an equivalent, a note with an alternative is
    written to standard error. The backend does not change unless --backend is given.

    \b
      unitrain translate "horovodrun -np 16 -H a:8,b:8 python train.py" --to torchrun
      unitrain translate "torchrun --nproc-per-node 8 train.py" --to mpirun --backend horovod
      unitrain translate "mpirun -np 16 -H a:8,b:8 python train.py" --to sbatch > train.sbatch
      unitrain translate --to kubernetes --kind MPIJob -- horovodrun -np 4 python train.py
    """
    try:
        if backend is not None:
            registry.check_backend_name(backend)
        job = translation.parse(line[0] if len(line) == 1 else join(line))
        if hosts is not None:
            counts, names, notes = place_processes(job.size, parse_hosts(hosts))
            job = replace(
                job,
                ranks_per_host=counts,
                hosts=names,
                address=None,
                discovery_script=None,
                remarks=(*job.remarks, *notes),
            )
        translated = translation.build(replace(job, backend=backend or job.backend), target, kind)
    except (LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    print_translation(translated)


def print_translation(translated: translation.Translation) -> None:
    """Print a translation to standard output and its remarks to standard error."""
    if translated.text is not None:
        click.echo(translated.text, nl=False)
    for line in translated.lines:
        if len(translated.lines) > 1:
            click.echo(f"# on {line.host}")
        click.echo(line.shell())
    for remark in dict.fromkeys(translated.remarks):
        click.echo(f"note: {remark}", err=True)

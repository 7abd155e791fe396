"""Convert ten public training scripts with `unitrain migrate`, count the changed lines, and run the converted scripts.

    python benchmarks/migrate.py                    # downloads the scripts
    python benchmarks/migrate.py --run              # also runs the scripts on CPUs, see `migrated_runs.py`
    python benchmarks/migrate.py --folder scripts   # reads scripts/OWNER/REPOSITORY/PATH, for example from clones

`--run` requires Horovod and the packages that the scripts import:
pip install -c constraints.txt '.[examples,huggingface,migrate,peers,tensorboard]' diffusers evaluate timm
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import click
import migrated_runs
from public_scripts import SCRIPTS, PublicScript

from unitrain.migrate import Migration, migrate, num_changed_lines

RESULTS = Path(__file__).parent / "results" / "migrate.md"


def describe(script: PublicScript, source: str, result: Migration) -> tuple[str, str, int | None]:
    """Return the row of the table, the result, and the number of changed lines if the script was converted."""
    lines = None
    if result.source is not None:
        compile(result.source, script.path, "exec")
        lines = num_changed_lines(source, result.source)
        outcome = "converted"
    elif any(problem.is_structural for problem in result.problems):
        outcome = "refused"
    else:
        outcome = "needs edits"
    names = dict.fromkeys(problem.name.partition("(")[0] for problem in result.problems)
    cells = [
        f"{script.repository}, `{script.path}`",
        f"`{script.commit[:10]}`",
        script.library,
        outcome,
        "" if lines is None else str(lines),
        ", ".join(f"`{name}`" for name in names),
    ]
    return f"| {' | '.join(cells)} |", outcome, lines


@click.command()
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with the scripts."
)
@click.option("--run", "runs", is_flag=True, help="Run the converted scripts, about 15 minutes on two cores.")
@click.option("--write", is_flag=True, help=f"Write the tables to {RESULTS.name}, with --run.")
def main(folder: Path | None, runs: bool, write: bool) -> None:
    """Print the result of `unitrain migrate` for each script, and whether the converted scripts train correctly."""
    if write and not runs:
        raise click.UsageError("--write without --run would remove the table of the runs. Add --run")
    rows, outcomes, counts = list[str](), list[str](), list[int]()
    for script in SCRIPTS:
        source = script.read(folder)
        row, outcome, lines = describe(script, source, migrate(source))
        rows.append(row)
        outcomes.append(outcome)
        counts += [] if lines is None else [lines]
    numbers = ", ".join(f"{name}: {outcomes.count(name)}" for name in ("converted", "needs edits", "refused"))
    summary = f"{numbers}. Median number of changed lines per converted script: {median(counts) if counts else 'none'}."
    table = [
        "| script | commit | library | result | changed lines | lines to edit |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    run_lines = run_scripts(folder) if runs else []
    text = "\n".join(["# Conversion of public scripts", "", *table, "", *EXPLANATION, "", summary, "", *run_lines])
    click.echo(text)
    if write:
        RESULTS.write_text(text, encoding="utf-8")


def run_scripts(folder: Path | None) -> list[str]:
    """Run each script, and return the table and its explanation."""
    results = list[migrated_runs.Result]()
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory(prefix="unitrain-migrate-") as work:
            results.append(migrated_runs.run_script(script, folder, Path(work)))
    immediately = sum(result.is_correct and not result.needs_edits for result in results)
    correct = sum(result.is_correct for result in results)
    summary = f"{correct} of {len(results)} scripts train correctly, {immediately} of them immediately, without edits."
    return [
        f"| {' | '.join(migrated_runs.HEADER)} |",
        "|---" * len(migrated_runs.HEADER) + "|",
        *(result.row for result in results),
        "",
        *EXPLANATION_OF_RUNS,
        "",
        summary,
        "",
    ]


EXPLANATION = (
    "Blank lines and comments do not count as changed lines. A script needs edits if `unitrain migrate` refuses",
    "individual lines, and is refused if it cannot be converted as a whole, for example because it starts its own",
    "ranks.",
)
EXPLANATION_OF_RUNS = (
    "The scripts run on CPUs and without a network, on random data in the format that they read, with small, randomly",
    "initialized models in place of downloaded ones. `train_fabric.py` runs with the variables that `fabric run` sets.",
    "Edited lines are changes to the original script without which it does not run here: lines that `unitrain",
    "migrate` refuses, that require a GPU, or that fail with current versions of torch. The loss of",
    "`multigpu_torchrun.py`, the cross entropy of a single class, is always 0, and is replaced by the mean squared",
    "error. The smaller batches of `cv_example.py` only shorten the runs.",
    "",
    "Each converted script runs on one rank, on two ranks of DDP and on two ranks of Horovod, and the original script",
    "on two ranks of its own library, all with the same seed. The last two columns state the largest relative",
    "difference between the converted script on DDP and the other run, for the loss of each backward pass, the norm",
    "of the gradients of each step, and the final parameters. Results are the same if these differences are at most",
    "1e-6, and if the parameters of both ranks are bit-identical. `unitrain verify` does not apply: it requires a",
    "Trainer or a Pipeline, and the converted scripts keep their training loops.",
)

if __name__ == "__main__":
    main()

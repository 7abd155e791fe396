"""Convert ten public training scripts with `unitrain migrate`, and count the changed lines.

    python benchmarks/migrate.py                    # downloads the scripts
    python benchmarks/migrate.py --folder scripts   # reads scripts/OWNER/REPOSITORY/PATH, for example from clones

The scripts are not stored in this repository. They were chosen before the conversion was written.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from unitrain.migrate import Migration, changed_lines, migrate

RESULTS = Path(__file__).parent / "results" / "migrate.md"
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class PublicScript:
    """A file of a public repository at a commit."""

    library: str
    repository: str
    path: str
    commit: str

    def read(self, folder: Path | None) -> str:
        """Return the source, from `folder` or from GitHub."""
        if folder is not None:
            return (folder / self.repository / self.path).read_text(encoding="utf-8")
        url = f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            source: bytes = response.read()
        return source.decode()


SCRIPTS = (
    PublicScript(
        "Horovod", "horovod/horovod", "examples/pytorch/pytorch_mnist.py", "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a"
    ),
    PublicScript(
        "Horovod",
        "horovod/horovod",
        "examples/pytorch/pytorch_imagenet_resnet50.py",
        "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a",
    ),
    PublicScript(
        "Horovod",
        "tczhangzhi/pytorch-distributed",
        "horovod_distributed.py",
        "cd12856420858b14e02873e7d5c8cc7bb5aab5b0",
    ),
    PublicScript(
        "DDP",
        "pytorch/examples",
        "distributed/ddp-tutorial-series/multigpu_torchrun.py",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    ),
    PublicScript("DDP", "pytorch/examples", "imagenet/main.py", "77f55b912142e11fcfdf5b530231fb9c52f181e8"),
    PublicScript("DDP", "karpathy/nanoGPT", "train.py", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    PublicScript("DDP", "facebookresearch/DiT", "train.py", "ed81ce2229091fd4ecc9a223645f95cf379d582b"),
    PublicScript(
        "Accelerate", "huggingface/accelerate", "examples/cv_example.py", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
    ),
    PublicScript(
        "Accelerate", "huggingface/accelerate", "examples/nlp_example.py", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
    ),
    PublicScript(
        "Fabric",
        "Lightning-AI/pytorch-lightning",
        "examples/fabric/image_classifier/train_fabric.py",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    ),
)


def describe(script: PublicScript, source: str, result: Migration) -> tuple[str, int | None]:
    """Return the row of the table, and the number of changed lines if the script was converted."""
    lines = None
    if result.source is not None:
        compile(result.source, script.path, "exec")
        lines = changed_lines(source, result.source)
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
    return f"| {' | '.join(cells)} |", lines


@click.command()
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with the scripts."
)
@click.option("--write", is_flag=True, help=f"Write the table to {RESULTS.name}.")
def main(folder: Path | None, write: bool) -> None:
    """Print what `unitrain migrate` does with each script."""
    rows, outcomes, counts = list[str](), list[str](), list[int]()
    for script in SCRIPTS:
        source = script.read(folder)
        row, lines = describe(script, source, migrate(source))
        rows.append(row)
        outcomes.append(row.split(" | ")[3])
        counts += [] if lines is None else [lines]
    numbers = ", ".join(f"{name}: {outcomes.count(name)}" for name in ("converted", "needs edits", "refused"))
    summary = f"{numbers}. Median of changed lines of the converted scripts: {median(counts) if counts else 'none'}."
    table = [
        "| script | commit | library | result | changed lines | lines to edit |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    text = "\n".join(["# Conversion of public scripts", "", *table, "", *EXPLANATION, "", summary, ""])
    click.echo(text)
    if write:
        RESULTS.write_text(text, encoding="utf-8")


EXPLANATION = (
    "Blank lines and comments do not count as changed lines. A script needs edits if `unitrain migrate` refuses single",
    "lines, and is refused if it starts its own ranks. Converted scripts were compiled, but not run: they need GPUs,",
    "downloads or data sets.",
)

if __name__ == "__main__":
    main()

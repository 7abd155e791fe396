"""What the README and the pages under docs/ tell to type: every command is taken, and what can be shown is shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from unitrain.cli import unitrain

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def lines() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            for line in re.findall(r"^\$ (?:srun )?unitrain (.*)$", block, re.MULTILINE):
                if "$(" not in line:  # which takes a shell
                    yield f"{page.name}: {line}", shlex.split(line, comments=True)


LINES = dict(lines())


@pytest.mark.parametrize("line", LINES)
def test_what_is_to_be_typed_is_taken(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("train.py", "examples/digits.py", "file.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for name in ("runs/first", "runs/second"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "old.ckpt").touch()
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    words = LINES[line]
    if words[0] in ("launch", "submit") and "..." not in words and "srun" not in words:
        shown = CliRunner().invoke(unitrain, [words[0], "--dry-run", *words[1:]])
        # What this machine lacks, such as an mpirun, is told in one sentence; what is no option is another matter.
        assert shown.exit_code == 0 or "not on PATH" in shown.output, shown.output
    else:
        command: click.Command = unitrain
        context = click.Context(command)
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None
            command = found
        command.make_context(command.name, [word for word in words if word != "..."])


def test_pages_lead_to_each_other_and_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} leads to {target}"


def test_the_notebook_page_runs() -> None:
    source = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "notebooks.md").read_text(), re.DOTALL)
    assert source is not None
    names: dict[str, object] = {"__name__": "__main__"}
    exec(source[1], names)
    losses = names["losses"]
    assert isinstance(losses, list)
    assert len(losses) == 2
    assert losses[0] == losses[1] < 2.0

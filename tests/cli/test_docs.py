"""Commands, code blocks, links and tables in the README and in docs/ match the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner
from launches import running_launcher
from preload import preloaded

import unitrain
from unitrain import errors
from unitrain.cli import unitrain as command_line

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PUBLIC_MODULES = ("unitrain", "unitrain.testing")
VARIABLE = re.compile(r"UNITRAIN_[A-Z_]*[A-Z]")


class Block(NamedTuple):
    """A fenced code block. `place` is the page and the line of its start."""

    place: str
    language: str
    text: str


def code_blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, found.start()) + 1
            yield Block(f"{page.relative_to(ROOT)}:{line}", found[1], found[2])


BLOCKS = list(code_blocks())
PYTHON_BLOCKS = [block for block in BLOCKS if block.language == "python"]


def commands() -> Iterator[tuple[str, list[str]]]:
    for block in BLOCKS:
        lines = re.findall(r"^\$ (?:srun )?unitrain (.*)$", block.text, re.MULTILINE)
        for line in lines if block.language == "console" else ():
            if "$(" not in line:  # skip commands that only a shell can expand
                yield f"{block.place}: {line}", shlex.split(line, comments=True)


COMMANDS = dict(commands())


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the files that commands in the documentation refer to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in (
        "train.py",
        "examples/digits.py",
        "examples/hierarchical.py",
        "examples/huggingface.py",
        "file.py",
        "old.ckpt",
        "config.yaml",
        "examples/digits.yaml",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for name in ("runs/first", "runs/ddp", "runs/horovod"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("before.json", "after.json", "collectives.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts.sh").chmod(0o755)


@pytest.mark.usefixtures("user_files")
@pytest.mark.parametrize("line", COMMANDS)
def test_documented_command_is_accepted(line: str) -> None:
    words = COMMANDS[line]
    if words[0] in ("launch", "submit") and "..." not in words and "srun" not in words:
        shown = CliRunner().invoke(command_line, [words[0], "--dry-run", *words[1:]])
        # Accept two errors: a missing program such as mpirun, and commands that must be started on each host.
        accepted = "not on PATH" in shown.output or "must be started by hand on each" in shown.output
        assert shown.exit_code == 0 or accepted, shown.output
        return
    command: click.Command = command_line
    context = click.Context(command)
    while isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None
        command = found
    command.make_context(command.name, [word for word in words if word != "..."])


def find_public_object(function: ast.expr) -> Any:
    """Return the public object that a call such as unitrain.X(...), backend.x(...) or trainer.x(...) refers to."""
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return None
    owners = {"unitrain": unitrain, "backend": unitrain.Backend, "trainer": unitrain.Trainer}
    owner = owners.get(function.value.id)
    return None if owner is None else getattr(owner, function.attr)


def check_call(call: ast.Call) -> None:
    """Raise TypeError if the function does not accept a keyword, and ConfigError if a value is invalid."""
    function = find_public_object(call.func)
    if function is None or function is unitrain.Trainer.log:  # Trainer.log accepts any keyword
        return
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    inspect.signature(function).bind_partial(**keywords)
    if function is unitrain.TrainConfig and all(isinstance(value, ast.Constant) for value in keywords.values()):
        function(**{name: ast.literal_eval(value) for name, value in keywords.items()})


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.place)
def test_documented_code_uses_existing_names(block: Block) -> None:
    tree = ast.parse(textwrap.dedent(block.text))
    if "/migrating/" in block.place and "unitrain" not in block.text:
        return  # a script before its migration to unitrain
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "unitrain":
            assert node.module in PUBLIC_MODULES
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "unitrain":
            assert node.attr in unitrain.__all__, node.attr
        elif isinstance(node, ast.ClassDef):
            for base in filter(None, map(find_public_object, node.bases)):
                methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                assert all(hasattr(base, name) for name in methods), methods
        elif isinstance(node, ast.Call):
            check_call(node)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_imports_public_modules_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        assert not [name for name in names if name.startswith("unitrain.") and name not in PUBLIC_MODULES]


def test_relative_links_of_readme_and_docs_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


PLAIN_LOOP = """\
import torch
model = build_model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
for epoch in range(3):
for inputs, targets in loader:
loss = loss_fn(model(inputs), targets)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
"""


@pytest.mark.parametrize("page", ["README.md", "docs/guides/own_loop.md"])
def test_six_lines_of_the_custom_loop_differ_from_plain_torch(page: str) -> None:
    loop = next(
        block.text for block in PYTHON_BLOCKS if block.place.startswith(page) and "ShardedLoader(" in block.text
    )
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in loop.splitlines()]
    plain = PLAIN_LOOP.splitlines()
    assert len([line for line in lines if line and line not in plain]) == 6
    assert len([line for line in plain if line not in lines]) == 3


def test_page_about_configuration_files_shows_the_file_of_the_examples() -> None:
    page = (ROOT / "docs/guides/config_files.md").read_text()
    assert f"```yaml\n{(ROOT / 'examples/digits.yaml').read_text()}```\n" in page


def test_readme_has_at_most_180_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_every_error_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    assert not [name for name in classes if f"`{name}`" not in page and name != "UnitrainError"]


def test_every_public_name_is_documented_in_the_reference() -> None:
    reference = "".join((ROOT / "docs" / "reference" / name).read_text() for name in ("api.md", "errors.md"))
    assert not [
        name for name in unitrain.__all__ if name != "__version__" and not re.search(rf"[.`]{name}\b", reference)
    ]


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    # Commands and tests set these variables for their own processes.
    internal = {
        "UNITRAIN_RUN",
        "UNITRAIN_TUNE",
        "UNITRAIN_VERIFY",
        "UNITRAIN_LAUNCH",
        "UNITRAIN_TEST_KEY",
        "UNITRAIN_DOCTOR",
    }
    found = {name for folder in ("unitrain", "launchers") for name in variables_in(ROOT / folder)}
    assert sorted(found - internal - set(VARIABLE.findall(page))) == []


def variables_in(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                yield node.value


def test_every_package_is_documented() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    packages = [path.parent.name for path in (ROOT / "unitrain").glob("*/__init__.py")]
    assert not [name for name in packages if f"{name}/" not in page]


def program(page: str, containing: str) -> str:
    """Return the only code block of `page` that contains the text `containing`."""
    texts = [block.text for block in PYTHON_BLOCKS if block.place.startswith(page + ":") and containing in block.text]
    assert len(texts) == 1
    return texts[0]


def test_program_of_getting_started_prints_the_same_results_on_one_and_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(program("docs/getting_started.md", "trainer.fit"))
    environ = preloaded(os.environ)
    alone = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    found = re.fullmatch(r"accuracy (0\.\d+), loss (\d\.\d+)\n", alone.stdout)
    assert found
    assert float(found[1]) > 0.9
    launch = [str(Path(sys.executable).with_name("unitrain")), "launch", "-np", "2", str(script)]
    with running_launcher(launch, {"OMP_NUM_THREADS": "1"}) as ranks:
        output = ranks.output()
    assert ranks.process.returncode == 0, output
    assert found[0] in output


def test_example_test_of_the_extending_page_passes(tmp_path: Path) -> None:
    (tmp_path / "test_mean.py").write_text(program("docs/guides/extending.md", "run_ranks"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mean.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_program_of_the_notebook_page_returns_the_same_loss_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in preloaded(os.environ).items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(program("docs/guides/notebooks.md", "unitrain.run"), names)
    losses = names["losses"]
    assert isinstance(losses, list)
    assert len(losses) == 2
    assert losses[0] == losses[1] < 2.0


def test_program_that_chooses_settings_prints_its_results(tmp_path: Path) -> None:
    script = tmp_path / "settings.py"
    script.write_text(program("docs/guides/settings.md", "find_learning_rate"))
    command, environ = [sys.executable, str(script)], preloaded(os.environ)
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Sequential" in done.stdout
    assert "Suggested learning rate: " in done.stdout
    assert "Largest batch size: 64 per rank" in done.stdout

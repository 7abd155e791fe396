"""Convert a script that uses Horovod, DDP, Accelerate or Fabric."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from difflib import SequenceMatcher

import libcst as cst

from unitrain.errors import ConfigError
from unitrain.migrate import ddp, environment_variables, horovod, imports, indirect, startup, trainers
from unitrain.migrate.edits import Edits, Problem, Reason
from unitrain.migrate.script import Script
from unitrain.migrate.unsupported import LINES, STRUCTURAL, find_fix, is_of_library


@dataclass(frozen=True)
class Migration:
    """The result of a conversion. `source` is the converted script, or None if there are problems."""

    source: str | None
    reasons: tuple[Reason, ...]
    problems: tuple[Problem, ...]
    libraries: tuple[str, ...]


def migrate(source: str) -> Migration:
    """Convert the source of a training script.

    Raises ConfigError for source that is not valid Python, that already uses unitrain, or that uses none of the
    libraries.
    """
    try:
        _check_syntax(source)  # first, because libcst crashes for deeply nested brackets
        return _convert(source)
    except cst.ParserSyntaxError as error:
        raise ConfigError(
            f"Line {error.raw_line} is not valid Python: {error.message} Pass a Python 3 script."
        ) from error
    except RecursionError as error:
        raise ConfigError(
            "The script contains an expression with too many nested terms. Move it to a file of its own."
        ) from error


def _check_syntax(source: str) -> None:
    error = _find_syntax_error(source)
    if error is not None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"Line {error.lineno} is not valid Python: {error.msg}. Pass a script for Python {version}, or run "
            "unitrain migrate with the Python version of the script."
        )


def _convert(source: str) -> Migration:
    script = Script(source)
    edits = Edits(script)
    libraries = _find_libraries(script, indirect.refuse_imports(edits))
    if edits.problems:  # the rules would report calls whose names are not known
        return Migration(None, (), tuple(sorted(edits.problems)), tuple(libraries))
    indirect.refuse_strings(edits)
    _convert_calls(edits, libraries)
    _refuse_unknown(edits)
    _convert_startup(edits, libraries)
    imports.convert(edits)
    converted = None if edits.problems else edits.source()
    if converted is not None and (error := _find_syntax_error(converted)) is not None:
        edits.problems.add(_problem_in_converted(source, converted, error))
        converted = None
    return Migration(converted, tuple(sorted(edits.reasons)), tuple(sorted(edits.problems)), tuple(libraries))


def _find_syntax_error(source: str) -> SyntaxError | None:
    """Return the error of the compiler of this Python version, or None if `source` is valid."""
    if "\0" in source:  # the compiler does not report the line
        line = source.partition("\0")[0].count("\n") + 1
        return SyntaxError("it contains a null byte", ("script", line, None, None))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example, invalid escape sequences
            compile(source.encode(), "script", "exec", dont_inherit=True)  # bytes: a `# coding:` comment is checked
    except SyntaxError as error:
        if not error.lineno:  # the compiler does not report the line of the `# coding:` comment
            error.lineno = next((line for line, text in enumerate(source.splitlines(), 1) if "coding" in text), 1)
        return error
    return None


def _problem_in_converted(source: str, converted: str, error: SyntaxError) -> Problem:
    """Return the problem for a converted line that is not valid. Its line number refers to the original script."""
    before, after = source.splitlines(), converted.splitlines()
    index = (error.lineno or 1) - 1
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    line = next((first + index - start for _, first, _, start, end in blocks if start <= index < end), 0) + 1
    text = after[index].strip() if index < len(after) else ""
    return Problem(
        min(line, len(before)),
        text,
        f"The converted line is not valid Python ({error.msg}). Write the original line in a simpler form",
    )


def _find_libraries(script: Script, libraries: set[str]) -> list[str]:
    """Return the libraries with which the script trains, and those in `libraries`. Raises ConfigError if there are
    none."""
    libraries = set(libraries)
    uses_unitrain = False
    for node in script.nodes:
        name = script.imported_name(node) or "" if isinstance(node, cst.Name | cst.Attribute) else ""
        uses_unitrain |= name == "unitrain" or name.startswith("unitrain.")
        if name == "horovod" or name.startswith("horovod."):
            libraries.add("Horovod")
        elif name.startswith("torch.distributed.") or name in ddp.WRAPPERS:
            libraries.add("DDP")
        elif name in trainers.ACCELERATE:
            libraries.add("Accelerate")
        elif name in trainers.FABRIC:
            libraries.add("Fabric")
    if uses_unitrain:
        raise ConfigError("The script already uses unitrain. Pass the original script.")
    if not libraries:
        raise ConfigError(
            "The script uses neither Horovod nor DDP, Accelerate or Fabric. "
            "Pass the file that calls hvd.init, init_process_group, Accelerator or Fabric."
        )
    return sorted(libraries)


def _convert_calls(edits: Edits, libraries: list[str]) -> None:
    if "Horovod" in libraries:
        horovod.convert(edits)
    if "DDP" in libraries:
        ddp.convert(edits)
    if {"Accelerate", "Fabric"} & set(libraries):
        trainers.convert(edits)
    environment_variables.convert(edits)


def _refuse_unknown(edits: Edits) -> None:
    """Refuse each reference to one of the libraries that no rule converts or keeps."""
    script = edits.script
    for node, name in script.imported_references():
        if any(ancestor in edits.converted for ancestor in (node, *script.ancestors(node))):
            continue
        if (fix := find_fix(name, STRUCTURAL)) is not None:
            edits.refuse(node, fix, is_structural=True)
        elif (fix := find_fix(name, LINES)) is not None:
            edits.refuse(node, fix.replace("backend.", f"{edits.backend}."))
        elif name in (horovod.INIT, horovod.SHUTDOWN, *ddp.INIT, *ddp.SHUTDOWN):
            parent = script.parent(node)
            if not (isinstance(parent, cst.Call) and parent.func is node):
                edits.refuse(node, "Call it in a statement of its own instead of passing or assigning the function")
        elif is_of_library(name) and not ddp.is_kept(name) and not _is_inside_refused(edits, node):
            edits.refuse(node, "unitrain migrate does not know this name. Replace it, then migrate the script")


def _is_inside_refused(edits: Edits, node: cst.CSTNode) -> bool:
    """Return whether `node` belongs to a statement that was already refused."""
    statement = edits.script.statement(node)
    first = edits.script.line(statement) if statement is not None else edits.script.line(node)
    return any(first <= problem.line <= edits.script.line(node) for problem in edits.problems)


def _convert_startup(edits: Edits, libraries: list[str]) -> None:
    script = edits.script
    calls = [node for node in script.nodes if isinstance(node, cst.Call)]
    init_names = (horovod.INIT, *ddp.INIT)
    start_calls = [call for call in calls if script.called_name(call) in init_names]
    shutdown_calls = [call for call in calls if script.called_name(call) in (horovod.SHUTDOWN, *ddp.SHUTDOWN)]
    is_kept = not start_calls
    if is_kept:
        start_calls = [call for call in calls if script.called_name(call) in (*trainers.ACCELERATE, *trainers.FABRIC)]
    if len(start_calls) != 1:
        for call in start_calls[1:]:
            edits.refuse(call, "The script starts its ranks in several places. Keep one of them")
        if not start_calls:
            name = f"This file uses {' and '.join(libraries)}, but does not start it"
            edits.refuse(script.module, "Migrate the file that starts it", name=name, is_structural=True)
        return
    call = start_calls[0]
    text = ""
    if script.called_name(call) in ddp.INIT:
        text = ddp.convert_init_arguments(edits, call)
    elif not is_kept:
        if call.args:
            edits.refuse(call, "unitrain.init uses all ranks of the launcher: remove the arguments")
        if not ddp.may_use_gpus(script):
            edits.explain(call, 'to train on CPUs of hosts with GPUs, use unitrain.init(device="cpu")')
    startup.convert(edits, startup.Startup(call, shutdown_calls, f"unitrain.init({text})", is_kept))

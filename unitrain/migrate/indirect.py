"""Uses of a library that the rules cannot follow, because the script does not refer to its names: wildcard imports
(`from module import *`), imports whose module name is a string, and names in strings that are executed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from unitrain.migrate.calls import arguments, literal
from unitrain.migrate.edits import Edits
from unitrain.migrate.script import Script

_LIBRARIES = {
    "horovod": "Horovod", "torch.distributed": "DDP", "torch.nn.parallel": "DDP", "deepspeed": "DeepSpeed",
    "apex.parallel": "Apex",
}  # fmt: skip
_IMPORTS = {
    "horovod.torch": ("import horovod.torch as hvd", "hvd.rank()"),
    "torch.distributed": ("import torch.distributed as dist", "dist.get_rank()"),
    "torch.nn.parallel": ("from torch.nn.parallel import DistributedDataParallel", "DistributedDataParallel(model)"),
}
_IMPORT_FUNCTIONS = ("importlib.import_module", "importlib.__import__", "builtins.__import__")
_NAMESPACES = ("globals", "locals", "vars")
_EXEC_FUNCTIONS = ("exec", "eval", "compile")


def refuse_imports(edits: Edits) -> set[str]:
    """Refuse wildcard imports (`from module import *`) from the libraries, and imports whose module name is a string,
    such as `importlib.import_module("horovod.torch")`. Return the libraries that these import."""
    script = edits.script
    libraries = set[str]()
    for node in script.nodes:
        name = _indirectly_imported(script, node)
        if name is None or (library := _library(name)) is None:
            continue
        libraries.add(library)
        statement, use = _IMPORTS.get(name, (f"import {name}", f"{name}.NAME"))
        if isinstance(node, cst.ImportFrom):
            fix = f"Import the module by name, and use its name in each call: {statement}, and then {use}"
        else:
            fix = f"Import the module with an import statement: {statement}"
        edits.refuse(node, fix, is_structural=True)
    return libraries


def refuse_strings(edits: Edits) -> None:
    """Refuse strings that refer to a name of the libraries: `globals()["hvd"]`, and code for `exec` and `eval`."""
    script = edits.script
    names = set(_imported_variables(script))
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted({*names, *_LIBRARIES})))})(?!\w)")
    for node in script.nodes:
        if (key := _namespace_key(script, node)) is not None:
            if key in names:
                edits.refuse(node, f"Use the name directly: {key}")
        elif isinstance(node, cst.Call) and _builtin(script, node) in _EXEC_FUNCTIONS and node.args:
            texts = [script.text(part) for part in script.walk(node.args[0]) if _is_text(part)]
            if found := pattern.search("\n".join(texts)):
                edits.refuse(node, f"The string uses {found[0]}. Write its code as statements of the script")


def _indirectly_imported(script: Script, node: cst.CSTNode) -> str | None:
    """Return the module that `node` imports with a wildcard import or by a name in a string, or None for other
    nodes."""
    if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
        return None if node.relative or node.module is None else script.text(node.module)
    name: object = None
    if isinstance(node, cst.Call) and (
        script.called_name(node) in _IMPORT_FUNCTIONS or _builtin(script, node) == "__import__"
    ):
        call_arguments = arguments(node, ("name", "package")) or {}
        name, package = literal(call_arguments.get("name")), literal(call_arguments.get("package"))
        if isinstance(name, str) and isinstance(package, str) and name.startswith("."):
            name = package + name
    elif isinstance(node, cst.Subscript) and script.imported_name(node.value) == "sys.modules":
        name = _literal_index(node)
    return name if isinstance(name, str) else None


def _library(module: str) -> str | None:
    return next((text for name, text in _LIBRARIES.items() if f"{module}.".startswith(f"{name}.")), None)


def _imported_variables(script: Script) -> Iterator[str]:
    """Yield the variables that imports of the libraries set, except `torch`."""
    for node in script.nodes:
        if not isinstance(node, cst.Import | cst.ImportFrom) or isinstance(node.names, cst.ImportStar):
            continue
        if isinstance(node, cst.ImportFrom) and node.relative:
            continue
        module = f"{script.text(node.module)}." if isinstance(node, cst.ImportFrom) and node.module is not None else ""
        for alias in node.names:
            name = script.text(alias.name)
            variable = script.text(alias.asname.name) if alias.asname is not None else name.split(".")[0]
            if _library(module + name) is not None and variable != "torch":
                yield variable


def _builtin(script: Script, call: cst.Call) -> str | None:
    """Return the name of the builtin function that `call` calls, or None."""
    name = script.called_name(call) or ""
    if name.startswith("builtins."):
        return name.removeprefix("builtins.")
    return call.func.value if isinstance(call.func, cst.Name) and not name else None


def _namespace_key(script: Script, node: cst.CSTNode) -> object:
    """Return the string with which `node` reads or sets a variable of a namespace, as in `globals()["hvd"]` and
    `globals().get("hvd")`, or None for other nodes."""
    if isinstance(node, cst.Subscript) and _is_namespace(script, node.value):
        return _literal_index(node)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and _is_namespace(script, node.func.value):
        return literal(node.args[0]) if node.args else None
    return None


def _is_namespace(script: Script, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and not node.args and _builtin(script, node) in _NAMESPACES


def _literal_index(node: cst.Subscript) -> object:
    index = node.slice[0].slice
    return literal(cst.Arg(index.value)) if isinstance(index, cst.Index) else None


def _is_text(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleString | cst.FormattedStringText)

"""Add and remove imports in the converted script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import libcst as cst

from unitrain.migrate.edits import Edits, Statement, parse_statement

_LIBRARIES = ("horovod", "torch.distributed", "torch.nn.parallel")


def convert(edits: Edits) -> None:
    """Remove the imports of names of _LIBRARIES whose uses are all converted, and import unitrain.

    The import of unitrain replaces the first removed import or, if no import is removed, follows the imports at the
    start of the script.
    """
    script = edits.script
    is_added = False
    for statement in script.module.body:
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            continue
        import_node = statement.body[0]
        if not isinstance(import_node, cst.Import | cst.ImportFrom) or isinstance(import_node.names, cst.ImportStar):
            continue
        unused = [alias for alias in import_node.names if _is_unused(edits, import_node, alias)]
        if not unused:
            continue
        kept_aliases = [alias for alias in import_node.names if alias not in unused]
        replacement: list[Statement] = [_with_names(statement, import_node, kept_aliases)] if kept_aliases else []
        if not is_added:
            replacement.append(parse_statement("import unitrain"))
        edits.replace_statement(statement, partial(_replacement, replacement))
        names = ", ".join(script.text(alias.name) for alias in unused)
        verb = "is" if len(unused) == 1 else "are"
        edits.explain(statement, f"{names} {verb} no longer used" + ("" if is_added else "; unitrain is used instead"))
        is_added = True
    if not is_added:
        _add_import(edits)


def _replacement(statements: Sequence[Statement], updated: Statement) -> Sequence[Statement]:
    return statements


def _is_unused(edits: Edits, statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> bool:
    """Return whether `alias` is a name of _LIBRARIES whose references are all converted (`edits.converted`).

    An alias without references is only unused if it is a name of Horovod, because importing Horovod may fail where
    only other backends are installed.
    """
    script = edits.script
    if isinstance(statement, cst.ImportFrom) and statement.relative:  # a module of the user
        return False
    module = script.text(statement.module) if isinstance(statement, cst.ImportFrom) and statement.module else ""
    name = ".".join(filter(None, [module, script.text(alias.name)]))
    if not any(name == library or name.startswith(library + ".") for library in _LIBRARIES):
        return False
    bound = script.text(alias.asname.name) if alias.asname is not None else script.text(alias.name).split(".")[0]
    if bound == "torch":
        return False
    uses = [
        node
        for node in script.nodes
        if isinstance(node, cst.Name) and node.value == bound and not script.is_inside_import(node)
        if not (isinstance(parent := script.parent(node), cst.Attribute) and parent.attr is node)
        if not (isinstance(parent, cst.Arg) and parent.keyword is node)
    ]
    if not uses and not name.startswith("horovod"):
        return False
    return all(any(ancestor in edits.converted for ancestor in (node, *script.ancestors(node))) for node in uses)


def _with_names(
    statement: cst.SimpleStatementLine, import_node: cst.Import | cst.ImportFrom, names: Sequence[cst.ImportAlias]
) -> cst.SimpleStatementLine:
    """Return the import `statement` with only these `names`."""
    last_name = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return statement.with_changes(body=[import_node.with_changes(names=[*names[:-1], last_name])], leading_lines=())


def _add_import(edits: Edits) -> None:
    """Import unitrain after the imports at the start of the module."""
    last = None
    for statement in edits.script.module.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        if isinstance(statement.body[0], cst.Import | cst.ImportFrom):
            last = statement
    new = parse_statement("import unitrain")
    if last is None:
        first = edits.script.module.body[0]
        edits.refuse(first, "Import unitrain at the start of the file", name="import")
        return
    edits.replace_statement(last, lambda updated: [updated, new])
    edits.explain(last, "unitrain is used")

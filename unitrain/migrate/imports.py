"""Add and remove imports in the converted script."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from unitrain.migrate.edits import Edits, parse_statement

_LIBRARIES = ("horovod", "torch.distributed", "torch.nn.parallel")


def convert(edits: Edits) -> None:
    """Import unitrain, and remove the imports that are no longer used."""
    script = edits.script
    is_added = False
    for statement in script.module.body:
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            continue
        one = statement.body[0]
        if not isinstance(one, cst.Import | cst.ImportFrom) or isinstance(one.names, cst.ImportStar):
            continue
        unused = [alias for alias in one.names if _is_unused(edits, one, alias)]
        if not unused:
            continue
        kept = [alias for alias in one.names if alias not in unused]
        new = [] if is_added else [parse_statement("import unitrain")]
        if kept:
            shorter = _with_names(statement, one, kept)
            edits.replace_statement(statement, lambda _, new=new, shorter=shorter: [shorter, *new])  # type: ignore[misc]
        else:
            edits.replace_statement(statement, lambda _, new=new: new)  # type: ignore[misc]
        names = ", ".join(script.text(alias.name) for alias in unused)
        verb = "is" if len(unused) == 1 else "are"
        edits.explain(statement, f"{names} {verb} no longer used" + ("" if is_added else "; unitrain is used instead"))
        is_added = True
    if not is_added:
        _add(edits)


def _is_unused(edits: Edits, statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> bool:
    """Return whether `alias` is a name of _LIBRARIES whose references are all converted. Without any reference, it
    must be a name of Horovod."""
    script = edits.script
    module = script.text(statement.module) if isinstance(statement, cst.ImportFrom) and statement.module else ""
    name = f"{module}.{script.text(alias.name)}".lstrip(".")
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
    return all(any(one in edits.converted for one in (node, *script.ancestors(node))) for node in uses)


def _with_names(
    statement: cst.SimpleStatementLine, one: cst.Import | cst.ImportFrom, names: Sequence[cst.ImportAlias]
) -> cst.SimpleStatementLine:
    last = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return statement.with_changes(body=[one.with_changes(names=[*names[:-1], last])], leading_lines=())


def _add(edits: Edits) -> None:
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

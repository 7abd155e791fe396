"""Arguments of a call by the name of the parameter, and expressions of the converted script."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from unitrain.migrate.script import Script


def arguments(call: cst.Call, parameters: Sequence[str]) -> dict[str, cst.Arg] | None:
    """Return the arguments of `call` by parameter. `parameters` are the positional parameters in order.

    Return None if an argument cannot be assigned to a parameter: `*args`, `**kwargs`, or too many.
    """
    arguments_by_name = dict[str, cst.Arg]()
    for index, argument in enumerate(call.args):
        if argument.star:
            return None
        if argument.keyword is not None:
            arguments_by_name[argument.keyword.value] = argument
        elif index < len(parameters):
            arguments_by_name[parameters[index]] = argument
        else:
            return None
    return arguments_by_name


def literal(argument: cst.Arg | None) -> object:
    """Return the value of a literal argument: a number, string, boolean or None. Return None for a missing argument,
    and `...` for other expressions."""
    if argument is None:
        return None
    value = argument.value
    if isinstance(value, cst.Integer | cst.Float):
        return value.evaluated_value
    if isinstance(value, cst.SimpleString):
        return value.evaluated_value
    if isinstance(value, cst.Name):
        return {"True": True, "False": False, "None": None}.get(value.value, ...)
    return ...


def is_repeatable(node: cst.CSTNode) -> bool:
    """Return whether `node` can be evaluated twice without side effects: a name, or an attribute or an item of such an
    expression."""
    if isinstance(node, cst.Attribute):
        return is_repeatable(node.value)
    if isinstance(node, cst.Subscript):
        return is_repeatable(node.value) and all(_is_repeatable_index(element.slice) for element in node.slice)
    return isinstance(node, cst.Name)


def _is_repeatable_index(index: cst.BaseSlice) -> bool:
    bounds = [index.value] if isinstance(index, cst.Index) else [index.lower, index.upper, index.step]  # type: ignore[attr-defined]
    values = [bound.expression if isinstance(bound, cst.UnaryOperation) else bound for bound in bounds]
    return all(
        value is None or isinstance(value, cst.BaseNumber | cst.SimpleString) or is_repeatable(value)
        for value in values
    )


def unused_quotation_mark(script: Script, node: cst.CSTNode) -> str | None:
    """Return the quotation mark for a string that replaces `node`, or None if f-strings around `node` use both marks.

    Before Python 3.12, an expression in an f-string must not contain the quotation mark of the f-string.
    """
    used = {ancestor.end for ancestor in script.ancestors(node) if isinstance(ancestor, cst.FormattedString)}
    return next((mark for mark in ('"', "'") if mark not in used), None)


def build_call(function: str, positional: Sequence[cst.BaseExpression], **keywords: cst.BaseExpression) -> cst.Call:
    """Return a call of `function` with these positional and keyword arguments."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    call_arguments = [cst.Arg(value) for value in positional]
    call_arguments += [cst.Arg(value, keyword=cst.Name(name), equal=equal) for name, value in keywords.items()]
    call_arguments = [argument.with_changes(comma=comma) for argument in call_arguments[:-1]] + call_arguments[-1:]
    return cst.Call(cst.parse_expression(function), call_arguments)

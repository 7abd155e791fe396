"""Arguments of a call by the name of the parameter."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst


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


def build_call(function: str, positional: Sequence[cst.BaseExpression], **keywords: cst.BaseExpression) -> cst.Call:
    """Return a call of `function`."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    call_arguments = [cst.Arg(value) for value in positional]
    call_arguments += [cst.Arg(value, keyword=cst.Name(name), equal=equal) for name, value in keywords.items()]
    call_arguments = [argument.with_changes(comma=comma) for argument in call_arguments[:-1]] + call_arguments[-1:]
    return cst.Call(cst.parse_expression(function), call_arguments)

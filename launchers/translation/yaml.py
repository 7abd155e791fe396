"""Plain data as YAML, so that a manifest needs no package to be written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# What YAML reads as a string without quotes, under each of its versions: no number, no boolean, no sign of its own.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
_OTHERWISE = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def dump(data: Mapping[str, Any]) -> str:
    """Return mappings, lists, strings, numbers and booleans as YAML."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping) and data:
        for name, value in data.items():
            if isinstance(value, Mapping | list) and value:
                yield f"{_scalar(name)}:"
                yield from (f"  {line}" for line in _lines(value))
            else:
                yield f"{_scalar(name)}: {_scalar(value)}"
    elif isinstance(data, list) and data:
        for value in data:
            first, *rest = _lines(value)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(data)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OTHERWISE:
        return value
    if isinstance(value, str):
        return '"' + "".join(_character(one) for one in value) + '"'
    return json.dumps(value)  # which YAML reads as JSON does


def _character(one: str) -> str:
    if one in '"\\':
        return f"\\{one}"
    return one if one.isascii() and one.isprintable() else f"\\U{ord(one):08x}"

"""YAML text in which every string that a YAML reader could interpret as another type is quoted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

# Includes floats without a decimal point, such as 1e3: jsonargparse reads them as numbers, PyYAML as strings.
_NUMBER = re.compile(r"[-+]?[.0-9][0-9_.:]*(?:[eE][-+]?[0-9_]+)?$")


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no type hints
    """Quotes strings that PyYAML or jsonargparse read as another type."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def dump(data: Any) -> str:
    """Return the YAML text of `data` in block style. If PyYAML or jsonargparse reads the text, strings remain
    strings."""
    text: str = yaml.dump(data, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


def restore_quotes(text: str, reference: str) -> str:
    """Return `text` with the quotes of `reference`, a result of `dump` with the same values but without comments."""
    pieces: list[str] = []
    end = 0
    for node, quoted in zip(_scalars(yaml.compose(text)), _scalars(yaml.compose(reference)), strict=True):
        if node.start_mark.index < end:  # an alias of an earlier node
            continue
        if node.style is None and quoted.style is not None and node.value == quoted.value:
            pieces += [text[end : node.start_mark.index], reference[quoted.start_mark.index : quoted.end_mark.index]]
            end = node.end_mark.index
    return "".join([*pieces, text[end:]])


def _scalars(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Yield the scalars in the order of the text."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(key)
            yield from _scalars(value)

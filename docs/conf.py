"""Configuration of the documentation: Sphinx, Markdown pages (MyST) and the furo theme. `make docs` builds it."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

import unitrain

project = "unitrain"
author = "The unitrain authors"
copyright = "2026, The unitrain authors"
version = release = unitrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # so that pages can link to sections of other pages
smartquotes = False  # would turn the -- of options into a dash
default_role = "code"  # docstrings mark code with single backquotes

html_theme = "furo"
html_title = f"unitrain {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sourcelink = False
pygments_style, pygments_dark_style = "default", "github-dark"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

_CODE = re.compile(r"(`[^`]*`)")


def escape(text: str) -> str:
    """Return plain text with the characters escaped that reStructuredText interprets outside of code."""
    parts = _CODE.split(text)
    return "".join(part if part.startswith("`") else re.sub(r"([*|\\])|_(?!\w)", r"\\\g<0>", part) for part in parts)


def indentation(line: str) -> int:
    """Return the number of spaces before the text of `line`."""
    return len(line) - len(line.lstrip())


def as_block(lines: list[str]) -> list[str]:
    """Return consecutive lines as reStructuredText: as a literal block if their indentation shows a layout."""
    first = indentation(lines[0])
    if first == 0 or len({indentation(line) for line in lines}) == 1:
        return [escape(line) for line in lines]
    return [" " * first + "::", "", *("    " + line for line in lines)]


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make a docstring, which is plain text for readers of the source, valid reStructuredText; in place."""
    processed: list[str] = []
    for is_empty, block in groupby(lines, key=lambda line: not line.strip()):
        processed += [""] if is_empty else as_block(list(block))
    if "Args:" in processed:
        processed = GoogleDocstring(processed, Config(napoleon_use_param=False), app, what, name, obj, options).lines()
    lines[:] = processed


def process_description(app: Any, context: Any, lines: list[str]) -> None:
    """Show the example commands in the help of a command, which sphinx-click marks with |, as code; in place."""
    processed: list[str] = []
    for is_example, block in groupby(lines, key=lambda line: line.startswith("| ")):
        if is_example:
            processed += ["", ".. code-block:: console", "", *("   $ " + line[2:].strip() for line in block), ""]
        else:
            processed += map(escape, block)
    lines[:] = processed


def process_options(app: Any, context: Any, lines: list[str]) -> None:
    """Escape the help of options, in place."""
    lines[:] = [line if line.startswith("..") else escape(line) for line in lines]


def setup(app: Any) -> None:
    """Register the functions above; Sphinx calls it."""
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("sphinx-click-process-description", process_description)
    app.connect("sphinx-click-process-options", process_options)

"""The unified diff of a conversion, and the number of lines that it changes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence


def unified_diff(old: str, new: str, path: str) -> str:
    """Return the unified diff from `old` to `new`, which `patch` and `git apply -p0` can apply to the file `path`."""
    lines = difflib.unified_diff(_split_lines(old), _split_lines(new), fromfile=path, tofile=path, n=3)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def num_changed_lines(old: str, new: str) -> int:
    """Return the number of changed lines of code, without blank lines and comments.

    A line that replaces another one counts once: of each changed block, the longer side is counted.
    """
    before, after = old.splitlines(), new.splitlines()
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(
        max(_num_code_lines(before[first:last]), _num_code_lines(after[start:end]))
        for tag, first, last, start, end in blocks
        if tag != "equal"
    )


def _split_lines(text: str) -> list[str]:
    """Split `text` after each newline. Other separators, such as a form feed, do not end a line for `patch`."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _num_code_lines(lines: Sequence[str]) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)

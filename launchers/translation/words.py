"""The words of a shell's line, and lines of words.

What a shell would expand, as "$HOME/data" or *.txt, stays as it was typed: it is part of a word between two marks, and
is written again without being quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from launchers.errors import LaunchError

_OPEN, _CLOSE = "\ue000", "\ue001"
_TYPED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_NAME = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-])")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PAIRS = {"{": "}", "(": ")"}


def split(line: str) -> list[str]:
    """Return the words of one command. Raises LaunchError for an open quote, a pipe, a redirection or a second
    command."""
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(line):
        here = line[at]
        if here == "\\" and line[at + 1 : at + 2] == "\n":
            at += 2
        elif here in " \t\r\n":
            if word is not None:
                words.append(word)
            word = None
            at += 1
            if here == "\n" and words and line[at:].strip():
                raise _several(line[at:].strip().splitlines()[0])
        elif here == "#" and word is None:  # a comment
            at = line.find("\n", at) % (len(line) + 1)
        elif here in "|;&<>()":
            if word is not None:
                words.append(word)
            raise _several(line[at:].strip())
        else:
            part, at = _part(line, at)
            word = (word or "") + part
    if word is not None:
        words.append(word)
    return words


def join(words: Iterable[str]) -> str:
    """Return a line that a shell takes apart into `words`."""
    return " ".join(map(quote, words))


def quote(word: str) -> str:
    """Return `word` as it is typed."""
    if _OPEN not in word:
        return shlex.quote(word)
    parts = _TYPED.split(word)  # in turn what is literal, and what was typed
    return "".join(part if place % 2 else shlex.quote(part) if part else "" for place, part in enumerate(parts))


def typed(text: str) -> str:
    """Return a word, or part of one, that a shell is to expand."""
    return f"{_OPEN}{text}{_CLOSE}"


def expands(word: str) -> bool:
    """Return whether a shell would expand something in `word`."""
    return _OPEN in word


def shown(word: str) -> str:
    """Return `word` as it was typed, for a sentence."""
    return _TYPED.sub(lambda match: match[1].strip('"'), word)


def plain(word: str) -> str:
    """Return `word` with its *, ? and [ as they are: an option's value such as n[1-4] is seldom the name of a file."""
    return re.sub(f"{_OPEN}([*?\\[]){_CLOSE}", r"\1", word)


def assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that are set before a command, as in `A=1 env B=2 program`, and the words from the program
    on."""
    variables: dict[str, str] = {}
    rest = list(words)
    while rest:
        match = _ASSIGNMENT.fullmatch(rest[0])
        if match is not None:
            variables[match[1]] = match[2]
        elif rest[0] != "env" or (rest[1:2] and rest[1].startswith("-")):
            break
        rest.pop(0)
    return variables, rest


def _part(line: str, at: int) -> tuple[str, int]:
    """Return the piece of a word that begins at `at`, and where it ends."""
    here = line[at]
    if here == "\\":
        return line[at + 1 : at + 2], at + 2
    if here == "'":
        end = line.find("'", at + 1)
        if end < 0:
            raise _open("'", line[at:])
        return line[at + 1 : end], end + 1
    if here == '"':
        return _quoted(line, at)
    if here in "$`":
        end = _expansion(line, at)
        return (typed(line[at:end]), end) if end > at + 1 else (here, at + 1)
    if here in "*?[" or (here == "~" and (at == 0 or line[at - 1] in " \t=:")):
        return typed(here), at + 1
    return here, at + 1


def _quoted(line: str, at: int) -> tuple[str, int]:
    text, start = "", at
    at += 1
    while at < len(line) and line[at] != '"':
        if line[at] == "\\" and line[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            text += "" if line[at + 1] == "\n" else line[at + 1]
            at += 2
            continue
        end = _expansion(line, at) if line[at] in "$`" else at
        if end > at + 1:
            text += typed(f'"{line[at:end]}"')
            at = end
        else:
            text += line[at]
            at += 1
    if at >= len(line):
        raise _open('"', line[start:])
    return text or typed('""'), at + 1


def _expansion(line: str, at: int) -> int:
    """Return where the expansion that begins at `at` ends, or `at` for a $ that means itself."""
    if line[at] == "`":
        end = line.find("`", at + 1)
        if end < 0:
            raise _open("`", line[at:])
        return end + 1
    closing = _PAIRS.get(line[at + 1 : at + 2])
    if closing is None:
        match = _NAME.match(line, at)
        return match.end() if match else at
    depth, opening, end = 0, line[at + 1], at + 1
    while end < len(line):
        depth += (line[end] == opening) - (line[end] == closing)
        end += 1
        if depth == 0:
            return end
    raise _open(f"${opening}", line[at:])


def _open(what: str, text: str) -> LaunchError:
    return LaunchError(f"{what} in {text!r} is opened and not closed. Close it, or put a \\ before it")


def _several(text: str) -> LaunchError:
    return LaunchError(
        f"The line goes on with {text!r} where its command has ended. Give the one command that starts the job, "
        "without pipes and redirections, and quote it whole, as in: "
        "unitrain translate 'horovodrun -np 2 python train.py' --to torchrun"
    )

"""Splitting of command lines into words, and quoting of words.

Text that a shell would expand, such as "$HOME/data" or *.txt, must appear in the translated command as it was typed, so
that the shell still expands it. `split` encloses such text in two private-use characters, and `quote` writes the text
unchanged.

Literal text is quoted by `shlex.quote` of the standard library. `shlex.split` is not used, because it returns the same
word for $HOME and '$HOME', although a shell expands only the first, and because it does not support $'...' and braces.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from unitrain.launchers.errors import LaunchError

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARKED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_NAME = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-])")
_ENDS_IN_NAME = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*\Z")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PAIRS = {"{": "}", "(": ")"}
_SEQUENCE = re.compile(r"(-?[0-9]+\.\.-?[0-9]+|[A-Za-z]\.\.[A-Za-z])(\.\.-?[0-9]+)?")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8}|[0-7]{1,3}|c.|.)", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def split(line: str) -> list[str]:
    """Return the words of one command.

    Raises LaunchError for an unclosed quote, a pipe, a redirection or a second command.
    """
    words: list[str] = []
    word: str | None = None
    position = 0
    while position < len(line):
        char = line[position]
        if char == "\\" and line[position + 1 : position + 2] == "\n":
            position += 2
        elif char in " \t\r\n":
            if word is not None:
                words.append(word)
            word = None
            position += 1
            if char == "\n" and words and line[position:].strip():
                raise _several_commands_error(line[position:].strip().splitlines()[0])
        elif char == "#" and word is None:  # a comment
            position = line.find("\n", position) % (len(line) + 1)
        elif char in "|;&<>()":
            if word is not None:
                words.append(word)
            raise _several_commands_error(line[position:].strip())
        else:
            part, position = _parse_part(line, position)
            word = (word or "") + part
    if word is not None:
        words.append(word)
    return words


def join(words: Iterable[str]) -> str:
    """Return the command line that a shell splits into `words`."""
    return " ".join(map(quote, words))


def quote(word: str) -> str:
    """Return `word` as text for a shell."""
    if _OPEN not in word:
        return shlex.quote(word)
    parts = _MARKED.split(word)  # alternately literal text and text to expand
    text = ""
    for index, part in enumerate(parts):
        if index % 2 or not part:
            text += part
        elif _ENDS_IN_NAME.search(text) and re.match(r"[A-Za-z0-9_]", part):  # $NAME'text' is not $NAMEtext
            text += f"'{part[0]}'{shlex.quote(part[1:]) if part[1:] else ''}"
        else:
            text += shlex.quote(part)
    return text


def mark_expansion(text: str) -> str:
    """Return `text`, which a shell would expand, enclosed in marks. It may be a word or a part of one."""
    return f"{_OPEN}{text}{_CLOSE}"


def has_expansion(word: str) -> bool:
    """Return whether `word` contains text that a shell would expand."""
    return _OPEN in word


def as_typed(word: str) -> str:
    """Return `word` without marks and the quotes inside them, for messages."""
    return _MARKED.sub(lambda match: match[1].strip('"'), word)


def without_glob_marks(word: str) -> str:
    """Return `word` with *, ? and [ as literal text: the value of an option (n[1-4]) is rarely a file pattern."""
    return re.sub(f"{_OPEN}([*?\\[]){_CLOSE}", r"\1", word)


def split_assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables set before a command, as in `A=1 env B=2 program`, and the words from the program onward."""
    variables: dict[str, str] = {}
    remaining_words = list(words)
    while remaining_words:
        match = _ASSIGNMENT.fullmatch(remaining_words[0])
        if match is not None:
            variables[match[1]] = match[2]
        elif remaining_words[0] != "env" or (remaining_words[1:2] and remaining_words[1].startswith("-")):
            break
        remaining_words.pop(0)
    return variables, remaining_words


def _parse_part(line: str, position: int) -> tuple[str, int]:
    """Return the piece of a word that begins at index `position`, and the index after it."""
    char = line[position]
    if char == "\\":
        return line[position + 1 : position + 2], position + 2
    if char == "'":
        end = line.find("'", position + 1)
        if end < 0:
            raise _unclosed_quote_error("'", line[position:])
        return line[position + 1 : end], end + 1
    if char == '"':
        return _parse_quoted(line, position)
    if char == "$" and line[position + 1 : position + 2] == "'":
        return _parse_ansi_quoted(line, position)
    if char == "$" and line[position + 1 : position + 2] == '"':  # a localized string, unchanged in the C locale
        return _parse_quoted(line, position + 1)
    if char == "{" and (end := _braces_end(line, position)) > position:
        return mark_expansion(line[position:end]), end
    if char in "$`":
        end = _expansion_end(line, position)
        return (mark_expansion(line[position:end]), end) if end > position + 1 else (char, position + 1)
    if char in "*?[" or (char == "~" and (position == 0 or line[position - 1] in " \t=:")):
        return mark_expansion(char), position + 1
    return char, position + 1


def _parse_quoted(line: str, position: int) -> tuple[str, int]:
    text, start = "", position
    position += 1
    while position < len(line) and line[position] != '"':
        if line[position] == "\\" and line[position + 1 : position + 2] in ('"', "\\", "$", "`", "\n"):
            text += "" if line[position + 1] == "\n" else line[position + 1]
            position += 2
            continue
        end = _expansion_end(line, position) if line[position] in "$`" else position
        if end > position + 1:
            text += mark_expansion(f'"{line[position:end]}"')
            position = end
        else:
            text += line[position]
            position += 1
    if position >= len(line):
        raise _unclosed_quote_error('"', line[start:])
    return text or mark_expansion('""'), position + 1


def _parse_ansi_quoted(line: str, position: int) -> tuple[str, int]:
    """Return the text of $'...' at index `position` with its escapes replaced, and the index after it.

    If the bytes are not valid UTF-8, return the text as typed, marked for expansion.
    """
    end = position + 2
    while end < len(line) and line[end] != "'":
        end += 2 if line[end] == "\\" else 1
    if end >= len(line):
        raise _unclosed_quote_error("$'", line[position:])
    try:
        text = _ESCAPE.sub(lambda match: _unescape(match[1]), line[position + 2 : end]).partition("\0")[0]
        return os.fsencode(text).decode(), end + 1
    except (ValueError, OverflowError):  # bytes or numbers that do not encode characters
        return mark_expansion(line[position : end + 1]), end + 1


def _unescape(escape: str) -> str:
    """Return the character of an escape (given without its backslash), or a surrogate for a byte above 127."""
    kind, digits = escape[0], escape[1:]
    if kind in "uU" and digits:
        return chr(int(digits, 16))
    if kind == "x" and digits:
        return os.fsdecode(bytes([int(digits, 16)]))
    if kind in "01234567":
        return os.fsdecode(bytes([int(escape, 8) & 0xFF]))
    if kind == "c" and digits:
        return chr(ord(digits.upper()) ^ 0x40)
    return _ESCAPED.get(kind, kind if kind in "\\'\"?" else f"\\{kind}")


def _braces_end(line: str, position: int) -> int:
    """Return the index after the braces at `position` if bash expands them, as in {a,b} and {0..9}; else `position`."""
    depth, comma, index = 0, False, position
    while index < len(line):
        char = line[index]
        if char in " \t\r\n|;&<>()":
            return position
        if char in "\\'\"$`":  # quoted and expanded text cannot end the braces
            index = _parse_part(line, index)[1]
            continue
        comma = comma or (char == "," and depth == 1)
        depth += (char == "{") - (char == "}")
        index += 1
        if depth == 0:
            return index if comma or _SEQUENCE.fullmatch(line[position + 1 : index - 1]) else position
    return position


def _expansion_end(line: str, position: int) -> int:
    """Return the index after the expansion that begins at `position`; `position` itself for a literal $."""
    if line[position] == "`":
        end = line.find("`", position + 1)
        if end < 0:
            raise _unclosed_quote_error("`", line[position:])
        return end + 1
    closing = _PAIRS.get(line[position + 1 : position + 2])
    if closing is None:
        match = _NAME.match(line, position)
        return match.end() if match else position
    depth, opening, end = 0, line[position + 1], position + 1
    while end < len(line):
        depth += (line[end] == opening) - (line[end] == closing)
        end += 1
        if depth == 0:
            return end
    raise _unclosed_quote_error(f"${opening}", line[position:])


def _unclosed_quote_error(quote_mark: str, text: str) -> LaunchError:
    return LaunchError(f"{quote_mark} in {text!r} is not closed. Close it, or put a \\ before it")


def _several_commands_error(text: str) -> LaunchError:
    return LaunchError(
        f"The command line continues with {text!r} after the command. Give only the command that starts the job, "
        "without pipes and redirections, in quotes, as in: "
        "unitrain translate 'horovodrun -np 2 python train.py' --to torchrun"
    )

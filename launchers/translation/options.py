"""Taking a launcher's options off its command line, by a table of all that it knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.translation.job import Other, number
from unitrain.launchers.translation.words import plain, shown


@dataclass(frozen=True)
class Given:
    """An option that was given: its canonical name, its values, and the words that said so."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Syntax:
    """How a launcher's options are written.

    `arity` has the number of values of each, by its canonical name with its dashes; -1 is one that may come after a "="
    and else is not there. `aliases` are other spellings. With `any_dashes` one dash is as good as two, as for MPI's
    launchers; else a long option may be shortened, and a short one may have its value right after it.
    """

    launcher: str
    arity: Mapping[str, int]
    aliases: Mapping[str, str] = field(default_factory=dict)
    any_dashes: bool = False

    def take(self, words: Sequence[str]) -> tuple[list[Given], tuple[str, ...]]:
        """Return the options that `words` begin with, and the words after them: the program. Raises LaunchError."""
        given: list[Given] = []
        at = 0
        while at < len(words) and words[at].startswith("-") and words[at] != "-":
            word = plain(words[at])
            at += 1
            if word == "--":
                break
            name, value = self._name(word)
            count = self.arity[name]
            attached = () if value is None else (value,)
            missing = 0 if count < 0 else count - len(attached)
            if missing < 0:
                raise LaunchError(f"{name} of {self.launcher} takes no value, got {shown(word)!r}. Write: {name}")
            if at + missing > len(words):
                raise LaunchError(f"{shown(word)} of {self.launcher} lacks its value. Write it after {name}")
            values = tuple(map(plain, words[at : at + missing]))
            given.append(Given(name, (*attached, *values), (word, *values)))
            at += missing
        if at == len(words):
            raise LaunchError(f"The line of {self.launcher} names no program to run. End it as in: python train.py")
        return given, tuple(words[at:])

    def _name(self, word: str) -> tuple[str, str | None]:
        """Return the canonical name of an option, and the value that is attached to it."""
        for spelled, value in self._readings(word):
            if spelled in self.arity:
                return spelled, value
            if spelled in self.aliases:
                return self.aliases[spelled], value
        known = [*self.arity, *self.aliases]
        plain = word.partition("=")[0]
        near = difflib.get_close_matches(plain, known, n=1)
        suggestion = f"Did you mean {near[0]!r}? " if near else ""
        raise LaunchError(
            f"{self.launcher} has no option {shown(plain)!r}. {suggestion}Options of the program go after the program."
        )

    def _readings(self, word: str) -> Iterator[tuple[str, str | None]]:
        yield word, None
        plain, equals, value = word.partition("=")
        if self.any_dashes:
            yield f"-{word.lstrip('-')}", None
            yield f"--{word.lstrip('-')}", None
        elif word.startswith("--"):
            if equals:
                yield plain, value
            found = [name for name in (*self.arity, *self.aliases) if name.startswith(plain) and name.startswith("--")]
            if len({self.aliases.get(name, name) for name in found}) == 1:
                yield found[0], value if equals else None
        elif self.arity.get(self.aliases.get(word[:2], word[:2])):
            yield word[:2], word[2:].removeprefix("=")


class Options:
    """The options of one line, of which each is asked for once; what nobody asks for is left over."""

    def __init__(self, syntax: Syntax, words: Sequence[str]) -> None:
        self._launcher = syntax.launcher
        self._given, self.program = syntax.take(words)

    def all(self, *names: str) -> list[Given]:
        """Take all options of these names, in the order given."""
        taken = [one for one in self._given if one.name in names]
        self._given = [one for one in self._given if one.name not in names]
        return taken

    def put_back(self, one: Given) -> None:
        """Leave over an option that was taken."""
        self._given.append(one)

    def last(self, *names: str) -> str | None:
        """Take the options of these names and return the value of the last one, which is the one that counts."""
        taken = self.all(*names)
        return (taken[-1].values or ("",))[0] if taken else None

    def flag(self, *names: str, put_back: bool = False) -> bool:
        """Return whether one of these options was given, and take them, unless they are to be left over."""
        if put_back:
            return any(one.name in names for one in self._given)
        return bool(self.all(*names))

    def number(self, *names: str, least: int = 1) -> int | None:
        """Take the options of these names and return the last one's number, or None. Raises LaunchError."""
        text = self.last(*names)
        return None if text is None else number(names[0], text, least)

    def others(self, topics: Mapping[str, str]) -> tuple[Other, ...]:
        """Return what has not been taken, each with its topic."""
        return tuple(Other(self._launcher, one.words, topics.get(one.name, "own")) for one in self._given)


def table(flags: str, values: str, optional: str = "") -> dict[str, int]:
    """Return the arity of options that are listed by their names: without a value, with one, and with one after "="."""
    return dict.fromkeys(flags.split(), 0) | dict.fromkeys(values.split(), 1) | dict.fromkeys(optional.split(), -1)


def topics(**lists: str) -> dict[str, str]:
    """Return the topic of each option, from the options of each topic."""
    return {name: topic for topic, names in lists.items() for name in names.split()}

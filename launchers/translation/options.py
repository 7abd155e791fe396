"""Parser of launcher options, driven by a table of all options that a launcher has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.launchers.errors import LaunchError, did_you_mean
from unitrain.launchers.translation.job import LauncherOption, parse_number
from unitrain.launchers.translation.words import as_typed, without_glob_marks


@dataclass(frozen=True)
class ParsedOption:
    """An option in a command line: its canonical name, its values, and the words as typed."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Syntax:
    """The syntax of a launcher's options.

    Attributes:
        arity: The number of values of each option, by its canonical name with dashes. -1 stands for an optional value,
            which is attached with "=".
        aliases: The canonical names of other spellings.
        accepts_any_dashes: Whether one dash is equivalent to two, as for MPI launchers. Otherwise, long options may be
            abbreviated, and the value of a short option may be attached.
    """

    launcher: str
    arity: Mapping[str, int]
    aliases: Mapping[str, str] = field(default_factory=dict)
    accepts_any_dashes: bool = False

    def parse(self, words: Sequence[str]) -> tuple[list[ParsedOption], tuple[str, ...]]:
        """Return the options at the start of `words`, and the remaining words: the program. Raises LaunchError."""
        parsed: list[ParsedOption] = []
        position = 0
        while position < len(words) and words[position].startswith("-") and words[position] != "-":
            word = without_glob_marks(words[position])
            position += 1
            if word == "--":
                break
            name, value = self._resolve(word)
            count = self.arity[name]
            attached = () if value is None else (value,)
            num_following = 0 if count < 0 else count - len(attached)
            if num_following < 0:
                raise LaunchError(f"{name} of {self.launcher} takes no value, got {as_typed(word)!r}. Write: {name}")
            if position + num_following > len(words):
                raise LaunchError(f"{as_typed(word)} of {self.launcher} lacks its value. Write it after {name}")
            values = tuple(map(without_glob_marks, words[position : position + num_following]))
            parsed.append(ParsedOption(name, (*attached, *values), (word, *values)))
            position += num_following
        if position == len(words):
            raise LaunchError(f"The {self.launcher} command does not name a program. End it as in: python train.py")
        return parsed, tuple(words[position:])

    def _resolve(self, word: str) -> tuple[str, str | None]:
        """Return the canonical name of an option and its attached value. Raises LaunchError for an unknown option."""
        for spelling, value in self._interpretations(word):
            if spelling in self.arity:
                return spelling, value
            if spelling in self.aliases:
                return self.aliases[spelling], value
        name = word.partition("=")[0]
        suggestion = did_you_mean(name, [*self.arity, *self.aliases])
        raise LaunchError(
            f"{self.launcher} has no option {as_typed(name)!r}. {suggestion}Options of the program go after the "
            "program."
        )

    def _interpretations(self, word: str) -> Iterator[tuple[str, str | None]]:
        """Yield the spellings and attached values that `word` may stand for. The first known spelling applies."""
        yield word, None
        if self.accepts_any_dashes:
            yield f"-{word.lstrip('-')}", None
            yield f"--{word.lstrip('-')}", None
            return
        name, equals, value = word.partition("=")
        if equals:  # as in --num-processes=4 or -n=4
            yield name, value
        if word.startswith("--"):
            if (option := self._abbreviated_option(name)) is not None:
                yield option, value if equals else None
        elif self.arity.get(self.aliases.get(word[:2], word[:2])):  # as in -n4
            yield word[:2], word[2:].removeprefix("=")

    def _abbreviated_option(self, prefix: str) -> str | None:
        """Return the long option that `prefix` abbreviates, or None unless exactly one option begins with it."""
        options = [option for option in (*self.arity, *self.aliases) if option.startswith(prefix)]
        is_unique = len({self.aliases.get(option, option) for option in options}) == 1
        return options[0] if is_unique else None


class Options:
    """The options of one command line. A parser takes the options that it supports; `remaining` returns the other
    options."""

    def __init__(self, syntax: Syntax, words: Sequence[str]) -> None:
        self._launcher = syntax.launcher
        self._options, self.program = syntax.parse(words)

    def take_all(self, *names: str) -> list[ParsedOption]:
        """Take all options of these names, in their order in the command line."""
        taken_options = [option for option in self._options if option.name in names]
        self._options = [option for option in self._options if option.name not in names]
        return taken_options

    def put_back(self, option: ParsedOption) -> None:
        """Return a taken option to the remaining options."""
        self._options.append(option)

    def take_last(self, *names: str) -> str | None:
        """Take the options of these names. Return the value of the last one, which overrides the others, or None."""
        taken_options = self.take_all(*names)
        return (taken_options[-1].values or ("",))[0] if taken_options else None

    def take_flag(self, *names: str) -> bool:
        """Take the options of these names, and return whether there were any."""
        return bool(self.take_all(*names))

    def has(self, *names: str) -> bool:
        """Return whether one of these options was given. The option remains."""
        return any(option.name in names for option in self._options)

    def take_number(self, *names: str, minimum: int = 1) -> int | None:
        """Take the options of these names and return the number of the last one, or None. Raises LaunchError."""
        text = self.take_last(*names)
        return None if text is None else parse_number(names[0], text, minimum)

    def take_exports(self) -> tuple[dict[str, str], list[str]]:
        """Take all `-x NAME=value` and `-x NAME`. Return the variables with a value, and the names without one."""
        variables: dict[str, str] = {}
        forwarded: list[str] = []
        for option in self.take_all("-x"):
            name, equals, value = option.values[0].partition("=")
            if equals:
                variables[name] = value
            else:
                forwarded.append(name)
        return variables, forwarded

    def remaining(self, topics: Mapping[str, str]) -> tuple[LauncherOption, ...]:
        """Return the options that were not taken, each with its topic."""
        return tuple(
            LauncherOption(self._launcher, option.words, topics.get(option.name, "other")) for option in self._options
        )


def arity_table(flags: str, with_value: str, optional: str = "") -> dict[str, int]:
    """Return the arity of each option, by name. The arguments are option names, separated by spaces: options in `flags`
    take no value (0), options in `with_value` take one value (1), and the value of options in `optional` is optional
    (-1)."""
    return dict.fromkeys(flags.split(), 0) | dict.fromkeys(with_value.split(), 1) | dict.fromkeys(optional.split(), -1)


def topic_by_option(**options_by_topic: str) -> dict[str, str]:
    """Return the topic of each option, given the option names per topic."""
    return {name: topic for topic, names in options_by_topic.items() for name in names.split()}

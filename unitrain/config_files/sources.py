"""Configuration files: reading them, and finding the line of a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unitrain.errors import ConfigError, did_you_mean
from unitrain.launchers.spec import CONFIG_SUFFIXES

Key = tuple[str | int, ...]
# Limited, because nested aliases can expand a small file to a very large number of values.
_MAX_ENTRIES = 100_000


@dataclass(frozen=True)
class ConfigEntry:
    """A key of a file, such as ("callbacks", 0, "init_args"), its line, and its value if it is a scalar."""

    key: Key
    line: int
    value: str | None


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file: its path, content, and keys."""

    path: Path
    content: dict[str, Any]
    entries: Sequence[ConfigEntry]

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a YAML or JSON file. Raises ConfigError if it does not exist or is invalid.

        For a syntax error, the message contains the line.
        """
        if path.suffix == ".py":
            raise ConfigError(
                f"'{path}' is a Python script, not a configuration file. Run it with: python {path}, or with: "
                f"unitrain launch {path}"
            )
        try:
            _check_file(path)
            loader = _LimitedLoader(path.read_text(encoding="utf-8"))
            node = loader.get_single_node()
            # Counted before the values are created, because merge keys and aliases multiply them.
            if node is not None and _count_entries(node, {}) > _MAX_ENTRIES:
                raise _TooManyEntriesError
            # Read before the values are created, because the loader replaces merge keys by the merged keys.
            entries = () if node is None else tuple(_entries(path, node, ()))
            content = None if node is None else loader.construct_document(node)
        except _TooManyEntriesError:
            raise ConfigError(
                f"{path}: the file contains more than {_MAX_ENTRIES} values, including repeated aliases. Use fewer "
                "aliases, or read large data from another file."
            ) from None
        except ConfigError:
            raise
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = "" if mark is None else f", line {mark.line + 1}"
            raise ConfigError(
                f"{path}{line}: {error.problem or error.context}. Correct the YAML syntax, as in batch_size: 32"
            ) from None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"Cannot read configuration file '{path}': {error}. Use a YAML file.") from None
        except RecursionError:
            raise _nesting_error(path) from None
        if node is None:
            raise ConfigError(
                f"{path}: the file contains no keys. Create a complete file with: unitrain train --print_config > "
                "config.yaml"
            )
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}, line {node.start_mark.line + 1}: the file contains a value of type {type(content).__name__}. "
                "Use a mapping of keys and values, as in batch_size: 32"
            )
        return cls(path, content, entries)

    def location(self, entry: ConfigEntry) -> str:
        """Return "file, line N"."""
        return f"{self.path}, line {entry.line}"

    def find(self, names: Sequence[str], value: str | None = None) -> ConfigEntry | None:
        """Return the first entry whose key starts with the first of `names` and contains the others in order.

        If several entries match, one with this `value` is preferred. If no entry matches, names are removed from the
        end of `names` until one matches. Return None if the file does not contain the first of `names`.
        """
        for count in range(len(names), 0, -1):
            matches = [entry for entry in self.entries if _contains(entry.key, names[:count])]
            if matches:
                same_value = [entry for entry in matches if value is not None and entry.value == value]
                return (same_value or matches)[0]
        return None


def read_value(key: Key, text: str) -> Sequence[ConfigEntry]:
    """Return the entries of `text`, the YAML value that the command line gives for the key `key`.

    Raises yaml.YAMLError, ConfigError or RecursionError if it is invalid.
    """
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        return ()
    entry = ConfigEntry(key, 1, node.value if isinstance(node, yaml.ScalarNode) else None)
    return (entry, *_entries(Path("options"), node, key))


class _TooManyEntriesError(Exception):
    """A file has more than _MAX_ENTRIES entries."""


class _LimitedLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Loader that raises _TooManyEntriesError while it reads a file with more than _MAX_ENTRIES entries."""

    _count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if index is not None:  # neither the document nor a key
            self._count += 1
            if self._count > _MAX_ENTRIES:
                raise _TooManyEntriesError
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _count_entries(node: yaml.Node, counts: dict[yaml.Node, int | None]) -> int:
    """Return the number of entries below `node`. The entries of an alias count at each of its uses.

    `counts` contains the result of each node, or None while its entries are counted. Raises RecursionError if an alias
    contains itself.
    """
    if isinstance(node, yaml.ScalarNode):
        return 0
    if node not in counts:
        counts[node] = None
        # The items of a sequence, or the (key, value) pairs of a mapping.
        items = [(item,) for item in node.value] if isinstance(node, yaml.SequenceNode) else node.value
        counts[node] = sum(1 + sum(_count_entries(part, counts) for part in item) for item in items)
    count = counts[node]
    if count is None:
        raise RecursionError
    return count


def _check_file(path: Path) -> None:
    """Raise ConfigError if `path` is not a file, or OSError if it cannot be accessed."""
    if path.is_file():
        return
    problem = "does not exist"
    if path.exists():
        problem = "is not a file"
    elif path.is_symlink():
        problem = "is a symbolic link to a file that does not exist"
    entries = path.parent.glob("*")
    file_names = [entry.name for entry in entries if entry.suffix in CONFIG_SUFFIXES and entry.name != path.name]
    raise ConfigError(
        f"Configuration file '{path}' {problem}. {did_you_mean(path.name, file_names)}Create one with: unitrain train "
        "--print_config > config.yaml"
    )


def _nesting_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: the values are nested too deeply, or an alias contains itself. Reduce the nesting, or replace the "
        "alias with a plain value, for example callbacks: []"
    )


def _contains(key: Key, names: Sequence[str]) -> bool:
    if not key or key[0] != names[0]:
        return False
    remaining_key = iter(key)
    return all(name in remaining_key for name in names)


def _entries(path: Path, node: yaml.Node, key: Key) -> Iterator[ConfigEntry]:
    """Yield the entries below `node`, in the order of the file. Raises ConfigError for a repeated key."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for name, value in node.value:
            text, line = str(name.value), name.start_mark.line + 1
            if text in lines:
                raise ConfigError(
                    f"{path}, line {line}: {text}: the key is already set in line {lines[text]}. Remove one of them."
                )
            lines[text] = line
            inner = (*key, text)
            yield ConfigEntry(inner, line, value.value if isinstance(value, yaml.ScalarNode) else None)
            yield from _entries(path, value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = (*key, index)
            scalar = value.value if isinstance(value, yaml.ScalarNode) else None
            yield ConfigEntry(inner, value.start_mark.line + 1, scalar)
            yield from _entries(path, value, inner)

"""Signed messages between the ranks of a job via a torch Store. Any program that reaches the store's port can write to
the store."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from unitrain.bootstrap.authentication import seal, unseal
from unitrain.bootstrap.responsive_store import ResponsiveStore
from unitrain.errors import AuthenticationError

# Maximum number of attempts to replace the value of another program atomically.
_MAX_REPLACED_VALUES = 4


class MessageStore:
    """A torch Store whose values are signed with the job's key, if this process has one. `check` and `lines` ignore
    values without a valid signature, `compare_set` replaces them, and `get` raises AuthenticationError.

    A signature is valid for one key in one `namespace`. The values of the keys in `counters` are integers without a
    signature, so any program can change them.
    """

    def __init__(self, store: dist.Store | ResponsiveStore, namespace: str, counters: Iterable[str] = ()) -> None:
        self._store, self._namespace, self._counters = store, namespace, frozenset(counters)

    def set(self, key: str, text: str) -> None:
        """Set `key` to `text`."""
        self._store.set(key, self._seal(key, text))

    def get(self, key: str) -> bytes:
        """Wait for `key` and return its text as bytes. Raises AuthenticationError if another program wrote the
        value."""
        return self._unseal(key, self._store.get(key)).encode()

    def check(self, keys: list[str]) -> bool:
        """Return whether ranks of this job have written all `keys`."""
        return self._store.check(keys) and all(key in self._counters or self._is_authentic(key) for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` unless a rank has already set it; return the text of `key` as bytes. `expected` must
        be empty.

        A value of another program is replaced atomically, so all ranks return the same text. The value is
        replaced unconditionally only if the other program writes repeatedly or its value is not text.
        """
        assert not expected
        sealed, replaced = self._seal(key, desired), ""
        for _ in range(_MAX_REPLACED_VALUES):
            stored = self._store.compare_set(key, replaced, sealed)
            try:
                return self._unseal(key, stored).encode()
            except AuthenticationError:
                replaced = stored.decode(errors="replace")
        self._store.set(key, sealed)  # the other program writes repeatedly, or its value is not text
        return desired.encode()

    def append(self, key: str, line: str) -> None:
        """Append a line to the value of `key`."""
        self._store.append(key, self._seal(key, line) + "\n")  # type: ignore[union-attr]  # missing in torch's stubs

    def lines(self, key: str) -> list[str]:
        """Return the lines that ranks have appended to `key`. Lines of other programs are ignored."""
        return [line for line in self._unsealed_lines(key) if line is not None]

    def has_rejected_lines(self, key: str) -> bool:
        """Return whether a line at `key` fails the verification with the key of this process."""
        return None in self._unsealed_lines(key)

    def _unsealed_lines(self, key: str) -> list[str | None]:
        """Return the lines at `key`, and None for each line without a valid signature."""
        if not self._store.check([key]):
            return []
        lines: list[str | None] = []
        for line in filter(None, self._store.get(key).split(b"\n")):
            try:
                lines.append(self._unseal(key, line))
            except AuthenticationError:
                lines.append(None)
        return lines

    def add(self, counter: str, amount: int) -> int:
        """Add `amount` to a counter and return its new value."""
        return self._store.add(counter, amount)

    def _is_authentic(self, key: str) -> bool:
        try:
            self.get(key)
        except AuthenticationError:
            return False
        return True

    def _seal(self, key: str, text: str) -> str:
        return seal(text, f"{self._namespace}/{key}")

    def _unseal(self, key: str, sealed: bytes) -> str:
        return unseal(sealed, f"{self._namespace}/{key}")

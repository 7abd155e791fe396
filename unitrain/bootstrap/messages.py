"""Messages of this job's ranks in a torch store, which any program that reaches its port can read and write."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from unitrain.bootstrap.authentication import seal, unseal
from unitrain.errors import AuthenticationError


class MessageStore:
    """Signs the values that it writes to `store`, and ignores those that were not signed with the job's key.

    `namespace` distinguishes its keys from those of other message stores. The numbers that `add` counts are not signed:
    a key in `counters` can be changed by any program.
    """

    def __init__(self, store: dist.Store, namespace: str, counters: Iterable[str] = ()) -> None:
        self._store, self._namespace, self._counters = store, namespace, frozenset(counters)

    def set(self, key: str, text: str) -> None:
        """Set `key` to `text`."""
        self._store.set(key, self._seal(key, text))

    def get(self, key: str) -> bytes:
        """Return the text of `key`, after waiting for it. Raises AuthenticationError for a value of another program."""
        return self._unseal(key, self._store.get(key)).encode()

    def check(self, keys: list[str]) -> bool:
        """Return whether all `keys` have values that this job's ranks have written."""
        return self._store.check(keys) and all(key in self._counters or self._is_ours(key) for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` unless a rank has set it before; return its text. `expected` must be empty."""
        assert not expected
        found = self._store.compare_set(key, "", self._seal(key, desired))
        try:
            return self._unseal(key, found).encode()
        except AuthenticationError:
            self._store.set(key, self._seal(key, desired))
            return desired.encode()

    def append(self, key: str, line: str) -> None:
        """Append a line to the value of `key`."""
        self._store.append(key, self._seal(key, line) + "\n")  # type: ignore[attr-defined]  # missing in torch's stubs

    def lines(self, key: str) -> list[str]:
        """Return the lines that ranks have appended to `key`, without those of other programs."""
        if not self._store.check([key]):
            return []
        found = []
        for line in self._store.get(key).split(b"\n"):
            try:
                found += [self._unseal(key, line)] if line else []
            except AuthenticationError:
                continue
        return found

    def add(self, counter: str, number: int) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(counter, number)

    def _is_ours(self, key: str) -> bool:
        try:
            self.get(key)
        except AuthenticationError:
            return False
        return True

    def _seal(self, key: str, text: str) -> str:
        return seal(text, f"{self._namespace}/{key}")

    def _unseal(self, key: str, sealed: bytes) -> str:
        return unseal(sealed, f"{self._namespace}/{key}")

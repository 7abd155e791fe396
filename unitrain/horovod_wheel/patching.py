"""Patches as data: replacements in source files, and the functions that apply and display them."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unitrain.errors import HorovodBuildError


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A replacement in one source file. `before` must occur exactly once."""

    file: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A patch: its reason and its edits."""

    name: str
    kind: Literal["build", "fix"]
    reason: str
    edits: tuple[Edit, ...]


def runtime_fixes(patches: Sequence[Patch]) -> tuple[str, ...]:
    """Return the names of the patches that fix behavior at run time."""
    return tuple(patch.name for patch in patches if patch.kind == "fix")


def patch_digest(patches: Sequence[Patch]) -> str:
    """Return a short digest of all edits, which is part of a wheel's cache key."""
    parts = (part for patch in patches for edit in patch.edits for part in (edit.file, edit.before, edit.after))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def apply_patches(source: Path, patches: Sequence[Patch]) -> tuple[str, ...]:
    """Apply the patches to `source`, and return the names of the newly applied patches.

    Files are written only if all edits succeed.
    """
    texts: dict[str, str] = {}
    applied: list[str] = []
    for patch in patches:
        is_new = [_apply_edit(source, texts, patch, edit) for edit in patch.edits]
        if any(is_new):
            applied.append(patch.name)
    for file, text in texts.items():
        (source / file).write_text(text)
    return tuple(applied)


def _apply_edit(source: Path, texts: dict[str, str], patch: Patch, edit: Edit) -> bool:
    """Store the edited text of a file in `texts`. Return False if the edit had already been applied."""
    path = source / edit.file
    if edit.file not in texts and not path.is_file():
        raise HorovodBuildError(
            f"Patch {patch.name!r} is for {edit.file}, which does not exist in {source}. "
            "Use the unpacked sdist of Horovod 0.28.1."
        )
    text = texts.get(edit.file) or path.read_text()
    # Some `after` texts contain their `before` text, so applied edits are removed before counting.
    occurrences = text.replace(edit.after, "").count(edit.before)
    if edit.after in text and occurrences == 0:
        return False
    if occurrences != 1:
        raise HorovodBuildError(
            f"Patch {patch.name!r} expects this text once in {edit.file}, but it occurs {occurrences} times: "
            f"{edit.before.strip()!r}. Build from the unchanged sdist of Horovod 0.28.1."
        )
    texts[edit.file] = text.replace(edit.before, edit.after)
    return True


def format_diff(patch: Patch) -> Iterator[str]:
    """Yield the lines of a patch as a short diff, for `--dry-run`."""
    for edit in patch.edits:
        yield f"{edit.file}"
        for line in difflib.ndiff(edit.before.splitlines(), edit.after.splitlines()):
            if line[0] in "+-":
                yield f"  {line}"

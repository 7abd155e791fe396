"""The patches for the sources of Horovod 0.28.1: one unified diff per purpose, applied in the order of the file names.

The headers of a file state its purpose: `Kind` and `Reason`. Without the patches of kind `compile`, Horovod cannot be
built with current versions of torch, CMake and Python, without a CUDA toolkit, and in any folder, or its wheel has no
build record. Patches of kind `functional` correct run-time behavior or add features; `unitrain horovod check` reports
whether the installed Horovod includes them.
"""

from __future__ import annotations

import email
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unitrain.errors import HorovodBuildError


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A patch: the headers of its file, and the unified diff."""

    name: str
    kind: str
    reason: str
    diff: str

    def hunks(self) -> Iterator[tuple[str, str, str]]:
        """Yield the file of each hunk, and the text of the hunk before and after the patch."""
        file, before, after = "", "", ""
        for line in self.diff.splitlines(keepends=True):
            if line.startswith(("--- ", "+++ ", "@@ ")):
                if before:
                    yield file, before, after
                before = after = ""
                file = line[6:].rstrip() if line.startswith("+++ b/") else file
                continue
            before += line[1:] if line[0] in " -" else ""
            after += line[1:] if line[0] in " +" else ""
        yield file, before, after


def _read(path: Path) -> Patch:
    text = path.read_text()
    headers, diff = email.message_from_string(text), text.partition("\n\n")[2]
    return Patch(name=path.stem[3:], kind=headers["Kind"], reason=" ".join(headers["Reason"].split()), diff=diff)


PATCHES = tuple(_read(path) for path in sorted(Path(__file__).parent.glob("*.patch")))
RUNTIME_FIXES = tuple(patch.name for patch in PATCHES if patch.kind == "functional")


def patch_digest(patches: Sequence[Patch]) -> str:
    """Return a short digest of the diffs, which is part of a wheel's cache key."""
    return hashlib.sha256("".join(patch.diff for patch in patches).encode()).hexdigest()[:12]


def apply_patches(source: Path, patches: Sequence[Patch]) -> None:
    """Apply the patches to the unpacked sdist in the folder `source`.

    A hunk applies where its text before the patch occurs, which must be exactly one place. Files are written only if
    all hunks apply. Raises HorovodBuildError.
    """
    texts: dict[str, str] = {}
    for patch in patches:
        for file, before, after in patch.hunks():
            path = source / file
            if file not in texts and not path.is_file():
                raise HorovodBuildError(
                    f"Patch {patch.name!r} is for {file}, which does not exist in {source}. "
                    "Use the unpacked sdist of Horovod 0.28.1."
                )
            text = texts.get(file) or path.read_text()
            if (occurrences := text.count(before)) != 1:
                raise HorovodBuildError(
                    f"Patch {patch.name!r} expects this text once in {file}, but it occurs {occurrences} times:\n"
                    f"{before}Build from the unchanged sdist of Horovod 0.28.1."
                )
            texts[file] = text.replace(before, after)
    for file, text in texts.items():
        (source / file).write_text(text)

"""Which files of a folder are left out of its package: what .gitignore and .rayignore say, as git and Ray read them.

A file is left out when one of the two kinds says so. Within a kind the deepest ignore file that knows a path decides,
and in a file the last line that does; what lies in a folder that is left out cannot be taken back in. The .gitignore
files above the folder count as far up as its git repository goes. The patterns themselves are pathspec's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pathspec import GitIgnoreSpec

KINDS = (".gitignore", ".rayignore")
_NOTHING = re.compile(r"^! *$|(?<!\\)(\\\\)*\\$")
"""Lines that git reads as patterns which no name matches, and pathspec as errors: a lone !, a \\ at the end."""

ALWAYS = frozenset({".git", ".hg", ".venv", "venv", "__pycache__"})
"""Never part of a package, wherever they lie: histories, and what other machines cannot use."""


@dataclass(frozen=True, slots=True)
class _Patterns:
    """One ignore file. A path is given to it as seen from its own folder: without `below`, behind `above`."""

    spec: GitIgnoreSpec
    above: str
    below: str

    def says(self, path: str) -> bool | None:
        """True: left out; False: taken back in; None: nothing."""
        return self.spec.check_file(self.above + path.removeprefix(self.below)).include


@dataclass(frozen=True, slots=True)
class Ignored:
    """What holds in one folder. kinds: for each kind the ignore files that count there, the deepest last."""

    kinds: tuple[tuple[_Patterns, ...], ...]

    @classmethod
    def above(cls, folder: Path) -> Self:
        """What the git repository around the folder says, which does not reach the folder's own files. Raises OSError.

        folder: absolute. Nothing where the repository leaves the folder out as a whole: it was named all the same.
        """
        found: list[_Patterns] = []
        repository = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)
        between = [one for one in (*reversed(folder.parents), folder) if one.is_relative_to(repository)]
        for outer in between[:-1]:
            spec = _read(outer / KINDS[0])
            if spec is not None:
                found.append(_Patterns(spec, f"{folder.relative_to(outer).as_posix()}/", ""))
        made = cls((tuple(found), ()))
        return cls(((), ())) if made.leaves_out("") else made

    def inside(self, folder: Path, path: str) -> Ignored:
        """The same with what the ignore files of a folder below say. path: of it, with a slash; "" for the top.

        Raises OSError, ValueError (a pattern that cannot be read).
        """
        specs = [_read(folder / name) for name in KINDS]
        return Ignored(
            tuple(
                (*known, _Patterns(spec, "", path)) if spec is not None else known
                for known, spec in zip(self.kinds, specs, strict=True)
            )
        )

    def leaves_out(self, path: str) -> bool:
        """Is it left out? path: from the top of the folder; a folder's ends with a slash."""
        return any(
            next((said for one in reversed(kind) if (said := one.says(path)) is not None), False) for kind in self.kinds
        )


def _read(path: Path) -> GitIgnoreSpec | None:
    try:
        # -sig: the mark with which editors of Windows begin a file is no part of its first line; git skips it too.
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except (FileNotFoundError, IsADirectoryError):
        return None
    lines = [line.removesuffix("\r") for line in text.split("\n")]  # as git ends lines: not at a form feed
    try:
        return GitIgnoreSpec.from_lines(line for line in lines if _NOTHING.search(line) is None)
    except (ValueError, re.error) as error:  # of [z-a], in which git finds a z
        raise ValueError(f"{path}: {error}: mend the pattern, or leave it out") from error

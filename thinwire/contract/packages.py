"""A package: the folder of a script as one zip. What it may hold, for those who pack and take it.

Both sides go by these limits, so that a folder is refused before it is sent, and a zip of another hand when it comes.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

MOST_BYTES = 100 << 20
"""Of the zip: Ray's HTTP API takes no larger body, whatever the service would keep."""
MOST_ENTRIES = 50_000
"""Files and folders."""
MOST_UNPACKED_BYTES = 1 << 30
MOST_RATIO = 100
"""Unpacked to packed, of what unpacks to more than MOST_BYTES: code and text come to 10, made-up zeros to 1000."""
MOST_NAME_BYTES = 1024
_MOST_PART_BYTES = 255  # what file systems take


class Package(BaseModel):
    """A package that the service keeps."""

    sha256: str = Field(description="of the zip; the job file names it in recipe.package")
    bytes: int = Field(description="of the zip")


class PackageList(BaseModel):
    """GET /v1/packages, in order of their hashes."""

    packages: list[Package]
    next: str | None = Field(
        None, description="ask again with after=<this> for those that follow; null: there are none"
    )


def odd_name(name: str) -> str | None:
    """Why a name may not stand in a package, to stand after it; None where it may. Folders end with a slash."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    if not name.isprintable():
        return "holds characters that cannot be printed"
    if size > MOST_NAME_BYTES:
        return f"is longer than {MOST_NAME_BYTES} bytes"
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/") or name[1:2] == ":":
        return "is an absolute path"
    parts = name.removesuffix("/").split("/")
    if ".." in parts:
        return "leads out of the folder"
    if "" in parts or "." in parts:
        return "is not written in the shortest way"
    if any(len(part.encode()) > _MOST_PART_BYTES for part in parts):
        return f"has a part that is longer than {_MOST_PART_BYTES} bytes"
    return None

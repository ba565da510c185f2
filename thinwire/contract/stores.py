"""Which places take checkpoints: what cannot be one, and what errors say of a URL that nothing opens."""

from __future__ import annotations

import os
import re
from pathlib import Path

from thinwire.contract.redaction import redacted

_BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!//)")

SUPPORTED = (
    "A store is an absolute folder that all boxes share, file://, s3://, gs://, abfs:// or hdfs://, or what an fsspec "
    "package that every box has opens, such as sftp:// with paramiko"
)
"""A sentence, after what is wrong."""


def nobody_opens(error: Exception) -> bool:
    """Does pyarrow, which is asked last, say that it knows no such scheme, or is it not there?"""
    return isinstance(error, ImportError) or "Unrecognized filesystem type" in str(error)


def is_local(place: str) -> bool:
    """Is it a path, on whichever machine opens it?"""
    return place.startswith(("/", "file://", "local://"))


def path_of(place: str) -> Path:
    """The path of a local one."""
    return Path(os.path.normpath(place.partition("://")[2] or place))


def misplaced(place: str) -> str | None:
    """What a folder, a file or a URL that all workers open has to be, where this is none; None where it is."""
    if any(ord(one) < 32 or ord(one) == 127 for one in place):
        return "text without control characters"
    if place != place.strip():
        return "without blanks before and behind it"
    scheme, slashes, rest = place.partition("://")
    if not slashes:
        return None if place.startswith("/") else _no_path(place)
    if _SCHEME.fullmatch(scheme) is None:
        return "a URL such as s3://bucket/folder: what stands before :// is a scheme in lower case"
    if scheme in ("file", "local") and not rest.startswith("/"):
        return f"a URL with an absolute path, which has three slashes: {scheme}:///a/folder"
    if scheme in _BUCKETS and not rest.partition("/")[0].partition("?")[0]:
        return f"a URL with a bucket: {scheme}://bucket/folder"
    if not rest.strip("/"):
        return f"a URL that says where, such as {scheme}://place/folder"
    return None


def credentials(place: str) -> str | None:
    """What a place is to be, where it says a user and a password, which everybody who sees the job would read."""
    return _NO_CREDENTIALS if redacted(path := place.partition("?")[0]) != path else None


def any_credentials(place: str) -> str | None:
    """The same of a place that is asked for as long as a job runs: what its query says counts too."""
    return _NO_CREDENTIALS if redacted(place) != place else None


_NO_CREDENTIALS = (
    "without credentials, which everybody who sees the job would read: give them to the boxes, in the environment in "
    "which Ray is started"
)


def _no_path(place: str) -> str:
    found = _ONE_SLASH.match(place)
    if found is None:
        return "an absolute path, or a URL such as s3://bucket/folder"
    scheme = found[1].lower()
    return (
        f"a URL with two slashes behind the colon, such as {scheme}://{'/a' if scheme == 'file' else 'bucket'}/folder"
    )

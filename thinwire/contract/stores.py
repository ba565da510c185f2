"""Which places take checkpoints: what errors say of a URL that nothing here opens."""

from __future__ import annotations

SUPPORTED = (
    "A store is an absolute folder that all boxes share, file://, s3://, gs://, abfs:// or hdfs://, or what an fsspec "
    "package that every box has opens, such as sftp:// with paramiko"
)
"""A sentence, after what is wrong."""


def nobody_opens(error: Exception) -> bool:
    """Does pyarrow, which is asked last, say that it knows no such scheme, or is it not there?"""
    return isinstance(error, ImportError) or "Unrecognized filesystem type" in str(error)

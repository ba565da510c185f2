"""A part of a log file, by bytes: a poll of a log of 100 MB costs what it asks for, not what there is."""

from __future__ import annotations

import codecs
from pathlib import Path

from thinwire.service.launch.protocol import LogChunk


def read_part(path: Path, offset: int, limit: int) -> LogChunk:
    """Up to `limit` bytes from `offset` on; empty where there is no file, or none beyond. Raises OSError."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return decoded(file.read(limit), offset)
    except FileNotFoundError:
        return LogChunk("", offset)


def decoded(data: bytes, offset: int) -> LogChunk:
    """These bytes, which begin at `offset`, as text: a character that they cut off is left for the next part.

    What is not UTF-8 becomes U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return LogChunk(text, offset + len(data) - len(decoder.getstate()[0]))

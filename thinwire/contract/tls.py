"""TLS between the service and those who call it: which certificates are trusted where none of the machine's are meant.

A service whose certificate was signed by a CA of one's own names that in THINWIRE_TLS_CA. Its jobs are given the CA's
certificates with their ticket; they are no secret.
"""

from __future__ import annotations

import base64
import binascii
import ssl
from pathlib import Path

LONGEST_CA = 16 << 10
"""Characters of PEM: they stand in a driver's command line. A CA has one or two thousand, all of a machine 200,000."""


class WrongCa(Exception):
    """The file cannot be used; the message says why and what to do."""


def read_ca(path: Path, name: str = "THINWIRE_TLS_CA") -> str:
    """The certificates in a PEM file. name: of the setting that names it. Raises WrongCa."""
    what = f"{name} is {path}, which must be a file with the certificate of the CA, as PEM"
    try:
        text = path.read_text(encoding="ascii")
        trusting(text)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise WrongCa(f"{what}: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > LONGEST_CA:
        raise WrongCa(f"{what}; it has {len(text)} characters, at most {LONGEST_CA}: name that CA alone")
    return text


def trusting(ca: str) -> ssl.SSLContext:
    """For a client that trusts these certificates, and no others. Raises: ssl.SSLError, ValueError."""
    if not ca.strip():
        raise ValueError("it is empty")
    return ssl.create_default_context(cadata=ca)


def as_word(ca: str) -> str:
    """As one word of a command line."""
    return base64.b64encode(ca.encode()).decode()


def from_word(word: str) -> str:
    """The same back. Raises ValueError."""
    try:
        return base64.b64decode(word, validate=True).decode("ascii")
    except binascii.Error as error:
        raise ValueError(str(error)) from error

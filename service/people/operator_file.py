"""The operator's token, in a file of the home: read when the service starts, and again whenever the file changes."""

from __future__ import annotations

import logging
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from thinwire.contract.files import private_folder, write_private
from thinwire.service.auth import new_token, token_hash

logger = logging.getLogger(__name__)

LEAST_CHARACTERS = 16
LOOK_S = 1.0
"""Between two looks at the file."""


class TokenFileError(Exception):
    """The operator's token file cannot be used; the message says what to do."""


class OperatorToken:
    """The token in the file at `path`, made where it is missing. Methods may be called from any thread.

    A new token in the file holds within LOOK_S; the one before is then refused. A file that is lost or spoilt while the
    service runs changes nothing: the last good one holds. elapsed: seconds of a clock that does not go back.
    Raises: TokenFileError, OSError.
    """

    def __init__(self, path: Path, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._path, self._elapsed = path, elapsed
        self._lock = threading.Lock()
        private_folder(path.parent)
        if not path.exists():
            write_private(path, new_token() + "\n")
        self._seen = _signature(path)
        self.hash = token_hash(_read(path))
        """SHA-256 of the token that holds."""
        self._looked = elapsed()
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            logger.warning("token_readable_by_others path=%s advice='chmod 600 %s'", path, path)

    @property
    def due(self) -> bool:
        """Is it time to look at the file again?"""
        return self._elapsed() - self._looked >= LOOK_S

    def look(self) -> None:
        """Take the token that is in the file now. It may block; nothing is raised."""
        with self._lock:
            self._looked = self._elapsed()
            try:
                seen = _signature(self._path)
                if seen == self._seen:
                    return
                found = token_hash(_read(self._path))
            except (OSError, UnicodeDecodeError, TokenFileError) as error:
                logger.warning("operator_token_not_read path=%s error=%s holds='the last one'", self._path, error)
                return
            if found != self.hash:
                logger.info("operator_token_changed path=%s", self._path)
            self._seen, self.hash = seen, found

    def rotate(self) -> str:
        """Put a new token into the file; it holds at once, the one before no longer. Raises OSError."""
        token = new_token()
        with self._lock:
            write_private(self._path, token + "\n")
            self._seen, self.hash = _signature(self._path), token_hash(token)
        logger.info("operator_token_changed path=%s", self._path)
        return token


def _signature(path: Path) -> tuple[int, int, int]:
    """What differs when the file has been written."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> str:
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < LEAST_CHARACTERS:
        raise TokenFileError(
            f"{path} holds {len(token)} characters, a token needs at least {LEAST_CHARACTERS}: remove the file and "
            "start again to have one made"
        )
    return token

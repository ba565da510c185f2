"""Whose token is it? People's, jobs' and tickets are looked up by their SHA-256, which is indexed.

A wrong token that comes again costs no look-up for some seconds; and an address that sends many different wrong ones is
told to wait (429) before any look-up, unless the token has lately been good. So nobody can keep the database busy by
guessing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import ceil

from sqlalchemy.exc import SQLAlchemyError

from thinwire.service.auth import Caller, token_hash
from thinwire.service.db import Database
from thinwire.service.errors import TooManyWrongTokens, Unauthorized
from thinwire.service.jobs.rate import Rates
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.people.tokens import PREFIX, Tokens

WRONG_S, GOOD_S = 5.0, 300.0
"""How long a wrong token is remembered as wrong, and a good one as one that may be looked up."""
MOST_REMEMBERED = 4096
"""Of each kind."""
TICKET_CHARACTERS = 64
"""A ticket follows from its job's token: it may be asked for before it holds, and holds a moment later."""
GUESSES, GUESSES_PER_S = 50.0, 1.0
"""Look-ups of wrong tokens that an address has, and how many it gets back."""


class Callers:
    """Who sends a token. Methods may be called from any thread. elapsed: seconds of a clock that does not go back."""

    def __init__(self, db: Database, tokens: Tokens, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._db, self._tokens, self._elapsed = db, tokens, elapsed
        self._guesses = Rates(burst=GUESSES, rate=GUESSES_PER_S)
        self._wrong, self._good = _Remembered(WRONG_S), _Remembered(GOOD_S)
        self.look_ups = 0
        """So many since the start, for who wants to know what strangers cost."""

    def of(self, token: str, address: str) -> Caller | None:
        """Who has this token or ticket; None where nobody has. It may block.

        Raises: Unauthorized for a token that is over; TooManyWrongTokens; sqlalchemy's errors.
        """
        digest, now = token_hash(token), self._elapsed()
        why = self._wrong.get(digest, now)
        if why is not None:
            if why:
                raise Unauthorized(why)
            return None
        good = self._good.get(digest, now) is not None
        if not good and (wait_s := self._guesses.take(address, 1.0, now)) > 0.0:
            raise TooManyWrongTokens(address, ceil(wait_s))
        self.look_ups += 1
        try:
            caller = self._found(token, digest)
        except Unauthorized as error:
            self._wrong.put(digest, error.message, now)
            raise
        except SQLAlchemyError:
            self._give_back(address, now)
            raise
        if caller is not None:
            self._good.put(digest, "", now)
            if not good:
                self._give_back(address, now)
        elif len(token) != TICKET_CHARACTERS:
            self._wrong.put(digest, "", now)
        return caller

    def _give_back(self, address: str, now: float) -> None:
        """It was no guess."""
        self._guesses.take(address, -1.0, now)

    def _found(self, token: str, digest: str) -> Caller | None:
        with self._db.read() as session:
            # The prefix saves a look-up. One job's token in 16 million begins so, too: then all are looked at.
            if token.startswith(PREFIX) and (person := self._tokens.person(session, digest)) is not None:
                return Caller(person=person)
            jobs = JobRepository(session)
            if (job_id := jobs.id_by_token_hash(digest)) is not None:
                return Caller(job_id)
            if (job_id := jobs.id_by_ticket_hash(digest)) is not None:
                return Caller(job_id, ticket=True)
        return None


class _Remembered:
    """Words about tokens, by their hash: each for some seconds, the newest MOST_REMEMBERED."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._held: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def get(self, digest: str, now: float) -> str | None:
        """What is remembered now; None for nothing."""
        with self._lock:
            until, words = self._held.get(digest, (now, ""))
        return words if until > now else None

    def put(self, digest: str, words: str, now: float) -> None:
        """Remember it from now on."""
        with self._lock:
            self._held.pop(digest, None)
            self._held[digest] = (now + self._keep_s, words)
            while len(self._held) > MOST_REMEMBERED:
                del self._held[next(iter(self._held))]  # the oldest

"""A worker whose process ends at a line of its own choice, of all that it runs in a planned change."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from thinwire.workers.membership import Member


class DiesAtLine:
    """Counts the lines of thinwire that the loop's thread runs from the boundary on at which the generation ends as
    planned, until its next step, or its end; at the at-th the process ends, as a power cut ends it.

    told: the file that has where it died, or how many lines there were.
    """

    def __init__(self, at: int, told: Path):
        self._at, self._told, self._lines, self._armed = at, told, 0, False
        plain = Member.at_boundary

        def at_boundary(member, step):
            if member._state.promise is not None and step >= member._state.stop_at and not self._armed:
                self._armed = True
                sys.settrace(self._call)
            return plain(member, step)

        Member.at_boundary = at_boundary

    def end(self):
        """Nothing is counted any more: the change is over."""
        if self._armed and sys.gettrace() is not None:
            sys.settrace(None)
            self._told.write_text(str(self._lines))

    def _call(self, frame, event, value):
        return self._line if "thinwire" in frame.f_globals.get("__name__", "") else None

    def _line(self, frame, event, value):
        if event == "line":
            self._lines += 1
            if self._lines == self._at:
                code = frame.f_code
                self._told.write_text(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
                os._exit(9)
        return self._line

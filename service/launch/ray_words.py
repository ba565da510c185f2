"""Why has a job never begun? One or two lines for its owner, out of the pages that Ray 2.60 says of it.

What Ray could not make, its runtime environment (contract/environment_words.py), or could not start, the driver's
Python, failed before any process of ours could say why. Each case is known by what Ray or the shell writes.
"""

from __future__ import annotations

import re
from typing import Final

from thinwire.contract.environment_words import last_line, shortened, why_no_environment

_ENVIRONMENT: Final = "RUNTIME_ENV_SETUP_FAILURE"
_ENTRYPOINT: Final = "JOB_ENTRYPOINT_COMMAND_ERROR"
_CANNOT_START: Final = (126, 127)
"""Exit codes of a shell: it may not run the command, or finds none."""

_NO_MODULE = re.compile(r"No module named '?([\w.]+)'?")


def why_never_begun(error_type: str | None, exit_code: int | None, message: str) -> str | None:
    """In at most LONGEST characters; None where the driver has begun, as far as can be seen.

    error_type, exit_code, message: error_type, driver_exit_code and message of a failed job of Ray's Jobs API.
    """
    if error_type == _ENVIRONMENT:
        return why_no_environment(message)
    if error_type != _ENTRYPOINT:
        return None
    if exit_code in _CANNOT_START:
        line = next((line for line in message.splitlines() if line.startswith("/bin/sh: ")), last_line(message))
        return shortened(
            f"the cluster cannot start its Python: {line.removeprefix('/bin/sh: ').strip()}. Where Ray is started, "
            "THINWIRE_PYTHON names it; `thinwire up` does that"
        )
    missing = _NO_MODULE.search(last_line(message))
    if missing is not None:
        return shortened(
            f"the Python that the cluster starts has no module {missing[1]!r}: install thinwire[worker] there, of the "
            "service's version, or let THINWIRE_PYTHON name another Python where Ray is started"
        )
    return None

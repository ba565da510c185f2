"""A box that listens, as `thinwire doctor --listen` does, with a name of its own and what a test plants in it.

python -m tests.tools.doctor.box TOKEN_FILE NAME [CLOCK_SHIFT_S [PACKAGE=VERSION]]; prints its port.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
import time
from pathlib import Path

from thinwire.tools.doctor.facts import Facts, Questions, look
from thinwire.tools.doctor.listener import Listener

CLONE_NEWUTS = 0x04000000
PORT = 7655


def named(name: str) -> None:
    """Give this process a host name that no other sees."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0
    socket.sethostname(name)


def main() -> None:
    token_file, name, *planted = sys.argv[1:]
    named(name)
    shift_s = float(planted[0]) if planted else 0.0
    versions = dict(word.split("=") for word in planted[1:])

    def with_versions(questions: Questions) -> Facts:
        facts = look(questions)
        return facts.model_copy(update={"versions": facts.versions | versions})

    secret = Path(token_file).read_bytes().strip()
    listener = Listener(secret, port=PORT, clock=lambda: time.time() + shift_s, look=with_versions)
    print(listener.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()

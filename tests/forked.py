"""Processes that tests fork from one that has loaded what each needs: imports are most of what a short process costs.

A process that runs tests has one such server, whoever uses it: what it loads first stands here, once, for all of them.
Processes that run tests side by side have that of the one that they are forked from.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from multiprocessing import forkserver

FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["tests.loaded"]
FORKSERVER.set_forkserver_preload(PRELOAD)


def share() -> None:
    """Start the server now: processes that are forked from this one use it, and start and load none of their own."""
    forkserver.ensure_running()
    for name in PRELOAD:
        importlib.import_module(name)  # what these processes would load themselves, such as compiled loops
    os.register_at_fork(after_in_child=_take_for_running)


def load_too(names: list[str]) -> None:
    """From now on this process has a server of its own, which has loaded these modules too."""
    server = forkserver._forkserver
    vars(server).pop("ensure_running", None)
    server._forkserver_pid = server._forkserver_address = None
    FORKSERVER.set_forkserver_preload([*PRELOAD, *names])


def _take_for_running() -> None:
    # What multiprocessing does first is to wait for the server, which only the process that started it can.
    forkserver._forkserver.ensure_running = lambda: None

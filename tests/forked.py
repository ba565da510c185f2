"""Processes that tests fork from one that has loaded what each needs: imports are most of what a short process costs.

A process that runs tests has one such server, whoever uses it: what it loads first stands here, once, for all of them.
"""

from __future__ import annotations

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.loaded"])

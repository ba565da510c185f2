"""Ranks of these tests are forked from a server that has loaded the libraries, where none was started before."""

from __future__ import annotations

from tests.forked import FORKSERVER

FORKSERVER.set_forkserver_preload(["tests.loaded", "tests.integrations.loaded"])

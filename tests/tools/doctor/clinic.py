"""Hosts of a lab with a doctor at each, and what the first one says."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tools.doctor.box import PORT
from thinwire.tools.lab import Lab, LabSpec
from thinwire.tools.lab.processes import HostProcess

START_S = 120.0
NAMES = ("anna", "bert", "carl")
TOKEN = "a token of the tests, long enough"


@dataclass
class Said:
    exit_code: int
    document: dict[str, Any]

    def found(self, kind: str) -> dict[str, Any]:
        """The only finding of this kind."""
        (one,) = [one for one in self.document["findings"] if one["kind"] == kind]
        return one

    @property
    def kinds(self) -> set[str]:
        """Of what hurts."""
        return {one["kind"] for one in self.document["findings"] if one["severity"] != "note"}


class Clinic:
    """hosts: of a lab of so many Mbit/s. `shell` plants a fault; `listen` starts a box; `ask` is the first's doctor."""

    def __init__(self, folder: Path, hosts: int = 2, rate_mbit: float = 50.0) -> None:
        self.lab = Lab(LabSpec(hosts=hosts, rate_mbit=rate_mbit, delay_ms=0.0))
        self._token = folder / "token"
        self._token.write_text(TOKEN)
        self._folder = folder
        self._out: list[int] = []

    def __enter__(self) -> Clinic:
        self.lab.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.lab.close()
        for out in self._out:
            os.close(out)

    def shell(self, host: int, command: str) -> None:
        """In the namespaces of a host; -1: of the switch."""
        pid = self.lab.holder.namespaces[host + 1].pid
        subprocess.run(["nsenter", "-t", str(pid), "-m", "-n", "sh", "-ec", command], check=True)

    def listen(self, host: int, *planted: str, token: str = TOKEN) -> None:
        token_file = self._folder / f"token{host}"
        token_file.write_text(token)
        process, out = self._start(host, ["tests.tools.doctor.box", str(token_file), NAMES[host], *planted])
        assert select.select([out], [], [], START_S)[0], "no box"
        assert os.read(out, 100).strip() == str(PORT).encode(), process.poll()

    def ask(self, *arguments: str, peers: str | None = None) -> Said:
        named = peers or ",".join(self.lab.addresses[1:])
        words = ["tests.tools.doctor.asking", NAMES[0], "--peers", named, "--token-file", str(self._token)]
        process, out = self._start(0, [*words, "--json", "--seconds", "0.6", *arguments])
        with os.fdopen(os.dup(out)) as said:
            text = said.read()
        code = process.wait()
        print(text)
        return Said(code, json.loads(text))

    def _start(self, host: int, module: list[str]) -> tuple[HostProcess, int]:
        out, theirs = os.pipe()
        self._out.append(out)
        try:
            return self.lab.start(host, [sys.executable, "-m", *module], stdout=theirs), out
        finally:
            os.close(theirs)
